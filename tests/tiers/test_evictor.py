"""A directory stays within its limit: those entries go that were not used for longest."""

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nanovllm.features.tiers.directory import DirectoryStore, file_bytes
from nanovllm.features.tiers.evictor import _Entry, bytes_on_disk, new_temporary
from tests.every_case import examples
from tests.tiers.helpers import NAMESPACE, OTHER_NAMESPACE, files, holds, key, place, write

LIMIT = 2**16
"""A sixteenth is one block of a disk: each write scans, so that the model below is exact."""


def num_bytes(root: Path) -> int:
    return sum(bytes_on_disk(file.stat().st_size) for file in files(root))


class StoresOfOneDirectory(RuleBasedStateMachine):
    """Two engines, and one with another model, against a dictionary in order of use."""

    SIZES = ((100,), (4000, 100), (9000,), (60_000,), (70_000,))

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        namespaces = (NAMESPACE, NAMESPACE, OTHER_NAMESPACE)
        self.stores = [DirectoryStore(self.root, LIMIT, namespace) for namespace in namespaces]
        self.known = [0] * 3
        """The total that each store knows: that of its last scan."""
        self.largest = [0] * 3
        self.model: dict[tuple[bool, int], int] = {}
        """Bytes of each entry, by (whether it is of the other model, number)."""

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def sizes(self, number: int) -> tuple[int, ...]:
        return self.SIZES[number % len(self.SIZES)]

    @rule(store=st.integers(0, 2), number=st.integers(0, 25))
    def write(self, store: int, number: int) -> None:
        write(self.stores[store], number, self.sizes(number))
        self.stores[store].settle()
        entry, size = (store == 2, number), bytes_on_disk(file_bytes(sum(self.sizes(number))))
        if entry in self.model or size > LIMIT:
            return
        self.largest[store] = max(self.largest[store], size)
        if self.known[store] + size <= LIMIT:
            self.model[entry] = size
        while sum(self.model.values()) > LIMIT - max(LIMIT // 8, self.largest[store]):
            self.model.pop(next(iter(self.model)))
        self.known[store] = sum(self.model.values())

    @rule(store=st.integers(0, 2), number=st.integers(0, 25))
    def read(self, store: int, number: int) -> None:
        entry = (store == 2, number)
        assert holds(self.stores[store], number, self.sizes(number)) == (entry in self.model)
        if entry in self.model:
            self.model[entry] = self.model.pop(entry)

    @rule(store=st.integers(0, 2), number=st.integers(0, 25))
    def has(self, store: int, number: int) -> None:
        assert self.stores[store].has(key(number)) == ((store == 2, number) in self.model)

    @rule(store=st.integers(0, 2))
    def reopen(self, store: int) -> None:
        self.stores[store].close()
        namespace = OTHER_NAMESPACE if store == 2 else NAMESPACE
        self.stores[store] = DirectoryStore(self.root, LIMIT, namespace)
        self.known[store] = self.largest[store] = 0

    @invariant()
    def the_files_are_those_of_the_model(self) -> None:
        assert num_bytes(self.root) == sum(self.model.values())
        assert len(files(self.root)) == len(self.model)


StoresOfOneDirectory.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=50, deadline=None
)
TestStoresOfOneDirectory = StoresOfOneDirectory.TestCase


def test_a_full_directory_is_scanned_seldom(tmp_path, monkeypatch):
    """A scan pays for a sixteenth of the limit, not for one entry."""
    store = DirectoryStore(tmp_path, 2**21, NAMESPACE)
    scans = 0
    scan = store._evictor._scan_and_remove

    def counted() -> int:
        nonlocal scans
        scans += 1
        return scan()

    monkeypatch.setattr(store._evictor, "_scan_and_remove", counted)
    for number in range(1000):
        write(store, number, (4000,))
        store.settle()
        if number % 100 == 0:
            assert num_bytes(tmp_path) <= 2**21
    assert scans <= 1 + 1000 // (2**21 // 16 // 8192)
    assert num_bytes(tmp_path) >= 2**21 * 13 // 16
    assert holds(store, 999, (4000,))
    assert not store.has(key(0))


def test_files_of_others_are_neither_counted_nor_removed(tmp_path):
    """A user may name a directory that has other things in it."""
    store = DirectoryStore(tmp_path, LIMIT, NAMESPACE)
    outside = tmp_path / "outside"
    outside.mkdir()
    theirs = [
        tmp_path / "notes.txt",
        tmp_path / NAMESPACE / "rank0" / "README",
        tmp_path / NAMESPACE / "rank0" / "aa" / "letter.txt",
        tmp_path / "photos" / "rank0" / "aa" / "aabb",
        outside / "aabb",
    ]
    for file in theirs:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_bytes(bytes(LIMIT))
        os.utime(file, (0, 0))
    (tmp_path / NAMESPACE / "rank0" / "ff").symlink_to(outside)
    for number in range(100):
        write(store, number, (4000,))
        store.settle()
    assert all(file.stat().st_size == LIMIT for file in theirs)
    assert sum(store.has(key(number)) for number in range(100)) >= 6


def test_an_entry_above_the_limit_is_not_kept(tmp_path):
    store = DirectoryStore(tmp_path, 1000, NAMESPACE)
    write(store, 0)
    store.settle()
    assert not files(tmp_path)


@pytest.mark.parametrize("size", [LIMIT // 8, LIMIT // 3, LIMIT // 2, LIMIT - 4096])
def test_large_entries_take_turns(tmp_path, size):
    """What is kept never leaves too little room for one more."""
    store = DirectoryStore(tmp_path, LIMIT, NAMESPACE)
    for number in range(20):
        write(store, number, (100,))
        store.settle()
    for number in range(20, 40):
        for _ in range(2):  # the first one may find no room, and makes some
            write(store, number, (size - 1000,))
            store.settle()
        assert holds(store, number, (size - 1000,)) or number == 39 or size > LIMIT // 2


def test_a_smaller_limit_removes_what_an_earlier_process_left(tmp_path):
    first = DirectoryStore(tmp_path, 2**20, NAMESPACE)
    for number in range(50):
        write(first, number, (8000,))
    first.close()
    second = DirectoryStore(tmp_path, LIMIT, OTHER_NAMESPACE)
    write(second, 0)
    second.settle()
    assert num_bytes(tmp_path) <= LIMIT
    assert holds(second, 0)


def test_temporary_files_of_the_dead_are_removed(tmp_path):
    store = DirectoryStore(tmp_path, LIMIT, NAMESPACE)
    write(store, 0)
    store.settle()
    base = str(tmp_path / NAMESPACE / "rank0")
    living, path = new_temporary(base)
    dead, dead_path = new_temporary(base)
    os.close(dead)  # as the system does when a process dies
    write(store, 1)
    store.settle()
    assert os.path.exists(path)
    assert not os.path.exists(dead_path)
    os.close(living)


def test_empty_directories_of_old_models_are_removed(tmp_path):
    write(DirectoryStore(tmp_path, LIMIT, OTHER_NAMESPACE), 0)
    place(tmp_path, 0, OTHER_NAMESPACE).unlink()
    group = place(tmp_path, 0, OTHER_NAMESPACE).parent
    hours_ago = time.time() - 10_000
    for directory in (group, group.parent, group.parent.parent):
        os.utime(directory, (hours_ago, hours_ago))
    store = DirectoryStore(tmp_path, LIMIT, NAMESPACE)
    write(store, 0)
    store.settle()
    assert not group.exists()
    assert holds(store, 0)


def test_a_directory_that_cannot_be_scanned(tmp_path, caplog):
    store = DirectoryStore(tmp_path / "kv", LIMIT, NAMESPACE)
    write(store, 0)
    store.settle()
    shutil.rmtree(tmp_path / "kv")
    store._evictor.added(LIMIT)
    store.settle()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("times", [1, 2])
def test_closing_ends_the_thread(tmp_path, times):
    store = DirectoryStore(tmp_path, LIMIT, NAMESPACE)
    write(store, 0)
    for _ in range(times):
        store.close()
    assert store._evictor._thread is None
    assert holds(store, 0)


def test_closing_ends_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: with very many entries the end of a process waits until all of them are found."""
    begun = threading.Event()

    def endless(root: Path) -> Iterator[_Entry]:
        begun.set()
        while time.monotonic() < deadline:
            time.sleep(0.001)
            yield _Entry(0, "", 0)

    deadline = time.monotonic() + 2
    monkeypatch.setattr("nanovllm.features.tiers.evictor._entries", endless)
    store = DirectoryStore(tmp_path, LIMIT, NAMESPACE)
    write(store, 0)
    assert begun.wait(5)
    store.close()
    assert time.monotonic() < deadline


def test_the_thread_that_scans_may_close_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may do so."""
    store, ended = DirectoryStore(tmp_path, LIMIT, NAMESPACE), threading.Event()

    def collects(root: Path) -> list[_Entry]:
        store.close()
        ended.set()
        return []

    monkeypatch.setattr("nanovllm.features.tiers.evictor._entries", collects)
    write(store, 0)
    assert ended.wait(5)
