"""The Qwen2 family's layers. The decoder itself is in decoder.py."""

from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import OTHER_MODALITIES


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2 and Qwen2.5: q, k and v always have a bias, other linears never do."""

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        attention = SelfAttention(config, rotary_emb, bias=True)
        return DecoderLayer(config, attention, GatedMLP(config))


class Qwen2_5_VLForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2.5-VL, with pictures: Qwen2, whose three position numbers are equal for text."""

    reads = frozenset({"mrope_section"})
    ignores = frozenset({"head_dim"})
    left_out = OTHER_MODALITIES
