"""The C kernel of adapters: against plain torch, and a token's bits whatever the others are."""

import random
from collections.abc import Sequence

import pytest
import torch

from nanovllm.kernels.adapters import AdapterRows, AdapterTable, add_lora, empty_table
from nanovllm.kernels.cpu import ops
from tests.closeness import assert_close

CPU = torch.device("cpu")


def random_table(
    max_rank: int, inputs: int, widths: Sequence[int], ranks: Sequence[Sequence[int]]
) -> AdapterTable:
    """Return a table whose slots have `ranks`, and NaN wherever no adapter is."""
    scratch = torch.full((512, len(widths) * max_rank), torch.nan)
    table = empty_table(len(ranks), max_rank, inputs, widths, scratch, torch.bfloat16)
    table.a.fill_(torch.nan)
    table.b.fill_(torch.nan)
    table.ranks.copy_(torch.tensor(ranks))
    table.scales.copy_(torch.rand(table.scales.shape) * 2)
    for slot, of_slices in enumerate(ranks):
        start = 0
        for i, (rank, width) in enumerate(zip(of_slices, widths, strict=True)):
            first = i * max_rank
            table.a[slot, first : first + rank] = torch.randn(rank, inputs)
            table.b[slot, :rank, start : start + width] = torch.randn(rank, width)
            start += width
    return table


def filled(slots: Sequence[int], num_slots: int) -> AdapterRows:
    rows = AdapterRows(512, num_slots, CPU)
    rows.fill(slots, [1] * len(slots))
    return rows


@pytest.mark.thinned(3)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("inputs", "widths", "max_rank", "ranks"),
    [
        (64, (96, 48, 48), 8, [[8, 4, 0], [1, 3, 8], [5, 8, 2]]),
        (1024, (512, 256), 16, [[16, 16], [8, 8], [0, 7]]),
        (100, (7,), 3, [[3], [1], [2]]),
        (31, (600, 33), 64, [[64, 1], [63, 64], [17, 9]]),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 300])
def test_the_kernel_is_the_reference(
    inputs: int, widths: tuple[int, ...], max_rank: int, ranks: list[list[int]], num_tokens: int
) -> None:
    """Within one rounding to bfloat16; tokens without an adapter keep their bits."""
    torch.manual_seed(0)
    table = random_table(max_rank, inputs, widths, ranks)
    slots = random.Random(num_tokens).choices(range(-1, 3), k=num_tokens)
    rows, x = filled(slots, 3), torch.randn(num_tokens, inputs + 5).bfloat16()[:, :inputs]
    base = torch.randn(num_tokens, sum(widths)).bfloat16()
    expected, found = base.float(), base.clone()
    add_lora(expected, x, rows, table)
    ops.add_lora(found, x, rows, table)
    assert_close(found.float(), expected, rtol=2**-7, atol=2e-3)
    untouched = torch.tensor(slots) < 0
    assert torch.equal(found[untouched], base[untouched])
    assert (found != base).any() == any(slot >= 0 and any(ranks[slot]) for slot in slots)


@pytest.mark.usefixtures("kernels")
def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    """In any order, with any others, in a table of a larger rank, and after larger steps."""
    torch.manual_seed(1)
    table = random_table(24, 96, (80, 40), [[24, 3], [1, 8], [7, 0]])
    x, base = torch.randn(200, 96).bfloat16(), torch.randn(200, 120).bfloat16()
    slots = random.Random(3).choices(range(-1, 3), k=200)
    whole = base.clone()
    rows = filled(slots, 3)
    ops.add_lora(whole, x, rows, table)
    for size in (1, 2, 3, 4, 7, 9, 33, 70):
        chosen = torch.tensor(random.Random(size).sample(range(200), size))
        part = base[chosen]
        rows.fill([slots[i] for i in chosen.tolist()], [1] * size)
        ops.add_lora(part, x[chosen], rows, table)
        assert torch.equal(part, whole[chosen])


def test_rows_of_a_batch() -> None:
    """Chunks of tokens, a part of them, and none."""
    rows, part = AdapterRows(16, 4, CPU), AdapterRows(16, 4, CPU)
    rows.fill([2, -1, 0, 2], [3, 2, 1, 2])
    assert rows.slots.tolist() == [2, 2, 2, -1, -1, 0, 2, 2, *[-1] * 8]
    assert rows.groups[:7].tolist() == [2, 0, 2, 1, 2, 3, 5]
    assert rows.order[2:8].tolist() == [5, 0, 1, 2, 6, 7]
    part.take(rows, torch.tensor([6, 3, 5]))
    assert part.slots.tolist() == [2, -1, 0, *[-1] * 13]
    rows.fill([1, -1], [1, 1])
    assert rows.slots.tolist() == [1, *[-1] * 15]
    rows.fill([-1, -1], [8, 8])
    assert rows.is_empty
    assert rows.slots.tolist() == [-1] * 16
    assert rows.groups[0] == 0
    part.take(rows, torch.tensor([1]))
    assert part.is_empty
    assert part.slots.tolist() == [-1] * 16
