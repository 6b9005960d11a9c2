"""The HunYuan dense family: Llama with norms of queries and keys after RoPE."""

from typing import ClassVar

from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import RotatedNormAttention, attention_biases


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
