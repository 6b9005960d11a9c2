"""The Llama family's layers. The decoder itself is in decoder.py."""

from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import attention_biases


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 2 and 3, TinyLlama, SmolLM2: biases in attention and MLP if the config says so."""

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        attention = SelfAttention(config, rotary_emb, **attention_biases(config))
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.flag("mlp_bias")))
