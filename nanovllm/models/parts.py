"""Parts that some families use in place of those in decoder.py: attention, layers, and a base."""

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import QKNormRope
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.kernels.torch_math import NORM_WIDE
from nanovllm.layers.activation import Act
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.pieces import SmallLinear, head_shards, own_rows
from nanovllm.loading.shards import Shard
from nanovllm.models.decoder import Decoder, DecoderForCausalLM, DecoderLayer, SelfAttention
from nanovllm.models.model_config import ModelConfig
from nanovllm.options.validation import unsupported
from nanovllm.utils.distributed import all_reduce, tensor_parallel

_TOWERS = (
    "visual",
    "vision_tower",
    "vision_model",
    "vision_embedder",
    "vision_adapter",
    "vision_projection",
    "multi_modal_projector",
    "audio_tower",
    "embed_vision",
    "embed_audio",
)
OTHER_MODALITIES = (
    *(f"{prefix}{tower}." for tower in _TOWERS for prefix in ("", "model.", "language_model.")),
    "mtp.",
)
"""Prefixes of the names of tensors for images and audio, and for drafts."""
SANDWICH = {
    "after_attention_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm",
}
"""Checkpoint names for the norms of a `SandwichLayer`."""


def attention_biases(config: ModelConfig, *, default: bool = False) -> dict[str, Any]:
    """Return the options of `SelfAttention` where attention_bias applies to all four linears."""
    bias = config.flag("attention_bias", default=default)
    return {"bias": bias, "output_bias": bias}


class RotatedNormAttention(SelfAttention):
    """Attention whose queries and keys are normalised after RoPE."""

    def qk_norm_rope(self) -> QKNormRope:
        return super().qk_norm_rope()._replace(after_rotation=True)


class WideNormAttention(SelfAttention):
    """Attention with an RMSNorm over all query heads together, and one over all key heads."""

    def __init__(self, config: ModelConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.q_norm: WideNorm = WideNorm(config, config.num_heads, self.qkv_proj.num_heads)
        self.k_norm: WideNorm = WideNorm(config, config.num_kv_heads, self.qkv_proj.num_kv_heads)

    def qk_norm_rope(self) -> QKNormRope:
        return super().qk_norm_rope()._replace(q_weight=None, k_weight=None)

    def attend(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        q_size = len(self.q_norm.weight)
        k_size = len(self.k_norm.weight)
        self.q_norm.normalise(qkv[:, :q_size])
        self.k_norm.normalise(qkv[:, q_size : q_size + k_size])
        return super().attend(qkv, batch)


class WideNorm(RMSNorm):
    """An in-place RMSNorm over all query heads, or over all key heads.

    Each rank normalises its own heads by the mean square of all.
    """

    def __init__(self, config: ModelConfig, num_heads: int, num_own: int) -> None:
        super().__init__(num_own * config.head_dim, config.rms_norm_eps, NORM_WIDE)
        self._all = num_heads * config.head_dim
        ranks = tensor_parallel()
        self._copies = ranks.size * num_own // num_heads  # of each head
        self._start = ranks.rank // self._copies * num_own * config.head_dim

    def normalise(self, x: torch.Tensor) -> None:
        """Normalise the rows of x [T, own heads * head_dim], which need not be contiguous."""
        if tensor_parallel().size == 1:
            self.kernels.rms_norm(x, self.weight, self.eps, self.kind, out=x)
            return
        wide = x.float()
        squares = all_reduce(wide.square().sum(-1, keepdim=True)) / self._copies
        wide *= torch.rsqrt(squares / self._all + self.eps)
        x.copy_((wide * self.weight.float()).to(x.dtype))

    def shards(self, prefix: str) -> Iterator[Shard]:
        """Yield this rank's part of the weight."""
        yield Shard(f"{prefix}.weight", (self._all,), self.weight.data, start=self._start)


class GatedAttention(SelfAttention):
    """Attention whose output is multiplied by the activation of a projection of its input."""

    kernels: Kernels = TORCH

    def __init__(
        self, config: ModelConfig, *args: Any, activation: str = "sigmoid", **options: Any
    ) -> None:
        super().__init__(config, *args, **options)
        self.activation = activation
        self.gate = self.make_gate(config)

    def make_gate(self, config: ModelConfig) -> LinearBase:
        """Return the projection of [T, hidden_size] to a gate for each number of the heads."""
        outputs = {"gate_proj": config.num_heads * config.head_dim}
        return MergedColumnParallelLinear(config.hidden_size, outputs, bias=False)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        heads = batch.outputs(self.attend(self.qkv_proj(hidden), batch))
        gate = self.gate(batch.outputs(hidden))
        gated = self.kernels.mul_act(gate, heads.flatten(1), self.activation)
        return self.o_proj(gated)


class NarrowGateAttention(GatedAttention):
    """Gated attention with one gate for each head. It keeps its bits when weights are rounded."""

    def make_gate(self, config: ModelConfig) -> LinearBase:
        """Return the projection of [T, hidden_size] to a gate for each head of this rank."""
        return SmallLinear(config.hidden_size, [own_rows("gate_proj", config.num_heads)])


class SinkAttention(SelfAttention):
    """Attention with a sink in each head: a logit that takes a share of its weights."""

    def __init__(self, config: ModelConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.sinks = nn.Parameter(torch.empty(self.qkv_proj.num_heads, dtype=torch.float32))

    def attend(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.attn(qkv, self.qk_norm_rope(), batch, self.sinks.data)

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from head_shards(self, prefix, "sinks")


class SandwichLayer(DecoderLayer):
    """A layer that also normalises what attention and MLP return.

    Args:
        before: whether it also normalises what they read.
        eps_after: epsilon of the norms after them; None: the config's.
        norm: options of the norms, see `RMSNorm`.
    """

    def __init__(
        self,
        config: ModelConfig,
        self_attn: nn.Module,
        mlp: nn.Module,
        *,
        before: bool = True,
        eps_after: float | None = None,
        **norm: Any,
    ) -> None:
        super().__init__(config, self_attn, mlp, **norm)
        if not before:
            self.input_layernorm = AddOnly()  # type: ignore[assignment]
            self.post_attention_layernorm = AddOnly()  # type: ignore[assignment]
        eps = eps_after or config.rms_norm_eps
        self.after_attention_norm = RMSNorm(config.hidden_size, eps, **norm)
        self.after_mlp_norm = RMSNorm(config.hidden_size, eps, **norm)

    def forward(
        self, hidden: torch.Tensor | None, residual: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.add_input(hidden, residual, batch)
        hidden = self.after_attention_norm(self.self_attn(hidden, batch))
        hidden, residual = self.post_attention_layernorm.add_norm(hidden, batch.outputs(residual))
        return self.after_mlp_norm(self.feed_forward(hidden, residual)), residual

    def feed_forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output for `hidden`, the norm of `residual`: [O, hidden_size] each."""
        return self.mlp(hidden)


class ParallelLayer(DecoderLayer):
    """A layer whose MLP reads the layer's input, as its attention does: their outputs are added.

    Args:
        one_norm: whether both read the same norm of it; otherwise each has its own.
        norm: options of the norms, see `make_norm`.
    """

    kernels: Kernels = TORCH

    def __init__(
        self,
        config: ModelConfig,
        self_attn: nn.Module,
        mlp: nn.Module,
        *,
        one_norm: bool = False,
        **norm: Any,
    ) -> None:
        super().__init__(config, self_attn, mlp, **norm)
        self.one_norm = one_norm
        if one_norm:
            del self.post_attention_layernorm

    def forward(
        self, hidden: torch.Tensor | None, residual: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.add_input(hidden, residual, batch)
        total: torch.Tensor = self.self_attn(hidden, batch)
        hidden = batch.outputs(hidden)
        residual = batch.outputs(residual)
        if not self.one_norm:
            hidden = self.post_attention_layernorm(residual)
        self.kernels.add(self.mlp(hidden), total)
        return total, residual


class AddOnly(nn.Module):
    """Replaces an RMSNorm: adds to the residual without normalising."""

    kernels: Kernels = TORCH

    def add_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to `residual` in place (None: add nothing); return the sum twice."""
        if x is not None:
            self.kernels.add(x, residual)
        return residual, residual


class ScaledEmbedding(VocabParallelEmbedding):
    """A token embedding times a factor.

    Args:
        rounded: whether the factor is rounded to the dtype of the weights.
    """

    kernels: Kernels = TORCH
    is_gathered = False  # oneDNN packs it, for the products of the head

    def __init__(
        self, vocab_size: int, hidden_size: int, factor: float, *, rounded: bool = True
    ) -> None:
        super().__init__(vocab_size, hidden_size)
        dtype = torch.get_default_dtype() if rounded else torch.float64
        self._factor = torch.tensor(factor, dtype=dtype, device="cpu").item()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = super().forward(input_ids)
        self.kernels.scale(embedded, self._factor)
        return embedded


class ScaledDecoder(Decoder):
    """A decoder whose embedding is multiplied by the square root of its size."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer], **norm: Any) -> None:
        super().__init__(config, layers, **norm)
        size = config.hidden_size
        self.embed_tokens = ScaledEmbedding(config.vocab_size, size, size**0.5)


class PositionedDecoder(Decoder):
    """A decoder with an embedding of each position, which is added to the token's.

    Args:
        skipped: rows of the table before that of position 0.
        no_position: a token that has the last of those, and is not counted.
    """

    kernels: Kernels = TORCH

    def __init__(
        self,
        config: ModelConfig,
        layers: list[DecoderLayer],
        skipped: int = 0,
        no_position: int | None = None,
        **norm: Any,
    ) -> None:
        super().__init__(config, layers, **norm)
        self.positions = nn.Embedding(config.max_position + skipped, config.hidden_size)
        self._skipped = skipped
        self._no_position = no_position

    def embed(self, batch: Batch) -> torch.Tensor:
        embedded = super().embed(batch)
        table = self.positions.weight.data
        if self._no_position is None or batch.lengths is None:  # a recorded step has no such token
            rows = self.kernels.take_rows(table[self._skipped :], batch.positions)
        else:
            rows = self.kernels.take_rows(table, self._counted(batch, self._no_position))
        self.kernels.add(rows, embedded)
        return embedded

    def _counted(self, batch: Batch, no_position: int) -> torch.Tensor:
        """Return the rows of the table for tokens of whole prompts: [T] int64."""
        counts = (batch.input_ids != no_position).long()
        before = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        starts = batch.cu_seqlens_q.long()
        of_rows = before[starts[:-1]].repeat_interleave(starts.diff(), output_size=len(counts))
        return (before[1:] - of_rows) * counts + self._skipped - 1


class SandwichForCausalLM(DecoderForCausalLM):
    """The base of families with a `SandwichLayer`, and with a factor and a soft cap on logits.

    The cap is in float32: cap * tanh(logits / cap). A factor of 1 and a cap of 0 change nothing.
    """

    names: ClassVar[dict[str, str]] = SANDWICH

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self._factor = config.number("output_multiplier", 1.0)
        self._cap = config.number("final_logit_softcapping", 0.0)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden)
        cap = self._cap
        if logits is not None and self._factor != 1:
            logits = logits * self._factor
        if logits is not None and cap:
            logits = (logits.float() / cap).tanh_().mul_(cap).to(logits.dtype)
        return logits


GELU_TANH: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("hidden_activation", "hidden_act"), ("gelu_pytorch_tanh",)
)
"""The `Family.only` of those whose activation is Gemma's."""


_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Names of activations in a config.json, and in `Kernels.act`. Those of one kind differ in how they
are rounded."""


def named_activation(config: ModelConfig, key: str = "hidden_act", default: str = "gelu") -> str:
    """Return the activation that field `key` of the config names, as `Kernels.act` takes it.

    Args:
        default: in transformers' names, used if the config lacks the field.

    Raises:
        UnsupportedModelError: the activation is not implemented.
    """
    return activation_of(config.fields.get(key, default), key)


def activation_of(name: Any, key: str) -> str:
    """Do what `named_activation` does for a field of any part of config.json."""
    if not isinstance(name, str) or name not in _ACTIVATION_NAMES:
        raise unsupported(f"config.json: {key}", name, ", ".join(_ACTIVATION_NAMES))
    return _ACTIVATION_NAMES[name]


class PlainMLP(nn.Module):
    """An MLP without a gate: down_proj(act(up_proj(x)))."""

    def __init__(self, config: ModelConfig, activation: str, bias: bool = False) -> None:
        super().__init__()
        size = config.intermediate_size
        outputs = {"up_proj": size}
        self.up_proj = MergedColumnParallelLinear(config.hidden_size, outputs, bias=bias)
        self.down_proj = RowParallelLinear(size, config.hidden_size, bias=bias)
        self.act = Act(activation)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [T, hidden_size] for `hidden` [T, hidden_size]."""
        return self.down_proj(self.act(self.up_proj(hidden)))


class UnweightedNorm(RMSNorm):
    """An RMSNorm without a learned weight: a weight of ones, which no checkpoint has."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps, NORM_WIDE)
        del self.weight
        self.register_buffer("weight", torch.ones(size), persistent=False)


class Multipliers(NamedTuple):
    """Factors of a network."""

    embedding: float
    residual: float
    """Of what attention and MLP add."""
    logits: float
    """Their divisor."""


class MultipliedForCausalLM(DecoderForCausalLM):
    """The base of families with multipliers."""

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        self.multipliers = self.read_multipliers(config)
        self.norm = {"multiplier": self.multipliers.residual}  # type: ignore[misc]
        super().__init__(config, max_model_len)

    def read_multipliers(self, config: ModelConfig) -> Multipliers:
        """Return what the config says."""
        raise NotImplementedError

    def make_decoder(self, config: ModelConfig, layers: list[DecoderLayer]) -> Decoder:
        decoder = super().make_decoder(config, layers)
        factor = self.multipliers.embedding
        decoder.embed_tokens = ScaledEmbedding(
            config.vocab_size, config.hidden_size, factor, rounded=False
        )
        return decoder

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden)
        return None if logits is None else logits / self.multipliers.logits


class NormedEmbedding(VocabParallelEmbedding):
    """A token embedding followed by an RMSNorm without a weight."""

    is_gathered = False  # as in `ScaledEmbedding`

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.norm = UnweightedNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(input_ids))
