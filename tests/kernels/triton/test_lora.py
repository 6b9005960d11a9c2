"""Adapters in Triton agree with float64, and a row's bits with the row alone.

Without a GPU the kernels are interpreted.
"""

import pytest
import torch

from nanovllm.kernels.adapters import AdapterRows, AdapterTable, empty_table
from nanovllm.kernels.triton import lora
from tests.kernels.triton.harness import compile_launches
from tests.kernels.triton.inputs import DEVICE, few_dtypes, randn
from tests.kernels.triton.interpreter import patch_interpreter
from tests.kernels.triton.test_compile import assert_fits, meta

patch_interpreter()

SLOTS = 3


def make_table(rank, inputs, widths, dtype):
    table = empty_table(SLOTS, rank, inputs, widths, torch.zeros(1, 1, device=DEVICE), dtype)
    table.a.copy_(randn(*table.a.shape, dtype=dtype) / inputs**0.5)
    table.b.copy_(randn(*table.b.shape, dtype=dtype, seed=1))
    ranks = torch.randint(rank + 1, table.ranks.shape, generator=torch.Generator().manual_seed(2))
    ranks[1] = rank
    table.ranks.copy_(ranks)
    table.scales.copy_(randn(*table.scales.shape, seed=3))
    numbers = torch.arange(len(widths) * rank) % rank  # behind the rank there may be anything
    behind = (numbers >= ranks.repeat_interleave(rank, 1)).to(DEVICE)
    table.a.masked_fill_(behind[..., None], float("nan"))
    return table


def rows_of(slots):
    rows = AdapterRows(64, SLOTS, DEVICE)
    rows.fill(slots, [1] * len(slots))
    return rows


@few_dtypes
@pytest.mark.parametrize(
    ("rank", "inputs", "widths", "tokens"),
    [(8, 96, (40,), 5), (16, 1100, (70, 33, 1), 20), (40, 130, (64, 64), 33)],
    ids=str,
)
def test_add_lora(rank, inputs, widths, tokens, dtype):
    table = make_table(rank, inputs, widths, dtype)
    slots = torch.randint(-1, SLOTS, (tokens,), generator=torch.Generator().manual_seed(4)).tolist()
    x, y = randn(tokens, inputs, dtype=dtype), randn(tokens, sum(widths), dtype=dtype, seed=5)
    before, exact = y.clone(), y.double()
    lora.add_lora(y, x, rows_of(slots), table)
    wide = table._replace(a=table.a.double(), b=table.b.double())
    _add_exactly(exact, x.double(), slots, wide)
    # Sums of large numbers may be small: their error is one of the numbers.
    sizes = before.double().abs()
    _add_exactly(
        sizes,
        x.double().abs(),
        slots,
        wide._replace(a=wide.a.abs(), b=wide.b.abs(), scales=wide.scales.abs()),
    )
    assert ((y.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * sizes).all()
    assert torch.equal(y[[s < 0 for s in slots]], before[[s < 0 for s in slots]])
    assert not torch.equal(y, before)
    for token in (0, tokens - 1):  # whatever the other tokens, their number and their adapters
        alone = before[token : token + 1].clone()
        lora.add_lora(alone, x[token : token + 1], rows_of([slots[token]]), table)
        assert torch.equal(alone, y[token : token + 1])


def _add_exactly(y: torch.Tensor, x: torch.Tensor, slots: list[int], table: AdapterTable) -> None:
    """Do what `adapters.add_lora` does, in float64 and token by token."""
    for token, slot in enumerate(slots):
        start = 0
        for slice_, end in enumerate(table.ends.tolist()):
            rank = int(table.ranks[slot, slice_]) if slot >= 0 else 0
            first = slice_ * table.max_rank
            inner = table.a[slot, first : first + rank] @ x[token]
            added = table.b[slot, :rank, start:end].T @ inner * table.scales[slot, slice_]
            y[token, start:end] += added
            start = end


def test_no_tokens_and_no_adapters():
    table = make_table(8, 32, (16,), torch.float32)
    y = randn(2, 16)
    before = y.clone()
    lora.add_lora(y, randn(2, 32), rows_of([-1, -1]), table)
    lora.add_lora(y[:0], randn(0, 32), rows_of([]), table)
    assert torch.equal(y, before)


def launch(tokens, rank, dtype):
    """Add adapters to the merged q, k and v of Qwen3-8B, 8 of them at once."""
    table = AdapterTable(
        meta(8, 3 * rank, 4096, dtype=dtype), meta(8, rank, 6144, dtype=dtype),
        meta(8, 3, dtype=torch.int32), meta(8, 3, dtype=torch.float32),
        meta(3, dtype=torch.int32), meta(1, 1, dtype=torch.float32),
    )  # fmt: skip
    rows = AdapterRows(1, 8, torch.device("cpu"))
    rows.slots = meta(tokens, dtype=torch.int32)
    lora.add_lora(meta(tokens, 6144, dtype=dtype), meta(tokens, 4096, dtype=dtype), rows, table)


def test_compiles():
    """For GPUs that are not present; no register is spilled."""
    compiled = compile_launches((launch, 5, 64, torch.bfloat16))
    assert_fits(compiled, "_shrink", "_expand")
    assert all(kernel.shared <= 99 * 1024 for kernels in compiled.values() for kernel in kernels)
