"""Which positions a draft network must compute, as sequences come, share blocks and go."""

from typing import Any

import pytest

from nanovllm.core.messages import Admission, Load, NewBlocks, Row, Schedule, TierEntry, Transfers
from nanovllm.features.speculation.proposers.draft_kv import DraftKV
from nanovllm.options.sampling_params import SamplingParams

SIZE = 4


@pytest.fixture
def kv() -> DraftKV:
    return DraftKV(num_table_rows=3, num_blocks=10, block_size=SIZE, width=4)


def admit(kv: DraftKV, table_idx: int, blocks: list[int], num_cached: int = 0) -> None:
    tokens = [1] * (len(blocks) * SIZE)
    admission = Admission(
        table_idx, table_idx, tokens, 1, blocks, SamplingParams(), 0, frozenset(), ()
    )
    rows = [Row(table_idx, table_idx, num_cached * SIZE, 1, False)]
    kv.admit(Schedule(0, [admission], [], rows))


def step(kv: DraftKV, row: Row, *new_blocks: NewBlocks) -> None:
    kv.admit(Schedule(0, [], list(new_blocks), [row]))


def row(table_idx: int, num_known: int, num_drafts: int = 2) -> Row:
    return Row(table_idx, table_idx, num_known - 1, 1 + num_drafts, True, num_drafts)


def test_a_row_catches_up_once(kv: DraftKV) -> None:
    admit(kv, 0, [5, 6, 7])
    assert kv.start(row(0, 7)) == 0
    kv.set_right(0, 7)
    assert kv.start(row(0, 8)) == 7
    assert kv.start(row(0, 7)) == 6, "the last position gives the first draft"


def test_a_prefix_is_computed_once_by_any_row(kv: DraftKV) -> None:
    admit(kv, 0, [5, 6, 7])
    kv.set_right(0, 6)
    admit(kv, 1, [5, 6, 8], num_cached=2)
    assert kv.start(row(1, 11)) == 6
    kv.set_right(1, 11)
    assert kv.start(row(0, 12)) == 8
    admit(kv, 2, [5, 6, 7], num_cached=1)
    assert kv.start(row(2, 11)) == 4, "the second block has a new owner"


@pytest.mark.parametrize(("num_accepted", "expected"), [(0, 6), (1, 7), (2, 8), (3, 8)])
def test_the_kv_of_accepted_drafts_is_kept(kv: DraftKV, num_accepted: int, expected: int) -> None:
    """Three drafts behind 6 tokens; the KV of the third was not needed to propose it."""
    admit(kv, 0, [5, 6, 7])
    kv.set_right(0, 6)
    kv.set_drafted(0, 8)
    num_known = 6 + num_accepted + 1
    step(kv, Row(0, 0, num_known - 1, 1, True))
    assert kv.start(row(0, num_known + 1)) == expected


def test_drafts_of_the_last_sequence_in_a_table_row_do_not_count(kv: DraftKV) -> None:
    admit(kv, 0, [5, 6, 7])
    kv.set_right(0, 3)
    kv.set_drafted(0, 6)
    admit(kv, 0, [5, 6], num_cached=0)
    step(kv, Row(0, 0, 7, 1, True))
    assert kv.start(row(0, 8)) == 0


def test_a_block_that_took_rejected_drafts_may_go_to_another_sequence(kv: DraftKV) -> None:
    admit(kv, 0, [5, 6])
    kv.set_right(0, 4)
    admit(kv, 1, [7])
    kv.set_right(1, 4)
    step(kv, row(1, 5), NewBlocks(1, 1, [6]))
    kv.set_right(1, 6)
    step(kv, row(0, 5), NewBlocks(0, 1, [8]))
    assert kv.start(row(0, 6)) == 4, "not the other sequence's two positions"


def test_blocks_to_zero(kv: DraftKV) -> None:
    admit(kv, 0, [5, 6, 7, 8])
    assert kv.begun_blocks(row(0, 6), 7) == [6]
    assert kv.begun_blocks(row(0, 6), 9) == [6, 7]
    assert kv.begun_blocks(row(0, 8), 8) == []
    kv.set_right(0, 6)
    assert kv.begun_blocks(row(0, 6), 7) == []
    assert kv.begun_blocks(row(0, 6), 13) == [7, 8]


def chunks(kv: DraftKV, rows: list[Row], num_allowed: int, budget: int) -> list[Any]:
    return [
        [(row.table_idx, row.num_computed_tokens, row.end) for row in chunk]
        for chunk in kv.chunks(rows, num_allowed, budget)
    ]


def test_chunks(kv: DraftKV) -> None:
    admit(kv, 0, [0, 1, 2])
    admit(kv, 1, [3, 4])
    rows = [row(0, 11), row(1, 3)]
    assert chunks(kv, rows, 3, 6) == [[(0, 0, 6)], [(0, 6, 10)]]
    assert [kv.start(row) for row in rows] == [10, 0]
    assert chunks(kv, rows, 1, 6) == [[(1, 0, 2)]]
    assert chunks(kv, rows, 1, 6) == []


def test_a_shared_block_is_in_one_chunk(kv: DraftKV) -> None:
    admit(kv, 0, [0, 1, 2])
    admit(kv, 1, [0, 1, 3], num_cached=2)
    assert chunks(kv, [row(0, 11), row(1, 12)], 1, 64) == [[(0, 0, 10)], [(1, 8, 11)]]


def test_blocks_of_other_tables_are_not_its_own(kv: DraftKV) -> None:
    """Window groups have theirs behind the first block table."""
    admit(kv, 0, [5, 6])
    kv.set_right(0, 8)
    step(kv, row(0, 9), NewBlocks(0, 2, [7]), NewBlocks(0, 4, [1, 2]), NewBlocks(0, 8, [3, 4]))
    assert kv.start(row(0, 9)) == 8
    assert kv.begun_blocks(row(0, 9), 12) == [7]


def admit_loading(kv: DraftKV, table_idx: int, blocks: list[int], loaded: list[int]) -> None:
    """Admit a sequence that waits for a load, so that it has no row."""
    admission = Admission(
        table_idx,
        table_idx,
        [1] * len(blocks) * SIZE,
        1,
        blocks,
        SamplingParams(),
        0,
        frozenset(),
        (),
    )
    loads = [Load(0, [TierEntry("host", b"", [page], [0]) for page in loaded])]
    kv.admit(Schedule(0, [admission], [], [], transfers=Transfers([], [], loads)))


def test_loaded_blocks_lack_the_draft_networks_kv(kv: DraftKV) -> None:
    """A hit in the pool keeps it; what is loaded, and what is new, does not have it."""
    admit(kv, 0, [5, 6, 7])
    kv.set_right(0, 12)
    admit(kv, 1, [8, 9])
    kv.set_right(1, 8)
    admit_loading(kv, 2, [5, 8, 9], loaded=[8])
    step(kv, Row(2, 2, 8, 4, True))
    assert kv.start(row(2, 12)) == 4
    kv.set_right(2, 11)
    admit_loading(kv, 1, [5, 8, 4], loaded=[3])  # a snapshot alone is loaded
    step(kv, Row(1, 1, 8, 4, True))
    assert kv.start(row(1, 12)) == 0
