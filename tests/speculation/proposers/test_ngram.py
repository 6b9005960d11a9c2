"""Prompt lookup in C and in torch against a brute-force search in plain Python."""

import random

import pytest
import torch

from nanovllm.core.messages import Admission, Row, Schedule
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.features.speculation.proposers import ngram
from nanovllm.features.speculation.proposers.ngram import Ngram
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.platform.cpu import CPU
from nanovllm.worker.device_tables import DeviceTables
from tests.every_case import examples
from tests.kernels.cpu.helpers import native as needs_compiler

GARBAGE = 7
each_way = pytest.mark.parametrize(
    "native", [pytest.param(True, marks=needs_compiler, id="c"), pytest.param(False, id="torch")]
)


def search(tokens, num_drafts, sizes):
    """Return the drafts for a row of `tokens`; none if there is no such n-gram."""
    smallest, largest = sizes
    for size in range(largest, smallest - 1, -1):
        for end in range(len(tokens) - 2, size - 2, -1):
            if tokens[end - size + 1 : end + 1] == tokens[-size:]:
                grown = list(tokens)
                for place in range(end + 1, end + 1 + num_drafts):
                    grown.append(grown[place])
                return grown[len(tokens) :]
    return []


def make_row(table_idx, num_known, limit):
    return Row(9, table_idx, num_known - 1, 1 + limit, samples=True, num_draft_tokens=limit)


class Tables:
    """Device tables with a proposer, and what they should hold: `cells`, the columns of tokens and
    blocks of all table rows, and `known`, the known tokens of each row that has a sequence.
    """

    def __init__(self, sizes, native, max_model_len=60, max_num_seqs=3):
        info = WorkerInfo(8, 16, max_model_len, 1000, 16384)
        kernels = CPU().kernels(torch.float32, native=native)
        self.tables = DeviceTables(info, max_num_seqs, CPU(), kernels)
        self.tables.token_ids.fill_(GARBAGE)
        self.tables.block_tables.fill_(GARBAGE)
        self.num_columns = max_model_len + 1
        self.sizes = sizes
        self.cells = self.table.tolist()
        self.known = {}
        self.proposer = Ngram(*sizes)
        self.proposer.allocate(self.tables, info.num_blocks)

    @property
    def table(self):
        return self.tables._table

    def admit(self, table_idx, tokens):
        """Give a table row to a new sequence. What was there stands behind the tokens."""
        admission = Admission(
            table_idx, table_idx, tokens, len(tokens), [0], SamplingParams(), 0, frozenset(), ()
        )
        schedule = Schedule(0, [admission], [], [])
        self.tables.apply(schedule)
        self.proposer.admit(schedule)
        self.cells[table_idx][self.num_columns] = 0
        self.known[table_idx] = []
        self.append(table_idx, tokens)

    def append(self, table_idx, tokens):
        """Add tokens to a row as the step that samples them does."""
        start = len(self.known[table_idx])
        self.known[table_idx] += tokens
        self.cells[table_idx][start : start + len(tokens)] = tokens
        ids = torch.tensor(tokens, dtype=torch.int32)
        self.tables.token_ids[table_idx, start : start + len(tokens)] = ids

    def propose(self, limits):
        """Propose for rows {table_idx: limit}; check all cells; return the drafts by table row."""
        rows, drafts = [], {}
        for table_idx, limit in limits.items():
            known = len(self.known[table_idx])
            rows.append(make_row(table_idx, known, limit))
            drafts[table_idx] = search(self.known[table_idx], limit, self.sizes)
            self.cells[table_idx][known : known + len(drafts[table_idx])] = drafts[table_idx]
        counts = self.proposer.propose(rows)
        assert counts == [len(found) for found in drafts.values()]
        assert self.table.tolist() == self.cells
        return drafts


@each_way
def test_random_histories(native):
    """Rows of few different tokens are admitted, again and again, and grow by what was accepted of
    the drafts and a token more, also past the room of an index. Steps propose for some rows, in any
    order.
    """
    rng = random.Random(0)
    for _ in range(examples(160)):
        alphabet = rng.choice([1, 2, 3, 4, 10**6])
        smallest = rng.randint(1, 3)
        tables = Tables((smallest, smallest + rng.randint(0, 3)), native, max_model_len=90)
        for _ in range(rng.randint(1, 12)):
            for table_idx in range(3):
                if table_idx not in tables.known or rng.random() < 0.15:
                    prompt = [rng.randrange(alphabet) for _ in range(rng.randint(1, 70))]
                    tables.admit(table_idx, prompt)
            rooms = {i: tables.num_columns - len(known) for i, known in tables.known.items()}
            rows = [i for i, room in rooms.items() if room]
            rows = rng.sample(rows, rng.randint(min(1, len(rows)), len(rows)))
            limits = {i: rng.randint(1, min(rooms[i], 9)) for i in rows}
            drafts = tables.propose(limits) if limits else {}
            for table_idx, room in rooms.items():
                accepted = drafts.get(table_idx, [])[: rng.randint(0, 9)]
                tables.append(table_idx, [*accepted, rng.randrange(alphabet)][:room])


@each_way
@pytest.mark.parametrize(
    ("tokens", "sizes", "drafts"),
    [
        ([1, 2, 3, 8, 9, 5, 3, 4, 1, 2, 3], (1, 3), [8, 9, 5, 3]),  # the longest, not the last
        ([1, 2, 3, 8, 9, 5, 3, 4, 1, 2, 3], (1, 1), [4, 1, 2, 3]),  # the last
        ([1, 2, 8, 9, 1, 2, 5, 6, 1, 2], (2, 4), [5, 6, 1, 2]),
        ([4, 1, 2, 3, 5, 6, 7, 8, 0, 1, 2, 3], (2, 4), [5, 6, 7, 8]),  # shorter than the largest
        ([1, 2, 3, 1, 2], (2, 4), [3, 1, 2, 3]),  # a loop: the drafts go on with the drafts
        ([5, 6, 6], (1, 4), [6, 6, 6, 6]),
        ([6, 6, 6], (2, 2), [6, 6, 6, 6]),  # an occurrence that overlaps
        ([6, 6], (2, 2), []),  # an n-gram is not its own occurrence
        ([6], (1, 4), []),
        ([1, 2, 3, 4], (1, 4), []),
        ([2, 9, 9, 2], (2, 4), []),  # shorter than the smallest
    ],
)
def test_examples(tokens, sizes, drafts, native):
    tables = Tables(sizes, native)
    tables.admit(1, tokens)
    assert tables.propose({1: 4})[1] == drafts


@needs_compiler
@pytest.mark.parametrize("tokens", [[5], [5, 6]])
def test_n_grams_of_equal_hash(tokens):
    """An index of so few tokens has 64 buckets for each size."""
    tables = Tables((len(tokens), len(tokens)), native=True)
    for last in range(100, 400):
        tables.admit(0, [*tokens, last])
        assert tables.propose({0: 4}) == {0: []}


@each_way
def test_a_draft_may_be_the_token_past_max_model_len_and_none_comes_after_it(native):
    """The block table follows that token, and then the next table row."""
    tables = Tables((2, 4), native, max_model_len=10)
    tables.admit(0, [1, 2, 3, 1, 2, 3, 1, 2])
    tables.admit(1, [4, 4, 4, 4, 4, 4, 4, 4, 4, 4])
    assert tables.propose({0: 3, 1: 1}) == {0: [3, 1, 2], 1: [4]}


@each_way
def test_a_long_history(native):
    """A row of 20,000 tokens finds what it saw at its beginning, and grows by accepted drafts."""
    chooser, length = random.Random(0), 20_000
    history = [chooser.randrange(50_000) for _ in range(length)]
    tables = Tables((2, 4), native, max_model_len=length + 100, max_num_seqs=1)
    tables.admit(0, history + history[40:43])
    token_ids, known = tables.tables.token_ids, length + 3
    for accepted in (8, 2, 8):
        assert tables.proposer.propose([make_row(0, known, 8)]) == [8]
        start = known - length + 40
        assert token_ids[0, known : known + 8].tolist() == history[start : start + 8]
        known += accepted


@needs_compiler
def test_the_c_kernel_reads_only_new_tokens():
    """An occurrence is not found if it is put among tokens that were there at an earlier call. The
    engine does no such thing; a search of the whole row would find it.
    """
    tables = Tables((2, 4), native=True)
    tables.admit(0, [*range(100, 120), 1, 2])
    tables.propose({0: 4})
    tables.tables.token_ids[0, 4:6] = torch.tensor([1, 2])
    assert tables.proposer.propose([make_row(0, 22, 4)]) == [0]
    tables.admit(0, tables.tables.token_ids[0, :22].tolist())
    assert tables.proposer.propose([make_row(0, 22, 4)]) == [4]


@needs_compiler
def test_indices_follow_the_rows_lengths(monkeypatch):
    """All indices that a growing row has had take a few words for each of its tokens and sizes."""
    made = []
    lazy_zeros = ngram.lazy_zeros
    monkeypatch.setattr(
        ngram, "lazy_zeros", lambda *args: made.append(lazy_zeros(*args)) or made[-1]
    )
    tables = Tables((2, 4), native=True, max_model_len=2000, max_num_seqs=1)
    for known in range(1, 2001):
        tables.proposer.propose([make_row(0, known, 1)])
        assert len(made[-1]) >= 2 * 3 * known
    assert len(made) <= 6
    assert sum(len(index) for index in made) <= 2 * 3 * 4 * 2000


@needs_compiler
def test_rows_on_several_threads():
    """Threads share the rows of a call."""
    chooser = random.Random(0)
    tables = Tables((1, 3), native=True, max_num_seqs=40)
    for table_idx in range(40):
        tables.admit(table_idx, [chooser.randrange(3) for _ in range(50)])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in range(4):
            tables.propose(dict.fromkeys(range(40), 2))
            for table_idx in range(40):
                tables.append(table_idx, [chooser.randrange(3)])
    finally:
        torch.set_num_threads(before)
