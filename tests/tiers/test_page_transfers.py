"""Loads and writes beside the steps: what ends, what is given up, and what waits for what."""

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nanovllm.core.messages import HOST, STORE, Load, TierEntry
from nanovllm.features.tiers.host_pages import Buffers, HostPages
from nanovllm.features.tiers.page_transfers import PageTransfers
from nanovllm.platform.cpu import CPU
from nanovllm.worker.kv_pool import KVPool, page_layout
from tests.helpers import wait_until

NUM_PAGES = 8
SECONDS = 10


class SlowStore:
    """Keeps entries in memory. `gate` holds up reads and writes while it is cleared."""

    def __init__(self) -> None:
        self.entries: dict[bytes, list[bytes]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[bytes] = []
        self.closed = False

    def read(self, key: bytes, buffers: Buffers) -> bool:
        self.begun.append(key)
        assert self.gate.wait(SECONDS)
        if key not in self.entries:
            return False
        for buffer, data in zip(buffers, self.entries[key], strict=True):
            buffer[:] = data
        return True

    def write(self, key: bytes, buffers: Buffers) -> None:
        self.begun.append(key)
        assert self.gate.wait(SECONDS)
        self.entries[key] = [bytes(buffer) for buffer in buffers]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pool() -> KVPool:
    layout = page_layout([2 * 4 * 8 * 4], [None])
    pool = KVPool(layout, [(2, NUM_PAGES, 4, 1, 8)], torch.float32, CPU(), by_page=True)
    pool.pages.copy_(torch.arange(NUM_PAGES, dtype=torch.uint8)[:, None].expand_as(pool.pages))
    return pool


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
def moves(pool: KVPool, store: SlowStore) -> Iterator[PageTransfers]:
    moves = PageTransfers(HostPages(pool, 4), store)
    yield moves
    store.gate.set()
    moves.close()


def stored(key: bytes, *pages: int) -> TierEntry:
    return TierEntry(STORE, key, list(pages), [])


def value(pool: KVPool, page: int) -> int:
    """Return what all bytes of a page are."""
    (found,) = pool.pages[page].unique().tolist()
    return int(found)


def ended(moves: PageTransfers) -> list[tuple[int, int] | None]:
    """Return (id, right parts) of each load; None for one that goes on."""
    return [
        (load_id, load.num_right) if load.has_ended else None
        for load_id, load in moves._loads.items()
    ]


def test_host_memory_and_back(pool: KVPool, moves: PageTransfers) -> None:
    moves.save([TierEntry(HOST, b"a", [5], [0]), TierEntry(HOST, b"s", [6, 7], [2, 3])])
    pool.pages[5:].zero_()
    moves.load([Load(7, [TierEntry(HOST, b"s", [1, 2], [2, 3]), TierEntry(HOST, b"a", [3], [0])])])
    moves.wait()
    assert ended(moves) == [(7, 2)]
    assert [value(pool, page) for page in (1, 2, 3)] == [6, 7, 5]
    assert [load[:2] for load in moves.take_ended(list)] == [(7, 2)]
    assert moves.take_ended(list) == []


def test_the_last_entry_of_a_slot_stays(pool: KVPool, moves: PageTransfers) -> None:
    """An entry may go to host memory, be evicted there, and give its slot away: all in one step."""
    moves.save([TierEntry(HOST, bytes([page]), [page], [page % 3]) for page in range(2, NUM_PAGES)])
    moves.load([Load(0, [TierEntry(HOST, b"", [0], [1])])])
    moves.wait()
    assert value(pool, 0) == 7


def test_a_read_that_raises_fails(
    store: SlowStore, moves: PageTransfers, caplog: pytest.LogCaptureFixture
) -> None:
    store.entries = {b"a": [b"of another size"]}
    moves.load([Load(0, [stored(b"a", 0)])])
    moves.wait()
    assert ended(moves) == [(0, 0)]
    assert "cannot be loaded" in caplog.text


def test_released_pages_are_not_written(store: SlowStore, moves: PageTransfers) -> None:
    """A write that waits is given up; one that has begun ends first."""
    store.gate.clear()
    moves.write([stored(b"a", 5), stored(b"b", 6)])
    wait_until(lambda: store.begun == [b"a"], SECONDS)
    moves.release([6, 1])
    released = in_thread(lambda: moves.release([5]))
    assert not released.wait(0.05)
    store.gate.set()
    assert released.wait(SECONDS)
    assert store.entries.keys() == {b"a"}
    assert store.begun == [b"a"]


def test_a_slot_that_a_load_reads_is_not_overwritten(pool: KVPool, moves: PageTransfers) -> None:
    """Nobody waits for such a load: its sequence is gone, and its slots are another's."""
    moves.save([TierEntry(HOST, b"a", [5], [0])])
    for index in range(50):
        moves.load([Load(index, [TierEntry(HOST, b"a", [1], [0])])])
        moves.save([TierEntry(HOST, b"b", [index % 3 + 5], [0])])
        assert None not in ended(moves)


def test_closing_writes_what_is_queued(store: SlowStore, moves: PageTransfers) -> None:
    moves.write([stored(bytes([page]), page) for page in range(NUM_PAGES)])
    moves.load([Load(0, [stored(b"none", 0)])])
    moves.close()
    assert len(store.entries) == NUM_PAGES
    assert store.closed
    assert not any(thread.is_alive() for thread in moves._threads)


def test_closing_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,  # first: the fixture closes the transfers again
    store: SlowStore,
    moves: PageTransfers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("nanovllm.features.tiers.page_transfers._CLOSE_SECONDS", 0.05)
    store.gate.clear()
    moves.write([stored(b"a", 5), stored(b"b", 6), stored(b"c", 7)])
    wait_until(lambda: store.begun == [b"a"], SECONDS)
    with caplog.at_level(logging.WARNING):
        moves.close()
    assert "2 entries of the prefix cache are not written" in caplog.text


def test_random_transfers_never_mix_pages(pool: KVPool, store: SlowStore) -> None:
    """Each page is reused at random; what a load says is right has the bytes of its key."""
    rng = random.Random(0)
    for byte in range(0, 50, 2):  # a busy machine may write none of those below
        store.entries[bytes([byte])] = [bytes([byte]) * pool.pages.shape[1]]
    moves = PageTransfers(HostPages(pool, 4), store)
    loads: dict[int, tuple[int, int]] = {}  # by id: the page, and the byte that it is filled with
    num_right = 0
    for load_id in range(400):
        page, byte = rng.randrange(NUM_PAGES), rng.randrange(50)
        moves.release([page])
        loads = {key: found for key, found in loads.items() if found[0] != page}
        match rng.randrange(3):
            case 0:
                pool.pages[page].fill_(byte)
                moves.write([stored(bytes([byte]), page)])
            case 1:
                loads[load_id] = page, byte
                moves.load([Load(load_id, [stored(bytes([byte]), page)])])
            case 2:
                moves.wait()
        for load in moves.take_ended(list):
            expected = loads.pop(load.load_id, None)
            if load.num_parts and expected is not None:
                num_right += 1
                assert value(pool, expected[0]) == expected[1]
    moves.close()
    assert num_right
    for key, (data,) in store.entries.items():
        assert set(data) == set(key)


def test_ranks_agree(store: SlowStore, moves: PageTransfers) -> None:
    """A load has ended when it has on each rank, and what is right is right on each."""
    store.entries = {b"a": [bytes(256)]}
    moves.load([Load(index, [stored(b"a", index)] * 2) for index in range(3)])
    wait_until(lambda: ended(moves) == [(0, 2), (1, 2), (2, 2)], SECONDS)
    taken = moves.take_ended(lambda mine: [1, -1, mine[2]])
    assert [load[:2] for load in taken] == [(0, 1), (2, 2)]
    assert ended(moves) == [(1, 2)]


def in_thread(work: Callable[[], object]) -> threading.Event:
    """Run `work` in a thread; return what is set when it is done."""
    done = threading.Event()

    def run() -> None:
        work()
        done.set()

    threading.Thread(target=run, daemon=True).start()
    return done


def test_an_interrupt_leaves_no_write_that_nobody_knows(
    pool: KVPool, store: SlowStore, moves: PageTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: after Ctrl-C a page that has been reused is written under the key of before."""

    class Interrupted(deque[Any]):
        def append(self, write: Any) -> None:
            raise KeyboardInterrupt

    class Late(dict[int, Any]):
        def update(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    for name, value in (("_queue", Interrupted()), ("_writes", Late())):
        with monkeypatch.context() as patch:
            patch.setattr(moves, name, value)
            with pytest.raises(KeyboardInterrupt):
                moves.write([stored(b"key", 2)])
            moves.release([2])
            assert not moves._queue
            assert not moves._writes
