"""Pictures of Gemma 4: as large as a number of tokens allows, with or without a tower of layers."""

import functools
import math
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.features.vision.family import Layout, View, VisionFamily, refuse_options
from nanovllm.features.vision.tower import (
    PooledMerger,
    SummedTables,
    TowerConfig,
    VisionTower,
    axial_frequencies,
)
from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.layers.layernorm import RMSNorm

_MAX_TOKENS = (70, 140, 280, 560, 1120)
"""Soft tokens of a picture that the models were trained with, at most."""


class Gemma4(VisionFamily):
    """Gemma 4 E2B, E4B, 26B-A4B and 31B.

    The sides become the largest multiples of 48 pixels that keep the picture's shape, with at most
    `max_soft_tokens` squares of these. Where use_bidirectional_attention is "vision", the tokens of
    a picture see each other in layers with a window.
    """

    marker = soft_token = "<|image|>"
    channels_last = True
    reads_colours = False
    both_ways: str | None = None  # the default of use_bidirectional_attention

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(config, processor)
        self.patch = self.size("patch_size", 16, high=256)
        self.merge = self.size("pooling_kernel_size", 3, high=16)
        text = config.get("text_config") or {}
        self.sees_whole = text.get("use_bidirectional_attention", self.both_ways) == "vision"

    def most_tokens(self, options: Mapping[str, Any]) -> int:
        """Return the most soft tokens of a picture.

        Raises:
            InvalidRequestError: an option is unknown, or has another value than the models know.
        """
        refuse_options(options, "max_soft_tokens")
        most: Any = options.get("max_soft_tokens", self.processor.get("max_soft_tokens", 280))
        if most not in _MAX_TOKENS:
            raise InvalidRequestError(
                f"max_soft_tokens must be one of {', '.join(map(str, _MAX_TOKENS))}, got {most!r}"
            )
        return int(most)

    def layout(self, width: int, height: int, options: Mapping[str, Any]) -> Layout:
        most = self.most_tokens(options)
        side = self.side
        factor = math.sqrt(most * side**2 / (height * width))
        rows, columns = (math.floor(factor * length / side) for length in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, most)
        elif columns == 0:
            rows, columns = min(height // width, most), 1
        view = View(columns * side, rows * side)
        return Layout((view,), ("<|image>", rows * columns, "<image|>"))

    @property
    def side(self) -> int:
        """Pixels of a side of what becomes a soft token."""
        return self.patch * self.merge

    def tokens_that_see_each_other(self, options: Mapping[str, Any], *, has_window: bool) -> int:
        return self.most_tokens(options) if self.sees_whole and has_window else 0

    def tower_config(self) -> TowerConfig:
        """Return the sizes of the tower.

        Raises:
            CheckpointError: its heads are of another size, or fewer are of keys.
        """
        hidden = self.size("hidden_size")
        num_heads = self.size("num_attention_heads", high=1024)
        eps = float(self.vision_config.get("rms_norm_eps", 1e-6))
        for name, needed in (("num_key_value_heads", num_heads), ("head_dim", hidden // num_heads)):
            if self.size(name, needed) != needed or hidden % (4 * num_heads):
                raise CheckpointError(
                    f"config.json: vision_config.{name} must be {needed}, by hidden_size {hidden} "
                    f"and num_attention_heads {num_heads}, which must divide a quarter of it"
                )
        return TowerConfig(
            **self.sizes(),
            patch_shape=(3 * self.patch**2,),
            patch_bias=False,
            activation="gelu_tanh",
            eps=eps,
            norm=functools.partial(RMSNorm, kind=NORM_WIDE),
            bias=False,
            gated=True,
            qk_norm=True,
            v_norm=True,
            scale=1.0,
            sandwich=True,
            bounded=bool(self.vision_config.get("use_clipped_linears")),
        )

    def make_tower(self) -> VisionTower:
        config = self.tower_config()
        hidden, merge = config.hidden_size, self.merge
        length = self.size("position_embedding_size", 10240)
        standardized = bool(self.vision_config.get("standardize"))
        options: dict[str, Any] = {"scale": hidden**0.5, "standardized": standardized}
        tower = VisionTower(
            config,
            SummedTables(length, hidden, merge, by_table=True),
            PooledMerger(config, merge**2, self.text_size, eps=config.eps, **options),
            inv_freq=axial_frequencies(config.head_dim, self.rope_theta(100.0)),
        )
        parts = ("vision_tower.", "embed_vision.")
        tower.places = tuple(prefix + part for part in parts for prefix in ("model.", ""))
        tower.names = {
            r"^patch_embed": "patch_embedder.input_proj",
            r"^positions\.weight": "patch_embedder.position_embedding_table",
            r"^layers": "encoder.layers",
            r"\.attn\.(qkv\.)?proj": ".self_attn.o_proj",
            r"\.attn\.(qkv\.)?": ".self_attn.",
            r"\.mlp\.fc1": ".mlp",
            r"\.mlp\.fc2": ".mlp.down_proj",
            r"\.norm1": ".input_layernorm",
            r"\.norm2": ".pre_feedforward_layernorm",
            r"\.after_attn": ".post_attention_layernorm",
            r"\.after_mlp": ".post_feedforward_layernorm",
            r"^merger\.linear": "embedding_projection",
            r"^merger\.": "",
        }
        return tower


class Gemma4Unified(Gemma4):
    """Gemma 4 12B, whose pictures pass no layers of their own."""

    mean = (0.0, 0.0, 0.0)
    std = (1.0, 1.0, 1.0)
    both_ways = "vision"

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(config, processor)
        self.patch, self.merge = self.side, 1

    def make_tower(self) -> VisionTower:
        hidden = self.size("mm_embed_dim", 3840)
        config = TowerConfig(
            num_layers=0,
            hidden_size=hidden,
            intermediate_size=0,
            num_heads=1,
            patch_shape=(3 * self.patch**2,),
            activation="gelu_tanh",
            eps=1e-5,
            norm_first=True,
        )
        eps = float(self.vision_config.get("rms_norm_eps", 1e-6))
        length = self.size("mm_posemb_size", 1120)
        tower = VisionTower(
            config,
            SummedTables(length, hidden, 1, by_table=False),
            PooledMerger(config, 1, self.text_size, eps=eps),
            normed_patches=True,
        )
        parts = ("vision_embedder.", "embed_vision.")
        tower.places = tuple(prefix + part for part in parts for prefix in ("model.", ""))
        tower.names = {
            r"^patch_embed\.norm": "patch_ln",
            r"^patch_embed\.linear": "patch_dense",
            r"^positions\.weight": "pos_embedding",
            r"^norm_first": "pos_norm",
            r"^merger\.linear": "embedding_projection",
        }
        return tower
