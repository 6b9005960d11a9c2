"""The Llama family: what its layers have. The decoder itself is in decoder.py."""

from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 2 and 3, TinyLlama, SmolLM2: biases in attention and MLP if the config says so."""

    @staticmethod
    def make_layer(config: ModelConfig, rotary_emb: RotaryEmbedding) -> DecoderLayer:
        bias = config.attention_bias
        attention = SelfAttention(
            config, rotary_emb, qkv_bias=bias, output_bias=bias, qk_norm=False
        )
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.mlp_bias))
