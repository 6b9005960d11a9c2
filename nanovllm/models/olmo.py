"""The Olmo families: norms only after attention and MLP, and over all heads together."""

from typing import Any, ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import SANDWICH, SandwichLayer, WideNormAttention, attention_biases


class Olmo2ForCausalLM(DecoderForCausalLM):
    """Olmo 2: norms only after attention and MLP, and over all query heads and all key heads."""

    names: ClassVar[dict[str, str]] = SANDWICH
    norm: ClassVar[dict[str, Any]] = {"kind": NORM_WIDE}

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        return _layer(self, config, "full_attention", None)


class Olmo3ForCausalLM(DecoderForCausalLM):
    """Olmo 3: Olmo 2 with a window in three of four layers, and rope scaling in the fourth."""

    names: ClassVar[dict[str, str]] = SANDWICH
    norm: ClassVar[dict[str, Any]] = {"kind": NORM_WIDE}
    reads = frozenset({"layer_types", "rope_parameters"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        return _layer(self, config, config.layer_types(4)[index], config.windows(4)[index])


def _layer(
    model: DecoderForCausalLM, config: ModelConfig, layer_type: str, window: int | None
) -> DecoderLayer:
    attention = WideNormAttention(
        config,
        model.rotary_emb(config.rope_of(layer_type), config.head_dim),
        options=AttentionOptions(window=window),
        **attention_biases(config),
    )
    return SandwichLayer(config, attention, GatedMLP(config), before=False, **model.norm)
