"""Pictures of LFM2-VL: tiles of a large picture and all of it small, and a SigLIP 2 tower."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.features.vision.family import Layout, View, VisionFamily, refuse_options
from nanovllm.features.vision.qwen import blocks_near
from nanovllm.features.vision.tower import LearnedGrid, Merger, TowerConfig, VisionTower
from nanovllm.layers.layernorm import LayerNorm
from nanovllm.models.parts import activation_of
from nanovllm.options.validation import check_bool, check_float, check_int

_SIZES = {
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "min_tiles": 2,
    "max_tiles": 10,
    "tile_size": 512,
}
"""What preprocessor_config.json may say, and requests, too."""


class Lfm2VL(VisionFamily):
    """LFM2-VL and LFM2.5-VL.

    A picture of at most twice 256 tokens is resized to 64 to 256 of them. A larger one becomes 2 to
    10 tiles of 512 x 512 pixels in about its form, and is resized besides (transformers'
    Lfm2VlImageProcessor, but on Pillow).
    """

    resample = "bilinear"
    marker = soft_token = "<image>"

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(config, processor)
        self.patch = self.size("patch_size", 16, high=256)
        self.merge = self.field("downsample_factor", 2, check_int, 1, 16)
        self.mean = tuple(processor.get("image_mean") or self.mean)
        self.std = tuple(processor.get("image_std") or self.std)

    def sizes(self, options: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes that apply to a request."""
        refuse_options(options, *_SIZES, "do_image_splitting", "use_thumbnail")
        found = {}
        for name, default in _SIZES.items():
            value = self.processor.get(name, default)
            value = check_int(CheckpointError, f"preprocessor_config.json: {name}", value, 1)
            found[name] = check_int(InvalidRequestError, name, options.get(name, value), 1, 4096)
        return found

    def flag(self, name: str, options: Mapping[str, Any]) -> bool:
        """Return a switch that applies to a request."""
        value = self.processor.get(name, True)
        value = check_bool(CheckpointError, f"preprocessor_config.json: {name}", value)
        return check_bool(InvalidRequestError, name, options.get(name, value))

    def layout(self, width: int, height: int, options: Mapping[str, Any]) -> Layout:
        sizes = self.sizes(options)
        most = sizes["max_image_tokens"]
        block = self.patch * self.merge
        pixels = (sizes["min_image_tokens"] * block**2, most * block**2)
        rows, columns = blocks_near((height, width), block, *pixels, fewest=1)
        tolerance = self.processor.get("max_pixels_tolerance", 2.0)
        tolerance = check_float(CheckpointError, "max_pixels_tolerance", tolerance, 0.0)
        near = [max(self.patch, round(side / block) * block) for side in (height, width)]
        views: list[View] = []
        pieces: list[str | int] = []
        if self.flag("do_image_splitting", options) and math.prod(near) > pixels[1] * tolerance:
            views, pieces = self._tiles(width, height, sizes)
        if not views or self.flag("use_thumbnail", options):
            if rows * columns > most:
                raise InvalidRequestError(
                    f"a picture of {width} x {height} pixels is too narrow: it would take "
                    f"{rows * columns} tokens, max_image_tokens allows {most}; cut it"
                )
            pieces += ["<|img_thumbnail|>"] if views else []
            pieces.append(rows * columns)
            views.append(View(columns * block, rows * block))
        return Layout(tuple(views), ("<|image_start|>", *pieces, "<|image_end|>"))

    def _tiles(
        self, width: int, height: int, sizes: Mapping[str, int]
    ) -> tuple[list[View], list[str | int]]:
        """Return the tiles of a picture, and their text; none, if one tile is best."""
        side = sizes["tile_size"]
        if side % (self.patch * self.merge):
            raise InvalidRequestError(
                f"tile_size {side} must be a multiple of {self.patch * self.merge}"
            )
        rows, columns = _tile_grid(width, height, sizes)
        if rows * columns == 1:
            return [], []
        views = []
        pieces: list[str | int] = []
        for row in range(rows):
            for column in range(columns):
                left, upper = column * side, row * side
                box = (left, upper, left + side, upper + side)
                views.append(View(columns * side, rows * side, box))
                pieces.append(f"<|img_row_{row + 1}_col_{column + 1}|>")
                pieces.append((side // (self.patch * self.merge)) ** 2)
        return views, pieces

    def patches(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.blocks(pixels).permute(0, 2, 3, 1).flatten(1)

    def make_tower(self) -> VisionTower:
        eps = self.vision_config.get("layer_norm_eps", 1e-6)
        hidden = self.size("hidden_size", 768)
        activation = self.vision_config.get("hidden_act", "gelu_pytorch_tanh")
        config = TowerConfig(
            num_layers=self.size("num_hidden_layers", 12, high=256),
            hidden_size=hidden,
            intermediate_size=self.size("intermediate_size", 3072),
            num_heads=self.size("num_attention_heads", 12, high=1024),
            patch_shape=(3 * self.patch**2,),
            activation=activation_of(activation, "hidden_act"),
            eps=check_float(CheckpointError, "config.json: layer_norm_eps", eps, 0.0),
            merge=self.merge,
            norm_last=True,
        )
        norm = self.field("projector_use_layernorm", True, check_bool)
        merger = Merger(
            config,
            self.merge**2,
            self.text_size,
            LayerNorm(hidden * self.merge**2, 1e-5) if norm else None,
            inner_size=self.field("projector_hidden_size", 2560, check_int, 1),
            bias=self.field("projector_bias", True, check_bool),
            activation=activation_of(
                self.config.get("projector_hidden_act", "gelu"), "projector_hidden_act"
            ),
        )
        positions = LearnedGrid(self.size("num_patches", 256), hidden, self.merge, antialias=True)
        tower = VisionTower(config, positions, merger)
        tower.places = ("model.", "")
        tower.parts = ("vision_tower.", "multi_modal_projector.")
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


def _tile_grid(width: int, height: int, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the rows and columns of tiles whose form is nearest to the picture's, and of equal
    forms the larger one if the picture has more than half of its pixels.
    """
    fewest, most = sizes["min_tiles"], sizes["max_tiles"]
    grids = {
        (columns, rows)
        for number in range(fewest, most + 1)
        for columns in range(1, number + 1)
        for rows in range(1, number + 1)
        if fewest <= columns * rows <= most
    }
    best, least = (1, 1), math.inf
    for columns, rows in sorted(grids, key=math.prod):
        difference = abs(width / height - columns / rows)
        has_enough = width * height > 0.5 * sizes["tile_size"] ** 2 * columns * rows
        if difference < least or (difference == least and has_enough):
            best, least = (columns, rows), difference
    return best[1], best[0]
