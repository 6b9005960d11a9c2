"""Weights with all their bits, packed for the C kernels or for oneDNN. Knows no layer."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.cpu import ops
from nanovllm.kernels.cpu.expert_ops import Panels
from nanovllm.utils.pages import PageReserve

_ONEDNN_HINT_ROWS = 16
"""Number of input rows that oneDNN optimises its layout for. Inputs may have any number of rows."""
_ONEDNN_MIN_ELEMENTS = 2**20
"""Minimum elements of a weight to amortise oneDNN's 50 us call overhead."""


class PackedWeight:
    """An unquantised bfloat16 weight [n, k] in the layout of the C kernels, of zeros at first.

    Args:
        reserve: gives the memory while it lasts.
    """

    def __init__(self, n: int, k: int, reserve: PageReserve | None = None) -> None:
        self._packed = ops.packed_zeros(n, k, reserve)
        self._output_size = n

    @property
    def panels(self) -> Panels:
        """Return the weight for the kernels of experts."""
        return Panels(self._packed, None, 16)

    def store(self, start: int, rows: torch.Tensor) -> None:
        """Store `rows` [m, k]; the first is row `start`, a multiple of 32.

        m is a multiple of 32, too, unless these are the last rows.
        """
        ops.pack_rows(rows.to(torch.bfloat16), self._packed, start)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear(x, self._packed, self._output_size, bias)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return ops.gather(ids, self._packed)


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
