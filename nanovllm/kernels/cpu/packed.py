"""Weights packed for the C kernels or for oneDNN."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.cpu import library
from nanovllm.kernels.cpu.build import PANEL
from nanovllm.utils.memory import lazy_zeros
from nanovllm.utils.pages import PageReserve

PLAIN, MINIMUMS, FP4, ZEROS, W8A8 = range(5)
"""The kinds of weights of 8 or 4 bits, and their numbers in csrc/int_weights.h, which says what
the numbers of such a weight mean."""

_K_STEP = 256  # what groups of inputs divide; see csrc/int_weights.h
_ONEDNN_HINT_ROWS = 16
"""Number of input rows that oneDNN optimises its layout for. Inputs may have any number of rows."""
_ONEDNN_MIN_ELEMENTS = 2**18
"""Fewest elements of a weight with which oneDNN's calls, of 15 us more, pay for one row."""


class Panels(NamedTuple):
    """A weight [n, k] in the layout of the C kernels: panels of 32 outputs, zeros in the last."""

    # [panels, k / 2, 32, 2] bfloat16, with zeros up to a multiple of 32 inputs; with 8 and 4 bits
    # [panels, k * 32 * bits / 8] uint8.
    packed: torch.Tensor
    # With 8 and 4 bits only, of 16 bits: [panels, groups, 32], or [panels, groups, 2, 32] with
    # minimums or zeros.
    scales: torch.Tensor | None
    bits: int
    kind: int = PLAIN
    factors: torch.Tensor | None = None  # [panels * 32] float32: multiply the outputs
    # [k] int32: which input belongs to each column of the weight.
    inputs: torch.Tensor | None = None

    def arguments(self, inputs: int) -> tuple[int, int, int]:
        """Return the group, the bits and the kind of a weight of `inputs` inputs."""
        group = 0 if self.scales is None else inputs // self.scales.shape[1]
        return group, self.bits, self.kind


class PanelWeight:
    """A weight [n, k] in the layout of the C kernels, for inputs in bfloat16.

    The kernels round the inputs to 16 bits for a weight of 8 bits, and to 8 bits for one of 4 and
    for W8A8. A row's result is the same, bit for bit, whatever the other rows are.

    Args:
        num_outputs: n.
        num_inputs: k.
    """

    def __init__(self, panels: Panels, num_outputs: int, num_inputs: int) -> None:
        self.panels = panels
        self._num_outputs = num_outputs
        self._num_inputs = num_inputs

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x @ weight.T. The bias, contiguous, is added in float32, before rounding."""
        m, k = x.shape
        panels = self.panels
        n = self._num_outputs
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(m, n, dtype=torch.bfloat16)
        if panels.scales is None:
            inputs = x, x.stride(0), 0, panels.packed, bias
            library.call("nv_linear", *inputs, y, n, 0, m, 1, n, k, 0, 0)
        else:
            # What they are rounded to, with a scale and a sum for at least 16; and their order.
            prepared = torch.empty(m, 4 * k if panels.inputs is None else 6 * k, dtype=torch.uint8)
            weight = panels.packed, panels.scales, panels.factors, panels.inputs
            tensors = *weight, bias, prepared, y
            sizes = m, n, k, *panels.arguments(k)
            library.call("nv_linear_int", x, x.stride(0), *tensors, *sizes)
        return y

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.contiguous()
        panels = self.panels
        tokens = len(ids)
        k = self._num_inputs
        y = torch.empty(tokens, k, dtype=torch.bfloat16)
        if panels.scales is None:
            library.call("nv_gather", ids, panels.packed, y, tokens, k)
        else:
            tensors = panels.packed, panels.scales, panels.factors, panels.inputs, y
            library.call("nv_gather_int", ids, *tensors, tokens, k, *panels.arguments(k))
        return y


class IntPanelWeight(PanelWeight):
    """A weight [n, k] of 8 or 4 bits in the layout of the C kernels, of zeros at first.

    Args:
        group: inputs that share a scale, a multiple of 32; of 16 for FP4.
        kind: PLAIN, MINIMUMS, FP4, ZEROS or W8A8.
        inputs: see `Panels`.
        reserve: gives the memory while it lasts.
    """

    def __init__(
        self,
        n: int,
        k: int,
        group: int,
        bits: int,
        kind: int = PLAIN,
        inputs: torch.Tensor | None = None,
        reserve: PageReserve | None = None,
    ) -> None:
        # The kernels' groups are smaller: they divide _K_STEP, and with these kinds 32.
        group = math.gcd(group, PANEL if kind in (MINIMUMS, FP4) else _K_STEP)
        panels = -(-n // PANEL)
        rows = (2, PANEL) if kind in (MINIMUMS, ZEROS) else (PANEL,)
        packed = lazy_zeros((panels, k * PANEL * bits // 8), torch.uint8, reserve)
        scales = lazy_zeros((panels, k // group, *rows), torch.float16, reserve)
        super().__init__(Panels(packed, scales, bits, kind, None, inputs), n, k)

    def store(
        self,
        start: int,
        values: torch.Tensor,
        scales: torch.Tensor,
        more: torch.Tensor | None = None,
        factors: torch.Tensor | None = None,
    ) -> None:
        """Store rows; the first is row `start`, a multiple of 32.

        Args:
            values: [m, k] int8; within [-8, 7] for 4 bits. m is a multiple of 32, too, unless these
                are the last rows.
            scales: [m, k / group]: float16, or with FP4 bfloat16, of twice the numbers.
            more: minimums, float16, or zeros of any integer dtype: like `scales`.
            factors: [m] float32; None: 1.
        """
        packed, packed_scales, bits, kind, *_ = self.panels
        assert packed_scales is not None
        if kind == ZEROS:
            assert more is not None
            more = (-(more.int() + (8 if bits == 4 else 0))).short()
        assert scales.dtype == (torch.bfloat16 if kind == FP4 else torch.float16)
        m, k = values.shape
        first = start // PANEL
        rows = values.contiguous(), scales.contiguous(), None if more is None else more.contiguous()
        groups = k // scales.shape[1], k // packed_scales.shape[1]
        tensors = *rows, packed[first:], packed_scales[first:]
        library.call("nv_pack_int", *tensors, m, k, *groups, bits, kind)
        if factors is None:
            return
        if self.panels.factors is None:
            self.panels = self.panels._replace(factors=torch.ones(len(packed) * PANEL))
        assert self.panels.factors is not None
        self.panels.factors[start : start + len(factors)] = factors

    def store_rounded(self, start: int, rows: torch.Tensor) -> None:
        """Store `rows` [m, k] bfloat16, rounded as `integer.quantize` does. For PLAIN and W8A8.

        Args:
            start: see `store`, also for m.
        """
        packed, scales, *_ = self.panels
        assert scales is not None
        first = start // PANEL
        m, k = rows.shape
        tensors = rows.contiguous(), packed[first:], scales[first:]
        library.call("nv_pack_rounded", *tensors, m, k, *self.panels.arguments(k))


class PackedWeight(PanelWeight):
    """An unquantised bfloat16 weight [n, k] in the layout of the C kernels, of zeros at first.

    Args:
        reserve: gives the memory while it lasts.
    """

    def __init__(self, n: int, k: int, reserve: PageReserve | None = None) -> None:
        pairs = -(-k // PANEL) * PANEL // 2
        packed = lazy_zeros((-(-n // PANEL), pairs, PANEL, 2), torch.bfloat16, reserve)
        super().__init__(Panels(packed, None, 16), n, k)

    def store(self, start: int, rows: torch.Tensor) -> None:
        """Store `rows` [m, k]; the first is row `start`, a multiple of 32.

        m is a multiple of 32, too, unless these are the last rows.
        """
        rows = rows.to(torch.bfloat16).contiguous()
        library.call("nv_pack", rows, self.panels.packed[start // PANEL :], *rows.shape)


class OneDnnWeight:
    """An unquantised weight in oneDNN's layout, for dtypes without C kernels.

    `embedding` is slow: it unpacks the whole weight.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = weight.shape
        self.dtype = weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_HINT_ROWS)

    def dense(self) -> torch.Tensor:
        """Return the weight [n, k] as it was given."""
        return self._packed.to_dense()

    def replace(self, weight: torch.Tensor) -> None:
        """Multiply with `weight` [n, k] from now on."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_HINT_ROWS)

    def release(self) -> None:
        """Free the memory; `replace` comes before the next product."""
        self._packed = None

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.dense())


def use_onednn(weight: torch.Tensor) -> bool:
    """Return whether oneDNN supports `weight` here and `weight` is large enough to gain from it."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not weight.is_cpu or not available or weight.numel() < _ONEDNN_MIN_ELEMENTS:
        return False
    if weight.dtype == torch.float32:
        return True
    onednn = torch.ops.mkldnn
    is_bfloat16 = weight.dtype == torch.bfloat16
    return onednn._is_mkldnn_bf16_supported() if is_bfloat16 else onednn._is_mkldnn_fp16_supported()
