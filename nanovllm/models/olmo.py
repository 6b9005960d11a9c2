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
    interval = 0
    """See `ModelConfig.layer_types`."""

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        layer_type = config.layer_types(self.interval)[index]
        attention = WideNormAttention(
            config,
            self.rotary_emb(config.rope_of(layer_type), config.head_dim),
            options=AttentionOptions(window=config.windows(self.interval)[index]),
            **attention_biases(config),
        )
        return SandwichLayer(config, attention, GatedMLP(config), before=False, **self.norm)


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Olmo 3: Olmo 2 with a window in three of four layers, and rope scaling in the fourth."""

    interval = 4
    reads = frozenset({"layer_types", "rope_parameters"})
