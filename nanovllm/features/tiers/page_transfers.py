"""Moves entries of the prefix cache between the pool and its tiers, in threads parallel to steps.

core/messages.py has the messages.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence as Seq
from typing import Any

import torch

from nanovllm.core.messages import HOST, Load, Loaded, TierEntry
from nanovllm.features.tiers.host_pages import PageCopies
from nanovllm.features.tiers.tier import ByteStore
from nanovllm.utils.system import lower_thread_priority

logger = logging.getLogger(__name__)

_NUM_LOADERS = 2
_CLOSE_SECONDS = 4.0  # how long `close` waits for what is still to be written


@dataclasses.dataclass(eq=False)
class _Load:
    """A load in flight. Threads read its parts in order, several at once."""

    load: Load
    mark: Any  # see `PageCopies.mark`
    num_right: int  # parts before the first that failed; 0 when it is given up
    num_begun: int = 0
    reading: set[int] = dataclasses.field(default_factory=set)  # parts that threads read now
    start: float = 0.0
    end: float = 0.0

    @property
    def is_begun(self) -> bool:
        """Whether no thread needs to begin another part."""
        return self.num_begun >= self.num_right

    @property
    def has_ended(self) -> bool:
        return self.is_begun and not self.reading


@dataclasses.dataclass(eq=False)
class _Write:
    part: TierEntry
    mark: Any


class PageTransfers:
    """The loads and writes in flight of one rank.

    Invariants:
    - A page of a load in flight, or of a write that is queued or being written, is not changed by
      others: `release` is called first.
    - Loads end in any order. Each is in `_loads` until `take_ended` returns it.

    One thread writes, `_NUM_LOADERS` others load: a step waits for none of them, except in
    `release` and `wait`. One condition guards everything.
    """

    def __init__(self, copies: PageCopies, store: ByteStore | None) -> None:
        self._copies = copies
        self._store = store
        self._changed = threading.Condition()
        self._loads: dict[int, _Load] = {}  # by id, oldest first
        self._queue: deque[_Write] = deque()
        self._writes: dict[int, _Write] = {}  # by page: those in the queue, and `_writing`
        self._writing: _Write | None = None
        self._is_closed = False
        self._pid = os.getpid()
        jobs = [self._load_next] * _NUM_LOADERS + [self._write_next] * (store is not None)
        self._threads = [
            threading.Thread(target=self._run, args=(job,), name="kv-transfer", daemon=True)
            for job in jobs
        ]
        for thread in self._threads:
            thread.start()

    def release(self, pages: Iterable[int]) -> None:
        """Give up the loads and the writes of `pages`; wait for those that have begun."""
        if not self._loads and not self._writes:
            return
        given = set(pages)
        with self._changed:
            for page in given & self._writes.keys():
                write = self._writes.get(page)
                if write is not None and write is not self._writing:
                    with contextlib.suppress(ValueError):  # Ctrl-C kept it out of the queue
                        self._queue.remove(write)
                    self._forget(write)
            loads = self._give_up(lambda part: not given.isdisjoint(part.pages))
            self._changed.wait_for(
                lambda: given.isdisjoint(self._writes) and all(load.has_ended for load in loads)
            )

    def save(self, parts: Seq[TierEntry]) -> None:
        """Copy entries to host memory, before the steps that are launched next. Of two in one slot
        the later one stays. A load that still reads a slot is given up: nothing waits for it.
        """
        pairs = (zip(part.slots, part.pages, strict=True) for part in parts)
        page_of = dict(itertools.chain.from_iterable(pairs))
        pages = list(page_of.values())
        slots = list(page_of)
        if not slots:
            return
        if self._loads:
            given = set(slots)
            with self._changed:
                loads = self._give_up(lambda part: not given.isdisjoint(part.slots))
                self._changed.wait_for(lambda: all(load.has_ended for load in loads))
        self._copies.save(pages, slots)

    def load(self, loads: Seq[Load]) -> None:
        """Begin loads."""
        if not loads:
            return
        mark = self._copies.mark()
        with self._changed:
            for load in loads:
                self._loads[load.load_id] = _Load(load, mark, len(load.parts))
            self._changed.notify_all()

    def write(self, parts: Seq[TierEntry]) -> None:
        """Queue entries for the store."""
        if not parts or self._store is None:
            return
        mark = self._copies.mark()
        with self._changed:
            for part in parts:
                if self._writes.keys().isdisjoint(part.pages):  # otherwise it is already queued
                    write = _Write(part, mark)
                    # In this order: even after Ctrl-C, `release` knows what is in the queue.
                    self._writes.update(dict.fromkeys(part.pages, write))
                    self._queue.append(write)
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until the oldest load has ended."""
        with self._changed:
            oldest = next(iter(self._loads.values()), None)
            if oldest is not None:
                self._changed.wait_for(lambda: oldest.has_ended)

    def take_ended(self, smallest: Callable[[list[int]], list[int]]) -> list[Loaded]:
        """Return the loads that have ended on all ranks, with the parts that are right on all, and
        forget them. `smallest` returns the smallest of the ranks' numbers, each.
        """
        if not self._loads:
            return []
        with self._changed:
            loads = list(self._loads.values())
            num_right = [load.num_right if load.has_ended else -1 for load in loads]
        taken = []
        for load, count in zip(loads, smallest(num_right), strict=True):
            if count >= 0:
                load_id = load.load.load_id
                seconds = max(load.end - load.start, 0.0)
                taken.append(Loaded(load_id, count, seconds))
        with self._changed:
            for load_id, _, _ in taken:
                del self._loads[load_id]
        return taken

    def close(self) -> None:
        """Give up the loads, write what is queued, and end the threads; in a forked process these
        are its parent's.
        """
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + _CLOSE_SECONDS
        with self._changed:
            self._give_up(lambda part: True)
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._writes, timeout=_CLOSE_SECONDS)
            if self._queue:
                logger.warning("%d entries of the prefix cache are not written", len(self._queue))
                self._queue.clear()
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector runs in any
                thread.join(max(deadline - time.monotonic(), 0.1))
        if self._store is not None:
            self._store.close()

    def _give_up(self, concerns: Callable[[TierEntry], bool]) -> list[_Load]:
        """Begin no more parts of the loads with such a part; return these loads."""
        found = [
            load
            for load in self._loads.values()
            if not load.has_ended and any(map(concerns, load.load.parts))
        ]
        for load in found:
            load.num_right = 0
        return found

    def _forget(self, write: _Write) -> None:
        for page in write.part.pages:
            if self._writes.get(page) is write:
                del self._writes[page]

    def _run(self, job: Callable[[], bool]) -> None:
        if job == self._write_next:  # it gives way to the steps
            lower_thread_priority()
        with torch.inference_mode():
            while job():
                pass

    def _load_next(self) -> bool:
        """Load a part as soon as there is one. Return False when this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._next_load() is not None)
            load = self._next_load()
            if load is None:
                return False
            index = load.num_begun
            load.num_begun += 1
            load.reading.add(index)
            load.start = load.start or time.monotonic()
        is_right = False
        try:
            is_right = self._read(load.load.parts[index], load.mark)
        except Exception:  # then its tokens are computed
            logger.exception("an entry of the prefix cache cannot be loaded")
        with self._changed:
            load.reading.remove(index)
            load.end = time.monotonic()
            if not is_right:
                load.num_right = min(load.num_right, index)
            self._changed.notify_all()
        return True

    def _next_load(self) -> _Load | None:
        return next((load for load in self._loads.values() if not load.is_begun), None)

    def _read(self, part: TierEntry, mark: Any) -> bool:
        """Copy an entry to the pool; return False if its tier has none, or a damaged one."""
        if part.tier == HOST:
            self._copies.restore(part.slots, part.pages, mark)
            return True
        store = self._store
        return store is not None and self._copies.fill(
            part.pages, mark, lambda buffers: store.read(part.key, buffers)
        )

    def _write_next(self) -> bool:
        """Write an entry as soon as there is one. Return False when this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._queue))
            if not self._queue:
                return False
            write = self._writing = self._queue.popleft()
        store = self._store
        assert store is not None
        try:
            key = write.part.key
            self._copies.drain(write.part.pages, write.mark, lambda pages: store.write(key, pages))
        except Exception:  # then the next process computes it
            logger.exception("an entry of the prefix cache cannot be written")
        with self._changed:
            self._writing = None
            self._forget(write)
            self._changed.notify_all()
        return True
