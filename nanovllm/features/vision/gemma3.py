"""Pictures of Gemma 3: squares of one size, read by SigLIP."""

import math
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.features.vision.family import Layout, View, VisionFamily, refuse_options
from nanovllm.features.vision.tower import LearnedGrid, PooledMerger, TowerConfig, VisionTower
from nanovllm.kernels.torch_math import NORM_CENTRED
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.options.validation import check_int, check_text


class Gemma3(VisionFamily):
    """Gemma 3 4B, 12B and 27B. The tokens of a picture see each other in all layers of the text
    model. Crops of a picture ("pan and scan"), which no published checkpoint asks for, are refused.
    """

    marker = "<start_of_image>"
    spare_token = "<unused98>"
    resample = "bilinear"

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(config, processor)
        if processor.get("do_pan_and_scan"):
            raise UnsupportedModelError(
                "preprocessor_config.json: do_pan_and_scan is true, but pictures are read whole: "
                'set it to false, or start with limit_mm_per_prompt={"image": 0}'
            )
        self.patch = self.size("patch_size", high=256)
        self.side = self.size("image_size", 896, high=2**14)  # of all pictures, in pixels
        self.num_tokens = self.field("mm_tokens_per_image", 256, check_int, 1, 2**20)
        patches = self.side // self.patch
        self.merge = patches // math.isqrt(self.num_tokens)
        if self.merge * math.isqrt(self.num_tokens) != patches or self.side % self.patch:
            raise CheckpointError(
                f"config.json: {self.num_tokens} tokens (mm_tokens_per_image) are no square of "
                f"{self.side} pixels (image_size) in patches of {self.patch} (patch_size)"
            )

    @property
    def soft_token(self) -> str:
        return self.field("image_token", "<image_soft_token>", check_text)

    def layout(self, width: int, height: int, options: Mapping[str, Any]) -> Layout:
        refuse_options(options)
        view = View(self.side, self.side)
        return Layout((view,), (f"\n\n{self.marker}", self.num_tokens, "<end_of_image>\n\n"))

    def tokens_that_see_each_other(self, options: Mapping[str, Any], *, has_window: bool) -> int:
        return self.num_tokens

    def make_tower(self) -> VisionTower:
        eps = float(self.vision_config.get("layer_norm_eps", 1e-6))
        config = TowerConfig(
            **self.sizes(),
            patch_shape=(3, self.patch, self.patch),
            activation="gelu_tanh",
            eps=eps,
            norm_last=True,
        )
        norm = RMSNorm(config.hidden_size, eps, NORM_CENTRED)
        tower = VisionTower(
            config,
            LearnedGrid((self.side // self.patch) ** 2, config.hidden_size, self.merge),
            PooledMerger(config, self.merge**2, self.text_size, norm, transposed=True),
        )
        parts = ("vision_tower.", "vision_tower.vision_model.", "multi_modal_projector.")
        tower.places = tuple(prefix + part for part in parts for prefix in ("", "model."))
        tower.parts = ("embeddings.", "encoder.", "post_layernorm.", "mm_")  # not SigLIP's own head
        tower.names = {
            r"^patch_embed": "embeddings.patch_embedding",
            r"^positions": "embeddings.position_embedding",
            r"^layers": "encoder.layers",
            r"\.attn\.proj": ".self_attn.out_proj",
            r"\.attn\.": ".self_attn.",
            r"\.norm([12])": r".layer_norm\1",
            r"^norm_last": "post_layernorm",
            r"^merger\.norm": "mm_soft_emb_norm",
            r"^merger\.linear\.weight": "mm_input_projection_weight",
        }
        return tower
