"""The Phi-3 family, including Phi-4 and Phi-4-mini: Llama with fused projections."""

from nanovllm.attention.spec import AttentionOptions
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with fused projections; a window if the config
    has one; RoPE may cover only part of a head.
    """

    reads = frozenset({"partial_rotary_factor"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        attention = SelfAttention(
            config,
            self.rotary_emb(config.rope, config.head_dim),
            options=AttentionOptions(window=config.window()),
            fused=True,
        )
        return DecoderLayer(config, attention, GatedMLP(config, fused=True))
