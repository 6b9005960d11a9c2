"""Pictures of Mistral Small 3.1 and Ministral 3: Pixtral's tower, and a token after each row."""

import math
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.features.vision.family import (
    CLIP_MEAN,
    CLIP_STD,
    Layout,
    View,
    VisionFamily,
    refuse_options,
)
from nanovllm.features.vision.tower import Merger, TowerConfig, VisionTower
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import inverse_frequencies
from nanovllm.models.config_fields import config_number
from nanovllm.models.parts import activation_of
from nanovllm.options.validation import check_bool, check_int, unsupported


class Pixtral(VisionFamily):
    """Mistral Small 3.1 and Ministral 3.

    A picture whose longest side is above a limit is made smaller, none is made larger. Then the
    sides grow to multiples of 28 pixels (transformers' PixtralImageProcessor).
    """

    marker = soft_token = "[IMG]"
    mean, std = CLIP_MEAN, CLIP_STD

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(config, processor)
        self.patch = self.size("patch_size", 16, high=256)
        self.merge = self.field("spatial_merge_size", 2, check_int, 1, 16)

    def limit(self, options: Mapping[str, Any]) -> int:
        """Return the pixels of the longest side, at most."""
        size = self.processor.get("size") or {}
        most = size.get("longest_edge") or self.vision_config.get("image_size", 1024)
        check_int(CheckpointError, "preprocessor_config.json: size.longest_edge", most, 1)
        refuse_options(options, "longest_edge")
        return check_int(InvalidRequestError, "longest_edge", options.get("longest_edge", most), 1)

    def layout(self, width: int, height: int, options: Mapping[str, Any]) -> Layout:
        most = self.limit(options)
        ratio = max(max(width, height) / most, 1.0)
        sides = [math.floor(side / ratio) for side in (height, width)]
        if not all(sides):
            raise InvalidRequestError(
                f"a picture of {width} x {height} pixels: one side may be at most {most} times the "
                "other, so that something is left of both; cut it"
            )
        factor = self.patch * self.merge
        rows, columns = (math.ceil(side / factor) for side in sides)
        pieces = (columns, "[IMG_BREAK]") * (rows - 1) + (columns, "[IMG_END]")
        return Layout((View(columns * factor, rows * factor),), pieces)

    def make_tower(self) -> VisionTower:
        if (layer := self.config.get("vision_feature_layer", -1)) != -1:
            raise unsupported("config.json: vision_feature_layer", layer, "-1")
        config = TowerConfig(
            **self.sizes(24, 1024, 4096, 16),
            patch_shape=(3, self.patch, self.patch),
            activation=activation_of(self.vision_config.get("hidden_act", "gelu"), "hidden_act"),
            eps=1e-5,
            norm=RMSNorm,
            bias=False,
            gated=True,
            patch_bias=False,
            norm_first=True,
        )
        eps = config_number(self.config.get("text_config") or {}, "rms_norm_eps", 1e-5, 0.0, 1.0)
        merger = Merger(
            config,
            self.merge**2,
            self.text_size,
            RMSNorm(config.hidden_size, eps),
            inner_size=self.text_size,
            bias=self.field("multimodal_projector_bias", False, check_bool),
            activation=activation_of(self.config.get("projector_hidden_act", "gelu"), "projector"),
            mixes=True,
        )
        inv_freq = inverse_frequencies(config.head_dim, self.rope_theta(10000.0))
        # Rows take the even frequencies, columns the odd ones.
        tower = VisionTower(config, None, merger, inv_freq=inv_freq.view(-1, 2).T)
        tower.places = ("model.", "")
        tower.parts = ("vision_tower.", "multi_modal_projector.")
        tower.names = {
            r"^merger\.mixer": "multi_modal_projector.patch_merger.merging_layer",
            r"^merger\.linear_fc": "multi_modal_projector.linear_",
            r"^merger": "multi_modal_projector",
            r"^patch_embed": "vision_tower.patch_conv",
            r"^norm_first": "vision_tower.ln_pre",
            r"^layers": "vision_tower.transformer.layers",
            r"\.attn\.proj": ".attention.o_proj",
            r"\.attn\.": ".attention.",
            r"\.norm1": ".attention_norm",
            r"\.norm2": ".ffn_norm",
            r"\.mlp\.fc2": ".feed_forward.down_proj",
            r"\.mlp\.": ".feed_forward.",
        }
        return tower
