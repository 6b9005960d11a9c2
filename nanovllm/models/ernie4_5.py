"""The ERNIE 4.5 family: Llama whose rotary embedding pairs adjacent numbers of a head."""

from typing import ClassVar

from torch import nn

from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig


class Ernie4_5ForCausalLM(DecoderForCausalLM):
    """ERNIE 4.5 0.3B: Llama with rotary pairs of adjacent numbers; biases if the config says so."""

    interleaved: ClassVar[bool] = True

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        bias = config.flag("use_bias")
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        attention = SelfAttention(config, rotary_emb, bias=bias, output_bias=bias)
        return DecoderLayer(config, attention, self.make_mlp(config, index, bias))

    def make_mlp(self, config: ModelConfig, index: int, bias: bool) -> nn.Module:
        """Return the MLP of layer `index`, or its experts."""
        return GatedMLP(config, bias=bias)
