"""`Kernels`: what a device computes besides matrix products and attention, here in plain torch.

A `Platform` chooses the object once, and the layers and the worker call it.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from nanovllm.kernels import decode_step, torch_states
from nanovllm.kernels.torch_math import NORM_ROUNDED, activate, layer_norm, rms_norm, swiglu_oai

if TYPE_CHECKING:
    from nanovllm.kernels.adapters import AdapterRows, AdapterTable
    from nanovllm.kernels.torch_experts import ExpertChoice, ExpertMLP, Routing


class LinearMethod(Protocol):
    """A weight [n, k] in a special form, with the operations that read it."""

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [T, k] times the transpose of the weight, plus `bias` [n] if given: [T, n]."""
        ...

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` [T] int64 of the weight: [T, k]."""
        ...


class PlainWeight:
    """A weight [n, k] that plain torch multiplies, as a layer without a method does."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class HeadWeight(NamedTuple):
    """A weight for each of H heads, one after the other."""

    rows: torch.Tensor | LinearMethod  # [H * rows_per_head, k]
    heads: int
    rows_per_head: int
    turned: bool  # whether a head's rows belong to its inputs, and the k columns are its outputs

    def dense(self, device: torch.device) -> torch.Tensor:
        """Return the weights [H, outputs, inputs]."""
        rows = self.rows.weight if isinstance(self.rows, PlainWeight) else self.rows
        if not isinstance(rows, torch.Tensor):
            rows = rows.embedding(torch.arange(self.heads * self.rows_per_head, device=device))
        heads = rows.view(-1, self.rows_per_head, rows.shape[1])
        return heads.mT if self.turned else heads


class Kernels:
    """Plain torch: for every device and dtype, and the reference of the subclasses."""

    name: ClassVar[str] = "torch"
    # Draws tokens [R] as `layers.sampler.draw` does, -1 as `greedy` has it; gets the temperatures,
    # seeds, positions, top_ks, top_ps and min_ps, each [R] float32 or int64, contiguous. It gives
    # each row its own work, and sorts nothing. None: draw in torch.
    sample: Callable[..., torch.Tensor] | None = None
    fp8: ModuleType | None = None  # kernels that multiply in FP8: `kernels.triton.fp8`
    # Products with weights of 4 and 8 bits, which stay packed: `kernels.triton.int4`.
    ints: ModuleType | None = None
    ngram: ModuleType | None = None  # kernels for prompt lookup on a GPU: `kernels.triton.ngram`

    def add_rms_norm(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        kind: int = NORM_ROUNDED,
        multiplier: float = 1.0,
    ) -> torch.Tensor:
        """Add `x`, if given, to `residual` in place, and return the RMSNorm of `residual`.

        Args:
            x, residual: [..., n], contiguous.
            weight: [n]; None: no weight.
            kind: one of the NORM constants of torch_math.py.
            multiplier: factor on `x`; the product is rounded to its dtype before it is added.
        """
        if x is not None:
            residual += x if multiplier == 1.0 else x * multiplier
        return rms_norm(residual, weight, eps, kind)

    def add_layer_norm(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Add `x`, if given, to `residual` in place, and return the LayerNorm of `residual`.

        Args:
            x, residual: [..., n], contiguous.
            weight: [n].
            bias: [n]; None: no bias.
        """
        if x is not None:
            residual += x
        return layer_norm(residual, weight, bias, eps)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        kind: int = NORM_ROUNDED,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the RMSNorm of each row of `x` [T, n]; the rows may lie apart.

        Args:
            weight: [n]; None: no weight.
            kind: one of the NORM constants of torch_math.py.
            out: [T, n] for the result, whose rows may lie apart; it may be `x`. None: a new tensor.
        """
        normed = rms_norm(x, weight, eps, kind)
        return normed if out is None else out.copy_(normed)

    def head_linear(
        self, x: torch.Tensor, weight: HeadWeight, out: torch.Tensor, kept: int = 0
    ) -> None:
        """Write the product of each head of `x` with its own weight to `out`.

        Args:
            x: [T, H, kept + inputs]; tokens and heads may lie apart.
            out: [T, H, kept + outputs], likewise. The first `kept` numbers are those of `x`.
        """
        out[:, :, :kept] = x[:, :, :kept]
        found = torch.einsum("thk,hnk->thn", x[:, :, kept:], weight.dense(x.device))
        out[:, :, kept:] = found

    def copy(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Copy `x` [T, n] to `out` [T, n]; the rows of both may lie apart."""
        out.copy_(x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Add `x` to `residual`, both contiguous, in place."""
        residual += x

    def act_and_mul(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        """Return activation(first half) * second half of each row of gate_up [T, 2n]: [T, n].

        The first half of `gate_up` may be overwritten.

        Args:
            activation: one of `torch_math.ACTIVATIONS`, whose result is rounded before the
                product; or "swiglu_oai", see `torch_math.swiglu_oai`.
        """
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "swiglu_oai":
            return swiglu_oai(gate, up)
        return activate(gate, activation) * up

    def mul_act(self, gate: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Return activation(gate), rounded, times `x`: [T, n].

        Args:
            gate: [T, n / g], one for g neighbours in a row of `x`. Rows may lie apart.
            x: [T, n]; rows may lie apart.
            activation: one of `torch_math.ACTIVATIONS`.
        """
        gates = activate(gate, activation).unsqueeze(-1)
        grouped = x.view(*gate.shape, x.shape[1] // gate.shape[1])
        return (gates * grouped).view(x.shape)

    def act(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Return activation(x) of `x` [T, n], contiguous, which may be overwritten.

        Args:
            activation: one of `torch_math.ACTIVATIONS`.
        """
        return activate(x, activation)

    def scale(self, x: torch.Tensor, factor: float | torch.Tensor) -> None:
        """Multiply `x` by `factor` in place.

        Args:
            x: [T, n], whose rows may lie apart.
            factor: a number, or a tensor of one element in the dtype of `x`, read when this runs.
        """
        x *= factor

    def pack(self, weight: torch.Tensor, *, is_embedding: bool) -> LinearMethod | None:
        """Return `weight` [n, k] with all its bits in a form that is faster to multiply, or None.

        Args:
            is_embedding: whether the weight is also used as an embedding.
        """
        return None

    def can_pack_rows(self, weight: torch.Tensor) -> bool:
        """Return whether `weight` can become a `kernels.cpu.packed.PackedWeight`, row by row."""
        return False

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the index [R] int64 of the first largest logit in each row of [R, vocab_size].

        It is -1 for a row whose logits are not a distribution: some are NaN or +inf, or all -inf.
        """
        tokens = logits.argmax(-1)  # of the first NaN, if there is one
        largest = logits.gather(-1, tokens[:, None])[:, 0]
        return torch.where(largest.isfinite(), tokens, -1)

    def to_float(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of `x` in float32."""
        return x.to(torch.float32, copy=True)

    def forbid(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """Set `logits` [R, n] float32, contiguous, to -inf in place where a mask has a 0.

        Args:
            rows: [m] int64, the row of each mask.
            masks: [m, at least n / 8] uint8 on the host: a bit for each token, the lowest first.
        """
        masks = masks.to(logits.device, non_blocking=True)
        bits = 1 << torch.arange(8, dtype=torch.uint8, device=masks.device)
        forbidden = ((masks[:, :, None] & bits).flatten(1) == 0)[:, : logits.shape[1]]
        logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)

    def store_rows(self, pool: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Write row t of `x` [T, n] to row rows[t] of `pool` [slots, n]."""
        pool.index_copy_(0, rows, x)

    def take_rows(self, pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return rows `rows` [T] int64 of `pool` [slots, n]."""
        return pool[rows]

    def join_columns(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `parts` [T, any] side by side in new, contiguous rows."""
        return torch.cat(list(parts), dim=1)

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return `x` [T, k] times the transpose of `weight` [n, k] float32, in float32: [T, n]."""
        return F.linear(x.float(), weight)

    def route(self, logits: torch.Tensor, choice: "ExpertChoice") -> "Routing":
        """Choose each token's experts: see `torch_experts.route`."""
        from nanovllm.kernels import torch_experts

        return torch_experts.route(logits, choice)

    def experts(self, x: torch.Tensor, routing: "Routing", mlp: "ExpertMLP") -> torch.Tensor:
        """Return the weighted sums of the experts' outputs: see `torch_experts.experts`."""
        from nanovllm.kernels import torch_experts

        return torch_experts.experts(x, routing, mlp)

    def add_lora(
        self, y: torch.Tensor, x: torch.Tensor, rows: "AdapterRows", table: "AdapterTable"
    ) -> None:
        """Add what the tokens' adapters give: see `adapters.add_lora`."""
        from nanovllm.kernels import adapters

        adapters.add_lora(y, x, rows, table)

    extend = staticmethod(torch_states.extend)
    causal_conv = staticmethod(torch_states.causal_conv)
    gated_delta = staticmethod(torch_states.gated_delta)
    mamba2 = staticmethod(torch_states.mamba2)
    gated_rms_norm = staticmethod(torch_states.gated_rms_norm)

    gather = staticmethod(decode_step.gather)
    advance = staticmethod(decode_step.advance)
    accept = staticmethod(decode_step.accept)


TORCH = Kernels()
