"""The Gemma 4 family, text model only. gemma4_parts.py has the parts that only Gemma 4 has."""

import dataclasses
from typing import Any, ClassVar

from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.layers.attention import Attention
from nanovllm.models.decoder import Decoder, DecoderLayer, GatedMLP
from nanovllm.models.gemma4_parts import (
    Gemma4Attention,
    Gemma4Decoder,
    Gemma4ExpertsLayer,
    Gemma4Layer,
)
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import GELU_TANH, OTHER_MODALITIES, SandwichForCausalLM, gelu_tanh


class Gemma4ForCausalLM(SandwichForCausalLM):
    """Gemma 4, text only: norms on both sides, and of queries, keys and values; five of six layers
    have a window; E2B and E4B have embeddings for each layer, the 26B-A4B has experts.
    """

    left_out = OTHER_MODALITIES
    ignores = frozenset({"partial_rotary_factor"})  # but not in rope_parameters
    norm: ClassVar[dict[str, Any]] = {"kind": NORM_WIDE}
    reads = frozenset(
        {
            *GELU_TANH,
            "enable_moe_block",
            "num_experts",
            "final_logit_softcapping",
            "layer_types",
            "rope_parameters",
            "partial_rotary_factor",
        }
    )

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        self._sources: dict[str, Attention] = {}
        super().__init__(config, max_model_len)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        attention = Gemma4Attention(config, index, self._sources, self.rotary_emb)
        doubled = attention.shares and config.flag("use_double_wide_mlp")
        size = config.intermediate_size * (1 + doubled)
        wide = dataclasses.replace(config, intermediate_size=size)
        mlp = GatedMLP(wide, activation=gelu_tanh(config))
        layer = Gemma4ExpertsLayer if config.flag("enable_moe_block") else Gemma4Layer
        return layer(config, attention, mlp, **self.norm)

    def make_decoder(self, config: ModelConfig, layers: list[DecoderLayer]) -> Decoder:
        return Gemma4Decoder(config, layers, **self.norm)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Gemma 4 E2B, E4B, 31B and 26B-A4B, without images and audio."""


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """Gemma 4 12B, text only."""


class Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedForCausalLM):
    """Gemma 4 12B, without images and audio."""
