"""Triton computes a prompt's tokens in cells with the error of the form that takes them one by one,
and its bits do not depend on how a prompt is cut at the ends of cells. Interpreted without a GPU.
"""

import dataclasses
from typing import NamedTuple

import pytest
import torch

from nanovllm.kernels.states import CHUNK_SIZE, Cells, StatePart, StateRows, States
from nanovllm.kernels.triton.kernels import TritonKernels
from tests.closeness import assert_close
from tests.kernels.state_cases import make_rows, make_states, naive_delta, part_of
from tests.kernels.triton.harness import compile_launches, count_variants
from tests.kernels.triton.inputs import DEVICE, SIMULATED, assert_as_good, randn
from tests.kernels.triton.interpreter import patch_interpreter
from tests.kernels.triton.test_compile import meta

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()
TRITON = TritonKernels()
BF16 = torch.bfloat16


class Heads(NamedTuple):
    """Numbers of heads, and their sizes."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


def make_parts(heads: Heads) -> list[StatePart]:
    matrix = StatePart((heads.key_dim, heads.value_dim), torch.float32)
    return [StatePart((3, 4), BF16), *[matrix] * heads.values]


def make_inputs(heads: Heads, tokens: int, *, decay: float, beta: float, likeness: float = 0.0):
    """Return random inputs.

    Args:
        decay: the larger, the more is forgotten.
        beta: the middle of what the sigmoid makes beta of.
        likeness: 0: the tokens are independent; 1: they are equal.
    """
    width = 2 * heads.keys * heads.key_dim + heads.values * heads.value_dim
    qkv = (1 - likeness) * randn(tokens, width) + likeness * randn(width, seed=1)
    gates = randn(2, tokens, heads.values, seed=2)
    gates[1] += beta
    a, b = gates.to(BF16)
    return qkv.to(BF16), a, b, randn(heads.values, seed=3) / 2, randn(heads.values, seed=4) + decay


def states_of(heads: Heads, pages: list[list[int]]) -> States:
    pool, places, parts = make_states(make_parts(heads), 8, 2)
    states = States(pool.to(DEVICE), places.to(DEVICE), parts)
    for one in pages:
        for head in range(heads.values):
            numbers = randn(heads.key_dim, heads.value_dim, seed=9 * one[0] + head)
            part_of(states, one, 1 + head).copy_(numbers)
    return states


def matrices(states: States, pages: list[int]) -> torch.Tensor:
    return torch.stack([part_of(states, pages, 1 + h) for h in range(len(states.parts) - 1)])


def rows_of(pages, lengths, in_cells, written=None) -> StateRows:
    """Return rows, of whose tokens the first `in_cells` are in cells."""
    spans, ends, begins, start = [], [0], [], 0
    for length, count in zip(lengths, in_cells, strict=True):
        for first in range(0, count, CHUNK_SIZE):
            spans.append((start + first, min(CHUNK_SIZE, count - first)))
        ends.append(len(spans))
        begins.append(start + count)
        start += length
    tensors = (torch.tensor(x).int().to(DEVICE) for x in (spans, ends, begins))
    cells = Cells(*tensors, sum(in_cells)) if spans else None
    rows = make_rows(pages, lengths, written)
    moved = (x.to(DEVICE) for x in (rows.pages, rows.cu_seqlens, rows.write_lens))
    return StateRows(*moved, cells=cells)


SMALL = Heads(1, 2, 16, 16)
CASES = [
    (Heads(1, 1, 16, 16), {"decay": -6.0, "beta": 4.0}),
    (SMALL, {"decay": -8.0, "beta": 0.0}),
    (Heads(1, 4, 20, 12), {"decay": -2.0, "beta": -4.0}),
    (Heads(1, 1, 36, 17), {"decay": 3.0, "beta": 4.0}),
    (Heads(1, 1, 16, 16), {"decay": -9.0, "beta": 9.0, "likeness": 0.9}),
    (Heads(1, 1, 16, 16), {"decay": -9.0, "beta": 9.0, "likeness": 1.0}),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("heads", "options"), CASES[:2] if SIMULATED else CASES)
def test_errors_in_bfloat16_are_those_of_single_tokens(heads, options) -> None:
    """With strong and weak decay, beta near 0 and 1, and tokens that are alike."""
    tokens, pages = 100, [1, 2]
    inputs = make_inputs(heads, tokens, **options)
    before = states_of(heads, [pages])
    exact, exact_state = naive_delta(*(x.cpu() for x in inputs), matrices(before, pages).cpu())
    found = []
    for in_cells in (tokens, 0):
        states = before._replace(pool=before.pool.clone())
        out = TRITON.gated_delta(*inputs, states, rows_of([pages], [tokens], [in_cells]))
        found.append((out.cpu(), matrices(states, pages).cpu()))
    (out, state), (other, other_state) = found
    assert_as_good(out, other, exact)
    assert_as_good(state, other_state, exact_state)


@pytest.mark.skipif(bool(SIMULATED), reason="thousands of tokens")
@pytest.mark.parametrize("decay", [-9.0, -3.0])
def test_errors_do_not_grow(decay) -> None:
    """Over a long prompt, whose tokens are forgotten slowly or not at once."""
    heads, tokens, pages = Heads(1, 1, 32, 16), 1024, [1, 2]
    inputs = make_inputs(heads, tokens, decay=decay, beta=0.0)
    states = states_of(heads, [pages])
    _, exact = naive_delta(*(x.cpu() for x in inputs), matrices(states, pages).cpu())
    TRITON.gated_delta(*inputs, states, rows_of([pages], [tokens], [tokens]))
    found = matrices(states, pages).cpu()
    assert_close(found, exact, of_largest=8 * torch.finfo(torch.float32).eps)


def test_cuts_of_a_bfloat16_prompt_change_no_bit() -> None:
    """Two prompts in one step, an answer between them: the same bits as one by one, in steps that
    end where a cell does. The tokens of the answer are computed without a cell.
    """
    pages, lengths, prompts = [[1, 2], [3, 4], [5, 6]], [70, 3, 133], [68, 0, 130]
    inputs = make_inputs(SMALL, sum(lengths), decay=-3.0, beta=1.0)
    whole = states_of(SMALL, pages)
    expected = TRITON.gated_delta(*inputs, whole, rows_of(pages, lengths, prompts))
    cut, start = states_of(SMALL, pages), 0
    for one, length, prompt in zip(pages, lengths, prompts, strict=True):
        ends = [*range(CHUNK_SIZE, prompt, CHUNK_SIZE), prompt, *range(prompt + 1, length + 1)]
        for first, end in zip([0, *ends], ends, strict=False):
            part = slice(start + first, start + end)
            rows = rows_of([one], [end - first], [max(min(end, prompt) - first, 0)])
            tokens = [x[part] for x in inputs[:3]]
            out = TRITON.gated_delta(*tokens, *inputs[3:], cut, rows)
            assert torch.equal(out, expected[part])
        start += length
    assert torch.equal(cut.pool, whole.pool)


def test_a_part_of_a_bfloat16_cell_has_the_bits_of_the_whole() -> None:
    """A prompt that ends in a cell gets the outputs of a longer one. Drafts change no state."""
    pages, length = [1, 2], 100
    inputs = make_inputs(SMALL, length, decay=-3.0, beta=1.0)
    expected = TRITON.gated_delta(
        *inputs, states_of(SMALL, [pages]), rows_of([pages], [length], [length])
    )
    states, drafted = states_of(SMALL, [pages]), states_of(SMALL, [pages])
    out = TRITON.gated_delta(
        *(x[:77] for x in inputs[:3]), *inputs[3:], states, rows_of([pages], [77], [77])
    )
    assert torch.equal(out, expected[:77])
    rows = rows_of([pages], [80], [77], [77])
    TRITON.gated_delta(*(x[:80] for x in inputs[:3]), *inputs[3:], drafted, rows)
    assert torch.equal(states.pool, drafted.pool)
    nothing = dataclasses.replace(rows, write_lens=torch.zeros_like(rows.write_lens))
    TRITON.gated_delta(*(x[:80] for x in inputs[:3]), *inputs[3:], drafted, nothing)
    assert torch.equal(states.pool, drafted.pool)


def launch_prompt(key_heads: int, value_heads: int) -> None:
    """Launch what a prompt's tokens take, with heads of 128."""
    heads = Heads(key_heads, value_heads, 128, 128)
    width = 128 * (2 * key_heads + value_heads)
    states = States(
        meta(99, 2**17, dtype=torch.uint8),
        meta(1 + value_heads, 2, dtype=torch.int64),
        tuple(make_parts(heads)),
    )
    spans, ends, rows, pages = (meta(*n, dtype=torch.int32) for n in ((5, 2), (4,), (3,), (3, 9)))
    step = StateRows(pages, ends, rows, cells=Cells(spans, ends, rows, 300))
    gates, of_heads = meta(300, 2 * value_heads, dtype=BF16), meta(value_heads, dtype=torch.float32)
    qkv = meta(300, width, dtype=BF16)
    TRITON.gated_delta(qkv, *gates.chunk(2, 1), of_heads, of_heads, states, step)


def test_they_compile_for_other_gpus() -> None:
    """At the shape of Qwen3.5-4B. Two programs of 4 warps, or one of 8, have an SM's registers."""
    for kernels in compile_launches((launch_prompt, 16, 32)).values():
        assert [kernel.name for kernel in kernels] == ["_prepare_cells", "_advance_cells"]
        for kernel in kernels:
            assert kernel.n_spills == 0, kernel
            assert kernel.shared <= 64 * 1024, kernel


def launch_steps() -> None:
    """Launch prompts of several sizes."""
    for tokens in (1, 16, 64, 130):
        inputs = make_inputs(SMALL, tokens, decay=0.0, beta=0.0)
        rows = rows_of([[1, 2]], [tokens], [tokens])
        TRITON.gated_delta(*inputs, states_of(SMALL, [[1, 2]]), rows)


def test_prompts_of_all_sizes_compile_one_variant() -> None:
    assert count_variants(launch_steps) == {"_prepare_cells": 1, "_advance_cells": 1}
