"""The Qwen2 family: what its layers have. The decoder itself is in decoder.py."""

from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2 and Qwen2.5: q, k and v always have a bias, no other linear has one."""

    @staticmethod
    def make_layer(config: ModelConfig, rotary_emb: RotaryEmbedding) -> DecoderLayer:
        attention = SelfAttention(
            config, rotary_emb, qkv_bias=True, output_bias=False, qk_norm=False
        )
        return DecoderLayer(config, attention, GatedMLP(config, bias=False))
