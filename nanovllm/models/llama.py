"""Llama, and families that differ from it in little: Seed-OSS, SmolLM3 and HunYuan."""

from typing import ClassVar

from nanovllm.attention.spec import AttentionOptions
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import RotatedNormAttention, attention_biases


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 2 and 3, TinyLlama, SmolLM2: biases in attention and MLP if the config says so."""

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        attention = SelfAttention(config, rotary_emb, **attention_biases(config))
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.flag("mlp_bias")))


class SeedOssForCausalLM(DecoderForCausalLM):
    """Seed-OSS-36B: Llama; q, k and v have a bias unless the config says otherwise."""

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        attention = SelfAttention(
            config,
            self.rotary_emb(config.rope, config.head_dim),
            bias=config.flag("attention_bias", default=True),
            output_bias=config.flag("attention_out_bias"),
        )
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.flag("mlp_bias")))


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """SmolLM3: Llama; every fourth layer has no RoPE; windows if the config says so."""

    reads = frozenset({"no_rope_layers", "layer_types", "use_sliding_window"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotates = _rotating_layers(config)
        if config.fields.get("layer_types") is not None:  # then the flag is ignored
            window = config.windows(0)[index]
        else:
            has_window = config.flag("use_sliding_window") and not rotates[index]
            window = config.window() if has_window else None
        rope = config.rope if rotates[index] else None
        attention = SelfAttention(
            config,
            self.rotary_emb(rope, config.head_dim),
            options=AttentionOptions(window=window),
            **attention_biases(config),
        )
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.flag("mlp_bias")))


def _rotating_layers(config: ModelConfig) -> list[bool]:
    """Return for each layer whether it uses RoPE: 1 in the config's list, despite its name."""
    listed = config.per_layer("no_rope_layers")
    if listed is None:
        interval = config.size("no_rope_layer_interval", 4)
        return [number % interval != 0 for number in range(1, config.num_layers + 1)]
    return [bool(rotates) for rotates in listed]


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    """HunYuan dense 0.5B to 7B: Llama with norms of queries and keys after RoPE.

    Its "dynamic" rope scaling with an alpha always has the same angles.
    """

    names: ClassVar[dict[str, str]] = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        biases = attention_biases(config)
        attention = RotatedNormAttention(config, rotary_emb, qk_norm=True, **biases)
        return DecoderLayer(config, attention, GatedMLP(config))
