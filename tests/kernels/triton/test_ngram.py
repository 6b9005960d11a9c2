"""Prompt lookup in Triton proposes what plain torch does. Without a GPU it is interpreted. It also
compiles for GPUs that this machine does not have.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from nanovllm.core.messages import Row
from nanovllm.features.speculation.proposers.ngram import Ngram, lookup
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.kernels.triton import ngram
from nanovllm.kernels.triton.kernels import TritonKernels
from tests.kernels.triton.harness import ARCHS, compile_launches, count_variants
from tests.kernels.triton.inputs import DEVICE
from tests.kernels.triton.interpreter import patch_interpreter
from tests.kernels.triton.test_compile import meta

patch_interpreter()
WIDTH = 70


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Search in several blocks, compare their results in two turns, and write drafts in several."""
    monkeypatch.setattr(ngram, "_BLOCK", 8)
    monkeypatch.setattr(ngram, "_PARTS", 4)
    monkeypatch.setattr(ngram, "_DRAFTS", 4)


def make_table(num_rows, alphabet, seed):
    """Return tokens as the device tables have them: a view of rows that lie further apart."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(alphabet, (num_rows, WIDTH + 5), generator=generator).int().to(DEVICE)


def upload(numbers):
    return torch.tensor(numbers, device=DEVICE)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 4), (3, 3), (1, 9)])
@pytest.mark.parametrize("alphabet", [1, 2, 4, 10**9])
def test_propose(alphabet, sizes):
    """All lengths from one token to a full row, and cells that are not to be written."""
    chooser = random.Random(alphabet)
    known = [1, 2, 3, 7, 8, 9, 16, 17, 40, 63, 64, 65, WIDTH - 1]
    limits = [chooser.randint(1, min(11, WIDTH - length)) for length in known]
    table = make_table(len(known) + 2, alphabet, seed=len(known))
    table_indices = chooser.sample(range(len(table)), len(known))
    expected = table.clone()
    found = [
        bool(lookup(expected[table_idx], length, limit, sizes))
        for table_idx, length, limit in zip(table_indices, known, limits, strict=True)
    ]
    assert any(found) == (alphabet < 5)
    ngram.propose(table[:, :WIDTH], upload(table_indices), upload(known), upload(limits), sizes)
    assert torch.equal(table, expected)


def test_an_occurrence_in_any_place():
    """Each row has its last token also at another place, and no other token twice."""
    places = upload([*range(0, WIDTH - 3, 3), WIDTH - 3])
    table = torch.arange(WIDTH, device=DEVICE).int().repeat(len(places), 1)
    table[:, WIDTH - 2] = places
    ones = torch.ones_like(places)
    ngram.propose(table, ones.cumsum(0) - 1, ones * (WIDTH - 1), ones, (1, 1))
    following = (places + 1).clamp(max=WIDTH - 3)
    assert torch.equal(table[:, WIDTH - 1].long(), following)


def test_the_proposer_counts_all_drafts_of_a_gpu():
    """The host does not learn what was found: a row without an n-gram keeps what its cells hold."""
    table = make_table(3, 10**9, seed=0)
    table[1, :6] = upload([1, 2, 3, 9, 1, 2])
    expected = table.clone()
    expected[1, 6:9] = upload([3, 9, 1])
    tables = SimpleNamespace(
        platform=SimpleNamespace(upload=upload, runs_ahead=True),
        kernels=TritonKernels(),
        token_ids=table[:, :WIDTH],
    )
    rows = [Row(5, 1, 5, 4, True, 3), Row(6, 2, 9, 3, True, 2)]
    proposer = Ngram(2, 4)
    proposer.allocate(tables, 0)
    assert proposer.propose(rows) == [3, 2]
    assert torch.equal(table, expected)
    tables.kernels = TORCH
    table[1, 6:9] = 0
    proposer.allocate(tables, 0)
    assert proposer.propose(rows) == [3, 2]
    assert torch.equal(table, expected)


@pytest.mark.parametrize("sizes", [(2, 4)])
def test_compiles_without_spills(sizes, monkeypatch):
    monkeypatch.undo()

    token_ids = meta(513, 131073 + 8192, dtype=torch.int32)[:, :131073]
    args = (token_ids, *[meta(64)] * 3, sizes)
    compiled = compile_launches((ngram.propose, *args))
    assert list(compiled) == list(ARCHS)
    for kernels in compiled.values():
        assert [kernel.name for kernel in kernels] == ["_find", "_copy"]
        for kernel in kernels:
            assert kernel.n_spills == 0, kernel
            assert 0 < kernel.n_regs <= 128, kernel


def propose_for_few_rows():
    """Propose as `Ngram` does: the columns are parts of one upload."""
    for rows in (1, 2, 3, 16):
        table_indices, num_known, num_drafts = torch.ones(3, rows, dtype=torch.int64).unbind()
        tokens = torch.zeros(rows + 1, WIDTH, dtype=torch.int32)
        ngram.propose(tokens, table_indices, num_known, num_drafts, (2, 4))


def test_any_number_of_rows_shares_the_compiled_kernels():
    """Symptom: a request waits for a compiler, because the warm-up has one row."""
    assert count_variants(propose_for_few_rows) == {"_find": 1, "_copy": 1}
