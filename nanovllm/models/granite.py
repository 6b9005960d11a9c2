"""The Granite family: Llama with multipliers."""

from torch import nn

from nanovllm.attention.spec import AttentionOptions
from nanovllm.layers.rotary_embedding import RopeConfig
from nanovllm.models.decoder import DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import MultipliedForCausalLM, Multipliers, attention_biases


class GraniteForCausalLM(MultipliedForCausalLM):
    """Granite 3 and 4 (dense): Llama with factors on embedding, scores, residual and logits."""

    reads = frozenset(
        {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
    )

    def read_multipliers(self, config: ModelConfig) -> Multipliers:
        names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        return Multipliers(*(config.number(name, 1.0) for name in names))

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        mixer = self.make_mixer(config, index)
        return DecoderLayer(config, mixer, self.make_mlp(config), **self.norm)

    def make_mixer(self, config: ModelConfig, index: int) -> nn.Module:
        """Return the attention of layer `index`, or what it has in place of it."""
        return self.make_attention(config, config.rope)

    def make_mlp(self, config: ModelConfig) -> nn.Module:
        """Return the MLP of a layer, or its experts."""
        return GatedMLP(config, bias=config.flag("mlp_bias"))

    def make_attention(self, config: ModelConfig, rope: RopeConfig | None) -> SelfAttention:
        """Return the attention of a layer; None: without RoPE."""
        return SelfAttention(
            config,
            self.rotary_emb(rope, config.head_dim),
            options=AttentionOptions(scale=config.number("attention_multiplier", 1.0)),
            **attention_biases(config),
        )
