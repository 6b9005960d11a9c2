"""The Qwen3 family's layers. The decoder itself is in decoder.py."""

from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3: norms of each query and key head; attention biases if the config says so."""

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        bias = config.flag("attention_bias")
        attention = SelfAttention(config, rotary_emb, bias=bias, output_bias=bias, qk_norm=True)
        return DecoderLayer(config, attention, GatedMLP(config))
