"""The Falcon-H1 family: attention and Mamba-2 side by side in each layer."""

from typing import Any, ClassVar

import torch

from nanovllm.attention.spec import AttentionOptions
from nanovllm.models.decoder import Decoder, DecoderForCausalLM, DecoderLayer, SelfAttention
from nanovllm.models.falcon_h1_parts import ParallelMixer, ScaledMLP, scaled_mamba2
from nanovllm.models.hybrid_parts import MixerLayer
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.parts import ScaledEmbedding, attention_biases


class FalconH1ForCausalLM(DecoderForCausalLM):
    """Falcon-H1 0.5B to 34B: attention and Mamba-2, which keeps a state, side by side, and factors
    on what most parts read or return.
    """

    names: ClassVar[dict[str, str]] = {
        "self_attn.attention.": "self_attn.",
        "self_attn.mamba.": "mamba.",
        "post_attention_layernorm.": "pre_ff_layernorm.",
        "mlp.": "feed_forward.",
        "model.norm.": "model.final_layernorm.",
    }
    defaults: ClassVar[dict[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }
    reads = frozenset({"embedding_multiplier"})

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self._multiplier = config.number("lm_head_multiplier", 1.0)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        scale = config.number("key_multiplier", 1.0) * config.head_dim**-0.5
        attention = SelfAttention(
            config,
            self.rotary_emb(config.rope, config.head_dim),
            options=AttentionOptions(scale=scale),
            **attention_biases(config),
        )
        mixer = ParallelMixer(config, attention, scaled_mamba2(config))
        return MixerLayer(config, mixer, ScaledMLP(config))

    def make_decoder(self, config: ModelConfig, layers: list[DecoderLayer]) -> Decoder:
        decoder = super().make_decoder(config, layers)
        factor = config.number("embedding_multiplier", 1.0)
        sizes = config.vocab_size, config.hidden_size
        decoder.embed_tokens = ScaledEmbedding(*sizes, factor, rounded=False)
        return decoder

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden)
        return None if logits is None else logits * self._multiplier
