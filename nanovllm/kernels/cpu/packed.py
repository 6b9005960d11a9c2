"""Weights packed for the C kernels or for oneDNN. Knows no layer."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.cpu import ops
from nanovllm.utils.pages import PageReserve

_ONEDNN_HINT_ROWS = 16
"""Number of input rows that oneDNN optimises its layout for. Inputs may have any number of rows."""
_ONEDNN_MIN_ELEMENTS = 2**20
"""Minimum elements of a weight to amortise oneDNN's 50 us call overhead."""


class Panels(NamedTuple):
    """A weight in the layout of the C kernels, see `ops.packed_zeros` and `ops.pack_int`."""

    packed: torch.Tensor
    scales: torch.Tensor | None
    """With 8 and 4 bits only; [panels, groups, 32], or [panels, groups, 2, 32] with minimums."""
    bits: int
    fp4: bool = False
    """See `ops.kind_of`."""

    def arguments(self, inputs: int) -> tuple[int, int, int]:
        """Return the group, the bits and the kind of a weight of `inputs` inputs."""
        if self.scales is None:
            return 0, self.bits, 0
        return inputs // self.scales.shape[1], self.bits, ops.kind_of(self.scales, self.fp4)


class PanelWeight:
    """A weight [n, k] in the layout of the C kernels, for inputs in bfloat16.

    They round the inputs to 16 bits for a weight of 8 bits, and to 8 bits for one of 4.

    Args:
        num_outputs: n.
    """

    def __init__(self, panels: Panels, num_outputs: int) -> None:
        self.panels = panels
        self._num_outputs = num_outputs

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed, scales, bits, fp4 = self.panels
        if scales is None:
            return ops.linear(x, packed, self._num_outputs, bias)
        return ops.linear_int(x, packed, scales, self._num_outputs, bits, bias, fp4)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        packed, scales, bits, fp4 = self.panels
        if scales is None:
            return ops.gather(ids, packed)
        return ops.gather_int(ids, packed, scales, bits, fp4)


class PackedWeight(PanelWeight):
    """An unquantised bfloat16 weight [n, k] in the layout of the C kernels, of zeros at first.

    Args:
        reserve: gives the memory while it lasts.
    """

    def __init__(self, n: int, k: int, reserve: PageReserve | None = None) -> None:
        super().__init__(Panels(ops.packed_zeros(n, k, reserve), None, 16), n)

    def store(self, start: int, rows: torch.Tensor) -> None:
        """Store `rows` [m, k]; the first is row `start`, a multiple of 32.

        m is a multiple of 32, too, unless these are the last rows.
        """
        ops.pack_rows(rows.to(torch.bfloat16), self.panels.packed, start)


class OneDnnWeight:
    """An unquantised weight in oneDNN's layout, for dtypes and shapes without C kernels.

    `embedding` is slow: it unpacks the whole weight.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_HINT_ROWS)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._packed.to_dense())


def use_onednn(weight: torch.Tensor) -> bool:
    """Return whether oneDNN supports `weight` here and `weight` is large enough to gain from it."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not available or weight.numel() < _ONEDNN_MIN_ELEMENTS:
        return False
    if weight.dtype == torch.float32:
        return True
    onednn = torch.ops.mkldnn
    is_bfloat16 = weight.dtype == torch.bfloat16
    return onednn._is_mkldnn_bf16_supported() if is_bfloat16 else onednn._is_mkldnn_fp16_supported()
