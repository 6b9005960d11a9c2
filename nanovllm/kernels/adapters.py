"""The adapters of a step and of a layer, as `Kernels.add_lora` reads them, and its torch version.

The memory is allocated once and keeps its addresses: recorded steps and CUDA graphs read what it
holds when they run.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import torch


class AdapterTable(NamedTuple):
    """The adapters of one layer, one in each slot. Slices of the layer's outputs have own factors.

    A token x of slot i gets, in slice s, y += scales[i, s] * (a_s x) b_s, where a_s are the first
    ranks[i, s] of the R rows a[i, s * R :], and b_s as many rows of b[i], of the slice's columns.
    """

    # [slots, S * R, k] in the model's dtype, contiguous. R is the most that a rank may be.
    a: torch.Tensor
    b: torch.Tensor  # [slots, R, n], contiguous: the transpose of PEFT's lora_B
    ranks: torch.Tensor  # [slots, S] int32; 0: the adapter does not change this slice
    scales: torch.Tensor  # [slots, S] float32
    # [S] int32: the column after each slice. Slices are adjacent and end with n.
    ends: torch.Tensor
    # [most tokens of a step, largest S * R of all layers] float32, for a x. Layers share it.
    scratch: torch.Tensor

    @property
    def max_rank(self) -> int:
        return self.b.shape[1]


def empty_table(
    num_slots: int,
    max_rank: int,
    inputs: int,
    widths: Sequence[int],
    scratch: torch.Tensor,
    dtype: torch.dtype,
) -> AdapterTable:
    """Return a table without adapters, on the device of `scratch`.

    Args:
        inputs: k.
        widths: outputs of each slice.
    """
    device = scratch.device
    count = len(widths)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return AdapterTable(
        zeros(num_slots, count * max_rank, inputs),
        zeros(num_slots, max_rank, sum(widths)),
        zeros(num_slots, count, dtype=torch.int32),
        zeros(num_slots, count, dtype=torch.float32),
        torch.tensor(list(accumulate(widths)), dtype=torch.int32, device=device),
        scratch,
    )


class AdapterRows:
    """The slot of each token of a step's batch.

    Args:
        max_tokens: of a step.
    """

    def __init__(self, max_tokens: int, num_slots: int, device: torch.device) -> None:
        self.slots = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        """[max_tokens] int32; -1: the token has no adapter."""
        self.groups = torch.zeros(1 + 3 * num_slots, dtype=torch.int32)
        """For kernels on the CPU: the number of groups, then of each group its slot, and the first
        and the number of its tokens in `order`. A group has all tokens of a slot."""
        self.order = torch.zeros(max_tokens, dtype=torch.int32)
        """[max_tokens] int32, for kernels on the CPU: the tokens of each group, as in the batch."""
        self.is_empty = True
        """Whether no token has an adapter."""
        self._num_filled = 0  # tokens of `slots` that may have an adapter

    def fill(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Note the tokens of a batch: `counts[i]` tokens have slot `slots[i]`, -1 for none."""
        if all(slot < 0 for slot in slots):
            self.clear()
            return
        tokens = list(chain.from_iterable(map(repeat, slots, counts)))
        self._fill(torch.tensor(tokens).to(self.slots.device, non_blocking=True))

    def take(self, rows: "AdapterRows", indices: torch.Tensor) -> None:
        """Note tokens `indices` [O] int64 of another batch, in this order."""
        if rows.is_empty:
            self.clear()
        else:
            self._fill(rows.slots[indices])

    def clear(self) -> None:
        """Note a batch without adapters."""
        if not self.is_empty:
            self.groups[0] = 0
            self.slots[: self._num_filled].fill_(-1)
        self._num_filled = 0
        self.is_empty = True

    def _fill(self, slots: torch.Tensor) -> None:
        """Note tokens of `slots`, integers on the device."""
        self.slots[len(slots) : self._num_filled].fill_(-1)  # padding of a graph reads them
        self.slots[: len(slots)].copy_(slots)
        self._num_filled = len(slots)
        self.is_empty = False
        if self.slots.is_cpu:
            in_order, order = torch.sort(slots, stable=True)  # those without an adapter come first
            self.order[: len(order)] = order
            used, counts = torch.unique_consecutive(in_order, return_counts=True)
            numbers = [0]
            start = 0
            for slot, count in zip(used.tolist(), counts.tolist(), strict=True):
                if slot >= 0:
                    numbers[0] += 1
                    numbers += [slot, start, count]
                start += count
            self.groups[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)


def add_lora(y: torch.Tensor, x: torch.Tensor, rows: AdapterRows, table: AdapterTable) -> None:
    """Add the adapters' part to the outputs `y` [T, n] of a layer with inputs `x` [T, k], in place.

    Sums are in float32. The scaled product is added to `y` in float32, and the sum is rounded to
    the dtype of `y`.
    """
    if rows.is_empty:
        return
    slots = rows.slots[: len(x)]
    ends = table.ends.tolist()
    for slot in sorted(set(slots.tolist()) - {-1}):
        tokens = (slots == slot).nonzero()[:, 0]
        inputs = x[tokens].float()
        start = 0
        ranks = table.ranks[slot].tolist()
        scales = table.scales[slot].tolist()
        for i, (rank, scale, end) in enumerate(zip(ranks, scales, ends, strict=True)):
            if rank:
                first = i * table.max_rank
                a = table.a[slot, first : first + rank].float()
                b = table.b[slot, :rank, start:end].float()
                added = (inputs @ a.T) @ b * scale
                y[tokens, start:end] = (y[tokens, start:end].float() + added).to(y.dtype)
            start = end
