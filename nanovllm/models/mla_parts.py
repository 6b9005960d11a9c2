"""Multi-head latent attention (MLA): what a token leaves in the cache is one row for all heads.

The row has the token's latent, from which each head's keys and values could be computed, and one
rotated key part. Queries are multiplied by the weight of the keys instead, and the sums of latents
by that of the values (arXiv 2405.04434, section 2.1). So all query heads read one KV head whose
keys are the rows, and whose values are the latents in them. Prompts are computed like single
tokens: the bits of a row do not tell where it comes from.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionOptions
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.layers.attention import Attention, qk_norm_rope
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase, RowParallelLinear, divide
from nanovllm.layers.pieces import (
    HeadLinear,
    PiecedLinear,
    SmallLinear,
    TensorRows,
    head_rows,
    own_rows,
)
from nanovllm.layers.rotary_embedding import RotaryEmbedding, mscale
from nanovllm.models.config_fields import MAX_SIZE
from nanovllm.models.model_config import ModelConfig

_MAX_DIM = 2**12
_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever rms_norm_eps is, as in transformers."""


class LatentSizes(NamedTuple):
    """The sizes of a latent attention, under their names in config.json."""

    q_lora_rank: int | None
    """Of the latent from which queries are made; None: they are made of the hidden state."""
    kv_lora_rank: int
    """Of the latent that is kept."""
    qk_nope_head_dim: int
    """Numbers of a head's query and key that do not rotate."""
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row(self) -> int:
        """Numbers of what is kept for a token."""
        return self.qk_rope_head_dim + self.kv_lora_rank


def latent_sizes(config: ModelConfig) -> LatentSizes:
    """Return the sizes that the config says.

    Raises:
        CheckpointError, UnsupportedModelError: they are wrong, or do not fit each other.
    """
    q_lora_rank = None
    if config.fields.get("q_lora_rank") is not None:
        q_lora_rank = config.size("q_lora_rank")
    v_head_dim = config.size("v_head_dim", config.hidden_size // config.num_heads, high=_MAX_DIM)
    sizes = LatentSizes(
        q_lora_rank,
        config.size("kv_lora_rank", high=_MAX_DIM),
        config.size("qk_nope_head_dim", high=_MAX_DIM),
        config.size("qk_rope_head_dim", high=_MAX_DIM),
        v_head_dim,
    )
    if config.size("qk_head_dim", sizes.qk_head_dim) != sizes.qk_head_dim:
        raise CheckpointError(
            f"config.json: qk_head_dim {config.size('qk_head_dim')} is not qk_nope_head_dim "
            f"{sizes.qk_nope_head_dim} + qk_rope_head_dim {sizes.qk_rope_head_dim}"
        )
    if sizes.qk_rope_head_dim % 2:
        raise CheckpointError(f"config.json: qk_rope_head_dim {sizes.qk_rope_head_dim} is odd")
    widest = max(sizes.qk_head_dim, sizes.v_head_dim, sizes.row)
    if config.num_heads * widest > MAX_SIZE:
        raise CheckpointError(
            f"config.json: num_attention_heads {config.num_heads} times {widest} must be at most "
            f"{MAX_SIZE}"
        )
    if config.num_kv_heads != config.num_heads:
        raise UnsupportedModelError(
            f"config.json: num_key_value_heads {config.num_kv_heads} is not supported: latent "
            f"attention makes keys for each of num_attention_heads {config.num_heads}"
        )
    return sizes


class LatentAttention(nn.Module):
    """Latent attention. Each rank has some heads, and the rows of all tokens.

    Args:
        rotary_emb: of qk_rope_head_dim numbers.
        bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have a bias.
        gated: whether the values of each head are multiplied by the sigmoid of g_proj.
    """

    kernels: Kernels = TORCH
    """The loader sets those of the device."""

    def __init__(
        self,
        config: ModelConfig,
        rotary_emb: RotaryEmbedding,
        *,
        bias: bool = False,
        gated: bool = False,
    ) -> None:
        super().__init__()
        sizes = self.sizes = latent_sizes(config)
        hidden_size = config.hidden_size
        rope = sizes.qk_rope_head_dim
        latent = sizes.kv_lora_rank
        heads = divide(config.num_heads, "num_attention_heads")
        self.rotary_emb = rotary_emb
        self.q_a_proj = self.q_a_layernorm = None
        name = "q_proj"
        inputs = hidden_size
        if sizes.q_lora_rank is not None:
            name = "q_b_proj"
            inputs = sizes.q_lora_rank
            self.q_a_proj = LinearBase(hidden_size, inputs, bias=bias)
            self.q_a_layernorm = RMSNorm(inputs, _LATENT_EPS)
        self.q_proj = PiecedLinear(inputs, _rope_first(name, config.num_heads, sizes))
        kv = "kv_a_proj_with_mqa"
        pieces = [TensorRows(kv, sizes.row, latent, rope), TensorRows(kv, sizes.row, 0, latent)]
        self.kv_a_proj = PiecedLinear(hidden_size, pieces, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent, _LATENT_EPS)
        nope = sizes.qk_nope_head_dim
        both = nope + sizes.v_head_dim
        keys = head_rows("kv_b_proj", config.num_heads, both, 0, nope)
        values = head_rows("kv_b_proj", config.num_heads, both, nope, sizes.v_head_dim)
        self.k_b_proj = HeadLinear(latent, keys, turned=True)
        self.v_b_proj = HeadLinear(latent, values)
        gate = [own_rows("g_proj", config.num_heads)]
        self.gate = SmallLinear(hidden_size, gate) if gated else None
        outputs = config.num_heads * sizes.v_head_dim
        self.o_proj = RowParallelLinear(outputs, hidden_size, bias=bias)
        scale = sizes.qk_head_dim**-0.5
        if config.rope.rope_type != "default":
            scale *= mscale(config.rope.factor, config.rope.mscale_all_dim or 0.0) ** 2
        options = AttentionOptions(scale=scale, value_dim=latent)
        self.attn = Attention(heads, 1, sizes.row, options)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Write the rows of all T tokens; return [O, hidden_size] for `hidden` [T, hidden_size]."""
        norm = qk_norm_rope(None, None, self.rotary_emb)
        latents = batch.outputs(self.attn(self._queries_and_rows(hidden), norm, batch))
        hidden = batch.outputs(hidden)
        size = self.sizes.v_head_dim
        heads = latents.shape[1]
        values = torch.empty(len(latents), heads, size, dtype=hidden.dtype, device=hidden.device)
        self.v_b_proj(latents, values)
        values = values.flatten(1)
        if self.gate is not None:
            values = self.kernels.mul_act(self.gate(hidden), values, "sigmoid")
        return self.o_proj(values)

    def _queries_and_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the queries of the heads and the rows, not yet rotated: [T, (heads + 1) * row]."""
        tokens = len(hidden)
        heads, _, row = self.attn.sizes
        rope = self.sizes.qk_rope_head_dim
        shape = tokens, heads + 1, row
        qkv = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        kv = self.kv_a_proj(hidden)
        norm = self.kv_a_layernorm
        self.kernels.copy(kv[:, :rope], qkv[:, heads, :rope])
        out = qkv[:, heads, rope:]
        self.kernels.rms_norm(kv[:, rope:], norm.weight, norm.eps, norm.kind, out=out)
        if self.q_a_proj is not None and self.q_a_layernorm is not None:
            hidden = self.q_a_layernorm(self.q_a_proj(hidden))
        queries = self.q_proj(hidden).view(tokens, heads, self.sizes.qk_head_dim)
        self.k_b_proj(queries, qkv[:, :heads], kept=rope)
        return qkv.view(tokens, -1)


def _rope_first(name: str, num_heads: int, sizes: LatentSizes) -> list[TensorRows]:
    """Return the rows of this rank's heads, of each those that rotate before the others."""
    nope = sizes.qk_nope_head_dim
    rotating = head_rows(name, num_heads, sizes.qk_head_dim, nope, sizes.qk_rope_head_dim)
    others = head_rows(name, num_heads, sizes.qk_head_dim, 0, nope)
    return [piece for pair in zip(rotating, others, strict=True) for piece in pair]


def expect_heads(model: nn.Module, known: Collection[str]) -> None:
    """Make the latent attention of `model` load the checkpoint's form of kv_b_proj: one tensor, or,
    in GGUF files, two for each head.
    """
    is_split = any(".k_b_proj.0." in name for name in known)
    for module in model.modules():
        if isinstance(module, HeadLinear):
            module.is_split = is_split
