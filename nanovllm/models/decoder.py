"""The decoder that model families describe: pre-norm layers of attention and a gated MLP.

A family composes its layers from these parts; what differs is an argument. Modules have the names
of the checkpoint. Shapes: T tokens in the batch, O tokens in `batch.output_indices` (None: all T).
Knows no family and no sequences: only attention reads the batch's rows.
"""

from collections.abc import Callable

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
from nanovllm.models.model_config import ModelConfig


class SelfAttention(nn.Module):
    """Grouped-query attention.

    Args:
        qkv_bias: whether q_proj, k_proj and v_proj have a bias.
        output_bias: whether o_proj has one.
        qk_norm: whether an RMSNorm is applied to each query head and each key head.
        input_size: numbers that the projections read of a token; None: hidden_size.
    """

    def __init__(
        self,
        config: ModelConfig,
        rotary_emb: RotaryEmbedding,
        *,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm: bool,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        hidden_size, head_dim = config.hidden_size, config.head_dim
        self.rotary_emb = rotary_emb
        self.qkv_proj = QKVParallelLinear(
            input_size or hidden_size,
            config.num_heads,
            config.num_kv_heads,
            head_dim,
            bias=qkv_bias,
        )
        self.o_proj = RowParallelLinear(config.num_heads * head_dim, hidden_size, bias=output_bias)
        # These two only hold weights: the attention backend normalises.
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if qk_norm else None
        self.attn = Attention()

    def forward(
        self, hidden: torch.Tensor, batch: Batch, output_indices: torch.Tensor | None
    ) -> torch.Tensor:
        """Write the KV of all T tokens; return [O, hidden_size] for `hidden` [T, input_size]."""
        qkv = self.qkv_proj(hidden)
        heads = self.attn(qkv, self.q_norm, self.k_norm, self.rotary_emb, batch)
        if output_indices is not None:
            heads = heads[output_indices]
        return self.o_proj(heads.flatten(1))


class GatedMLP(nn.Module):
    """SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x)).

    Args:
        bias: whether the three linears have one.
    """

    def __init__(self, config: ModelConfig, *, bias: bool) -> None:
        super().__init__()
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias=bias
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=bias)
        self.act = SiluAndMul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_up_proj(hidden)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each after an RMSNorm.

    The layer returns its MLP output and the residual apart; the next `add_norm` adds them and
    normalises the sum. The residual changes in place.
    """

    def __init__(self, config: ModelConfig, self_attn: SelfAttention, mlp: GatedMLP) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.store_input: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        """Takes the sum that enters the layer, of all T tokens, and their slots; None: nothing
        reads it."""

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
        if self.store_input is not None:
            self.store_input(residual, batch.slot_mapping)
        hidden = self.self_attn(hidden, batch, output_indices)
        if output_indices is not None:
            residual = residual[output_indices]
        hidden, residual = self.post_attention_layernorm.add_norm(hidden, residual)
        return self.mlp(hidden), residual


class Decoder(nn.Module):
    """The embedding, the layers and the last RMSNorm.

    Args:
        layers: the family's layers, in order.
    """

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
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


class DecoderForCausalLM(nn.Module):
    """The base of a family: a decoder with its language-model head.

    Args:
        max_model_len: number of positions in the table of rotary angles.
    """

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        rotary_emb = RotaryEmbedding(
            max_model_len, *config.rope.inverse_frequencies(config.head_dim)
        )
        layers = [self.make_layer(config, rotary_emb) for _ in range(config.num_layers)]
        self.model = Decoder(config, layers)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.ignored_weights: frozenset[str] = frozenset()  # checkpoint names not to load
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.ignored_weights = frozenset({"lm_head.weight"})

    @staticmethod
    def make_layer(config: ModelConfig, rotary_emb: RotaryEmbedding) -> DecoderLayer:
        """Return one layer of the family. All layers share `rotary_emb`."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> torch.Tensor:
        """Write the batch's KV; return the hidden states [O, hidden_size] after the last norm."""
        return self.model(batch)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return logits [N, vocab_size] of `hidden` [N, hidden_size]; None except on rank 0."""
        return self.lm_head(hidden)
