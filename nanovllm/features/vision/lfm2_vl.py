"""Pictures of LFM2-VL: tiles of a large picture and all of it small, and a SigLIP 2 tower."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import CheckpointError, InvalidRequestError, NanoVLLMError
from nanovllm.features.vision.family import Layout, View, VisionFamily, refuse_options
from nanovllm.features.vision.qwen import blocks_near
from nanovllm.features.vision.tower import LearnedGrid, Merger, TowerConfig, VisionTower
from nanovllm.layers.layernorm import LayerNorm, Norm
from nanovllm.models.parts import activation_of
from nanovllm.options.validation import check_bool, check_float, check_int, check_text

_RULES: dict[str, bool | int | float] = {
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "do_image_splitting": True,
    "max_pixels_tolerance": 2.0,
    "min_tiles": 2,
    "max_tiles": 10,
    "tile_size": 512,
    "use_thumbnail": True,
}
"""What preprocessor_config.json may say, and a request."""


class Lfm2VL(VisionFamily):
    """LFM2-VL and LFM2.5-VL.

    A picture of at most twice 256 tokens is resized to 64 to 256 of them. A larger one becomes 2 to
    10 tiles of 512 x 512 pixels in about its form, and is resized besides (transformers'
    Lfm2VlImageProcessor, but on Pillow).
    """

    resample = "bilinear"
    marker = soft_token = "<image>"
    channels_last = True

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(config, processor)
        self.patch = self.size("patch_size", 16, high=256)
        self.merge = self.field("downsample_factor", 2, check_int, 1, 16)

    def rule(self, name: str, options: Mapping[str, Any]) -> Any:
        """Return one of `_RULES`, as the request has it, or the checkpoint."""
        where: tuple[type[NanoVLLMError], str] = InvalidRequestError, name
        if name not in options:
            where = CheckpointError, f"preprocessor_config.json: {name}"
        default = _RULES[name]
        value = options.get(name, self.processor.get(name, default))
        if isinstance(default, bool):
            return check_bool(*where, value)
        if isinstance(default, float):
            return check_float(*where, value, 0.0)
        return check_int(*where, value, 1, 4096)

    def layout(self, width: int, height: int, options: Mapping[str, Any]) -> Layout:
        refuse_options(options, *_RULES)
        rules = {name: self.rule(name, options) for name in _RULES}
        block = self.patch * self.merge
        most = rules["max_image_tokens"]
        limits = rules["min_image_tokens"] * block**2, most * block**2
        rows, columns = blocks_near((height, width), block, *limits, fewest=1)
        near = math.prod(max(self.patch, round(side / block) * block) for side in (height, width))
        is_split = rules["do_image_splitting"] and rules["max_tiles"] > 1
        views: list[View] = []
        pieces: list[str | int] = []
        if is_split and near > limits[1] * rules["max_pixels_tolerance"]:
            side = rules["tile_size"]
            if side % block:
                raise InvalidRequestError(f"tile_size {side} must be a multiple of {block}")
            grid = _tile_grid(width, height, rules)
            for row, column in itertools.product(*map(range, grid)):
                box = (column * side, row * side, (column + 1) * side, (row + 1) * side)
                views.append(View(grid[1] * side, grid[0] * side, box))
                pieces += [f"<|img_row_{row + 1}_col_{column + 1}|>", (side // block) ** 2]
        if rules["use_thumbnail"] or not views:
            if rows * columns > most:
                raise InvalidRequestError(
                    f"a picture of {width} x {height} pixels is too narrow: it would take "
                    f"{rows * columns} tokens, max_image_tokens allows {most}; cut it"
                )
            pieces += ["<|img_thumbnail|>"] if views else []
            pieces.append(rows * columns)
            views.append(View(columns * block, rows * block))
        return Layout(tuple(views), ("<|image_start|>", *pieces, "<|image_end|>"))

    def make_tower(self) -> VisionTower:
        eps = self.vision_config.get("layer_norm_eps", 1e-6)
        activation = self.vision_config.get("hidden_act", "gelu_pytorch_tanh")
        config = TowerConfig(
            **self.sizes(12, 768, 3072, 12),
            patch_shape=(3 * self.patch**2,),
            activation=activation_of(activation, "hidden_act"),
            eps=check_float(CheckpointError, "config.json: layer_norm_eps", eps, 0.0),
            norm_last=True,
        )
        hidden = config.hidden_size
        has_norm = self.field("projector_use_layernorm", True, check_bool)
        norm = LayerNorm(hidden * self.merge**2, 1e-5) if has_norm else None
        places = self.size("num_patches", 256)
        positions = LearnedGrid(places, hidden, self.merge, antialias=True)
        tower = VisionTower(config, positions, lfm_merger(self, config, norm, 2560))
        tower.places = ("model.", "")
        own = ("embeddings.", "encoder.", "post_layernorm.")  # not SigLIP's own head
        nested = ("", "vision_model.")  # in files of transformers 4
        tower.parts = (
            *(f"vision_tower.{place}{part}" for place in nested for part in own),
            "multi_modal_projector.",
        )
        tower.names = {
            r"^merger\.norm": "multi_modal_projector.layer_norm",
            r"^merger\.linear_fc": "multi_modal_projector.linear_",
            r"^patch_embed": "vision_tower.embeddings.patch_embedding",
            r"^positions": "vision_tower.embeddings.position_embedding",
            r"^norm_last": "vision_tower.post_layernorm",
            r"^layers": "vision_tower.encoder.layers",
            r"\.attn\.proj": ".self_attn.out_proj",
            r"\.attn\.": ".self_attn.",
            r"\.norm([12])": r".layer_norm\1",
        }
        return tower


def lfm_merger(
    family: VisionFamily, config: TowerConfig, norm: Norm | None, inner_size: int
) -> Merger:
    """Return the projector of LFM2-VL and LFM3-VL, whose fields are the model's.

    Args:
        inner_size: where config.json does not say.
    """
    activation = family.field("projector_hidden_act", "gelu", check_text)
    return Merger(
        config,
        config.merge**2,
        family.text_size,
        norm,
        inner_size=family.field("projector_hidden_size", inner_size, check_int, 1),
        bias=family.field("projector_bias", True, check_bool),
        activation=activation_of(activation, "projector_hidden_act"),
    )


def _tile_grid(width: int, height: int, rules: Mapping[str, int]) -> tuple[int, int]:
    """Return the rows and columns of tiles whose form is nearest to the picture's, and of equal
    forms the larger one if the picture has more than half of its pixels.
    """
    fewest, most = max(rules["min_tiles"], 2), rules["max_tiles"]
    if fewest > most:
        raise InvalidRequestError(f"min_tiles {fewest} must be at most max_tiles, {most}")
    # In a set, as transformers has them: the order of equal ones is that of the set.
    grids = {
        (columns, rows)
        for number in range(fewest, most + 1)
        for columns, rows in itertools.product(range(1, number + 1), repeat=2)
        if fewest <= columns * rows <= most
    }
    best, least = (1, 1), math.inf
    for columns, rows in sorted(grids, key=math.prod):
        difference = abs(width / height - columns / rows)
        has_enough = width * height > 0.5 * rules["tile_size"] ** 2 * columns * rows
        if difference < least or (difference == least and has_enough):
            best, least = (columns, rows), difference
    return best[1], best[0]
