"""The Granite family: Llama with multipliers."""

import torch

from nanovllm.attention.spec import AttentionOptions
from nanovllm.layers.rotary_embedding import RopeConfig
from nanovllm.models.decoder import (
    Decoder,
    DecoderForCausalLM,
    DecoderLayer,
    GatedMLP,
    SelfAttention,
)
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import ScaledEmbedding, attention_biases


class GraniteForCausalLM(DecoderForCausalLM):
    """Granite 3 and 4 (dense): Llama with factors on embedding, scores, residual and logits."""

    reads = frozenset(
        {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
    )

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        self.norm = {"multiplier": config.number("residual_multiplier", 1.0)}  # type: ignore[misc]
        super().__init__(config, max_model_len)
        self._logits_scaling = config.number("logits_scaling", 1.0)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        mlp = GatedMLP(config, bias=config.flag("mlp_bias"))
        return DecoderLayer(config, self.make_attention(config, config.rope), mlp, **self.norm)

    def make_attention(self, config: ModelConfig, rope: RopeConfig | None) -> SelfAttention:
        """Return the attention of a layer; None: without RoPE."""
        return SelfAttention(
            config,
            self.rotary_emb(rope, config.head_dim),
            options=AttentionOptions(scale=config.number("attention_multiplier", 1.0)),
            **attention_biases(config),
        )

    def make_decoder(self, config: ModelConfig, layers: list[DecoderLayer]) -> Decoder:
        decoder = super().make_decoder(config, layers)
        factor = config.number("embedding_multiplier", 1.0)
        decoder.embed_tokens = ScaledEmbedding(
            config.vocab_size, config.hidden_size, factor, rounded=False
        )
        return decoder

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden)
        return None if logits is None else logits / self._logits_scaling
