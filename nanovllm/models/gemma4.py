"""The Gemma 4 family, its text model alone. gemma4_parts.py has what only its layers have."""

import dataclasses
from typing import Any, ClassVar

import torch

from nanovllm.attention.spec import AttentionOptions
from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.models.decoder import Decoder, DecoderForCausalLM, DecoderLayer, GatedMLP
from nanovllm.models.gemma4_parts import (
    DEFAULTS,
    UNIFIED,
    Gemma4Attention,
    Gemma4Decoder,
    Gemma4ExpertsLayer,
    Gemma4Layer,
    full_attention_sizes,
    source_layer,
)
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import OTHER_MODALITIES, SANDWICH, gelu_tanh, softcapped


class Gemma4ForCausalLM(DecoderForCausalLM):
    """Gemma 4, text alone: norms on both sides, and of queries, keys and values; five of six layers
    have a window; E2B and E4B have embeddings for each layer, the 26B-A4B has experts.
    """

    names: ClassVar[dict[str, str]] = SANDWICH
    left_out = OTHER_MODALITIES
    norm: ClassVar[dict[str, Any]] = {"kind": NORM_WIDE}
    defaults: ClassVar[dict[str, Any]] = DEFAULTS
    reads = frozenset({*DEFAULTS, "layer_types", "partial_rotary_factor"})

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self._cap = config.number("final_logit_softcapping", 0.0)

    def make_layer(
        self, config: ModelConfig, index: int, before: list[DecoderLayer]
    ) -> DecoderLayer:
        types = [*config.layer_types(6)[:-1], "full_attention"]
        layer_type, is_full = types[index], types[index] == "full_attention"
        shares = index >= config.num_layers - config.count("num_kv_shared_layers")
        source, sizes = None, config
        if shares:
            source = source_layer(layer_type, types, before)
        if is_full:
            sizes = full_attention_sizes(config, index)
        rope = sizes.rope_of(layer_type, 1_000_000.0 if is_full else 10_000.0)
        window = None if is_full else config.size("sliding_window")
        attention = Gemma4Attention(
            sizes,
            self.rotary_emb(rope, sizes.head_dim),
            qk_norm=True,
            norm_kind=NORM_WIDE,
            options=AttentionOptions(scale=1.0, window=window),
            parts="q" if shares else "qk" if is_full and config.flag("attention_k_eq_v") else "qkv",
            source=source,
        )
        doubled = shares and config.flag("use_double_wide_mlp")
        size = config.intermediate_size * (1 + doubled)
        wide = dataclasses.replace(config, intermediate_size=size)
        mlp = GatedMLP(wide, activation=gelu_tanh(config))
        layer = Gemma4ExpertsLayer if config.flag("enable_moe_block") else Gemma4Layer
        return layer(config, attention, mlp, **self.norm)

    def make_decoder(self, config: ModelConfig, layers: list[DecoderLayer]) -> Decoder:
        return Gemma4Decoder(config, layers, **self.norm)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return softcapped(super().compute_logits(hidden), self._cap)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Gemma 4 E2B, E4B, 31B and 26B-A4B, without pictures and sound."""


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """Gemma 4 12B, text alone."""

    defaults: ClassVar[dict[str, Any]] = UNIFIED


class Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedForCausalLM):
    """Gemma 4 12B, without pictures and sound."""
