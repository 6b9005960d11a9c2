"""Qwen3: a dense decoder with grouped-query attention, QK-norm and a SwiGLU MLP.

Modules have the names of the checkpoint. Shapes: T tokens in the batch, O tokens in
`batch.output_indices` (None: all T). Knows no sequences: only attention reads the batch's rows.
"""

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.config import ModelConfig


class Qwen3Attention(nn.Module):
    """Grouped-query attention with QK-norm: RMSNorm over each query head and each key head."""

    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary_emb = rotary_emb
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.attention_bias,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, bias=config.attention_bias
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attn = Attention()

    def forward(
        self, hidden: torch.Tensor, batch: Batch, output_indices: torch.Tensor | None
    ) -> torch.Tensor:
        """Write the KV of all T tokens; return [O, hidden_size] for `hidden` [T, hidden_size]."""
        qkv = self.qkv_proj(hidden)
        heads = self.attn(
            qkv, self.qkv_proj.split_sizes, self.q_norm, self.k_norm, self.rotary_emb, batch
        )
        if output_indices is not None:
            heads = heads[output_indices]
        return self.o_proj(heads.flatten(1))


class Qwen3MLP(nn.Module):
    """SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias=False
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=False)
        self.act = SiluAndMul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_up_proj(hidden)))


class Qwen3DecoderLayer(nn.Module):
    """Attention and MLP, each after an RMSNorm.

    `hidden` is not yet added to `residual`: the next RMSNorm does both in one call.
    """

    def __init__(self, config: ModelConfig, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, rotary_emb)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor,
        batch: Batch,
        output_indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of all T tokens; return (MLP output, residual), [O, hidden_size] each.

        Args:
            hidden: [T, hidden_size], the previous layer's MLP output; None in the first layer.
            residual: [T, hidden_size].
        """
        hidden, residual = self.input_layernorm.add_norm(hidden, residual)
        hidden = self.self_attn(hidden, batch, output_indices)
        if output_indices is not None:
            residual = residual[output_indices]
        hidden, residual = self.post_attention_layernorm.add_norm(hidden, residual)
        return self.mlp(hidden), residual


class Qwen3Model(nn.Module):
    """Qwen3 without its language-model head."""

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        rotary_emb = RotaryEmbedding(config.head_dim, max_model_len, config.rope)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, rotary_emb) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: Batch) -> torch.Tensor:
        residual = self.embed_tokens(batch.input_ids)
        hidden: torch.Tensor | None = None
        for layer in self.layers:
            # The attention of a next layer needs all tokens, so only the last layer drops some.
            output_indices = batch.output_indices if layer is self.layers[-1] else None
            hidden, residual = layer(hidden, residual, batch, output_indices)
        hidden, _ = self.norm.add_norm(hidden, residual)
        return hidden


class Qwen3ForCausalLM(nn.Module):
    """Qwen3 with its language-model head.

    Args:
        max_model_len: number of positions in the table of rotary angles.
    """

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        self.model = Qwen3Model(config, max_model_len)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.ignored_weights: frozenset[str] = frozenset()  # checkpoint names not to load
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.ignored_weights = frozenset({"lm_head.weight"})

    def forward(self, batch: Batch) -> torch.Tensor:
        """Write the batch's KV; return the hidden states [O, hidden_size] after the last norm."""
        return self.model(batch)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return logits [N, vocab_size] of `hidden` [N, hidden_size]; None except on rank 0."""
        return self.lm_head(hidden)
