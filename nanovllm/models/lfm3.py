"""The LFM3 family: short convolutions, windows and full attention in turn."""

from typing import ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.hybrid_parts import check_mixed, short_conv
from nanovllm.models.lfm2 import LFM_NAMES
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import (
    NarrowGateAttention,
    SandwichLayer,
    attention_biases,
)


class Lfm3ForCausalLM(DecoderForCausalLM):
    """LFM3 1.7B: norms on both sides; half of the layers are short convolutions, which keep a
    state; the others have attention with a gate for each head, and half of those a window.
    """

    names: ClassVar[dict[str, str]] = LFM_NAMES
    aliases: ClassVar[dict[str, str]] = {"rms_norm_eps": "norm_eps"}
    ignores = frozenset({"partial_rotary_factor"})  # but not in rope_parameters
    reads = frozenset({"layer_types", "rope_parameters", "partial_rotary_factor"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        default = ["conv", *_KINDS * config.num_layers][: config.num_layers]
        kind = check_mixed(config.layer_types_of(_KINDS, default))[index]
        mixer = short_conv(config) if kind == "conv" else self.make_attention(config, kind)
        sandwich = config.flag("use_sandwich_norm", default=True)
        return (SandwichLayer if sandwich else DecoderLayer)(config, mixer, GatedMLP(config))

    def make_attention(self, config: ModelConfig, kind: str) -> SelfAttention:
        """Return the attention of a layer of type `kind`."""
        gated = config.flag("use_attention_gate", default=True)
        window = config.size("sliding_window") if kind == "sliding_attention" else None
        return (NarrowGateAttention if gated else SelfAttention)(
            config,
            self.rotary_emb(config.rope_of(kind), config.head_dim),
            qk_norm=True,
            options=AttentionOptions(window=window),
            **attention_biases(config),
        )

    def published_names(self, name: str) -> tuple[str, ...]:
        return (name.replace("self_attn.gate_proj.", "self_attn.g_proj."),)


_KINDS = ("conv", "full_attention", "conv", "sliding_attention")
"""The types of four layers after the first, which is a convolution, too."""
