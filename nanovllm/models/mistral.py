"""The Mistral families, including Mistral 3 and Ministral 3: Llama without biases."""

import torch

from nanovllm.attention.spec import AttentionOptions
from nanovllm.layers.rotary_embedding import RopeConfig, RotaryEmbedding
from nanovllm.models.config_fields import config_number
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import OTHER_MODALITIES
from nanovllm.models.rope_fields import rope_settings


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral 7B, Nemo and Small: Llama without biases; a window if the config has one."""

    left_out = OTHER_MODALITIES
    reads = frozenset({"layer_types"})

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        alike = config.fields.get("layer_types") is None
        window = config.window() if alike else config.windows(0)[index]
        options = AttentionOptions(window=window)
        rotary_emb = self.rotary_emb(config.rope, config.head_dim)
        attention = SelfAttention(config, rotary_emb, options=options)
        return DecoderLayer(config, attention, GatedMLP(config))


class GrowingQueries:
    """How queries grow with the logarithm of their position (Llama 4's scaling)."""

    def __init__(self, config: ModelConfig) -> None:
        settings = rope_settings(config.fields, "full_attention")
        self._beta = config_number(settings, "llama_4_scaling_beta", 0.0, 0.0, 1e6)
        self._original = config.rope.original_max_position

    def grow(self, rotary: RotaryEmbedding) -> RotaryEmbedding:
        """Return `rotary`, with the factors on queries."""
        if self._beta:
            steps = torch.arange(len(rotary.cos_sin), device="cpu") // self._original
            scale = 1 + self._beta * torch.log1p(steps.float())
            rotary.q_scale = scale.to(rotary.cos_sin.device)
        return rotary


class Ministral3ForCausalLM(MistralForCausalLM):
    """Ministral 3, text only: Mistral, but queries grow with the logarithm of their position."""

    reads = frozenset({"llama_4_scaling_beta"})

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        self._queries = GrowingQueries(config)
        super().__init__(config, max_model_len)

    def rotary_emb(self, rope: RopeConfig | None, head_dim: int) -> RotaryEmbedding:
        return self._queries.grow(super().rotary_emb(rope, head_dim))


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """Mistral Small 3.1 and Ministral 3, without images: the text model is either of the two."""
