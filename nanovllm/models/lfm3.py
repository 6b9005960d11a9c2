"""The LFM3 family: short convolutions, windows and full attention in turn."""

from typing import Any, ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.hybrid_parts import MixerLayer, check_mixed, short_conv
from nanovllm.models.lfm2 import LFM_NAMES
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import NarrowGateAttention, SandwichLayer, attention_biases


class Lfm3ForCausalLM(DecoderForCausalLM):
    """LFM3 1.7B: norms on both sides; of four layers two are short convolutions, which keep a
    state, one has a window and one has full attention, with norms of queries and keys and a gate
    for each head.
    """

    names: ClassVar[dict[str, str]] = {
        **LFM_NAMES,
        "after_attention_norm.": "post_operator_norm.",
        "after_mlp_norm.": "post_ffn_norm.",
    }
    aliases: ClassVar[dict[str, str]] = {"rms_norm_eps": "norm_eps"}
    defaults: ClassVar[dict[str, Any]] = {
        "norm_eps": 1e-5,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    }
    reads = frozenset({"layer_types", "rope_parameters", "partial_rotary_factor"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        default = [_KINDS[number % 4] if number else "conv" for number in range(config.num_layers)]
        kind = check_mixed(config.layer_types_of(_KINDS, default))[index]
        mixer = short_conv(config) if kind == "conv" else self.make_attention(config, kind)
        if config.flag("use_sandwich_norm", default=True):
            return SandwichLayer(config, mixer, GatedMLP(config))
        return MixerLayer(config, mixer, GatedMLP(config))

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


_KINDS = ("sliding_attention", "conv", "full_attention", "conv")
"""The types of four layers. The first layer of all is a convolution, too."""
