"""Global and shared memory of simulated programs. An access outside of the arguments' memory, an
unaligned one, and a missing barrier between accesses of shared memory are errors.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.kernels.triton.simulator.arithmetic import Array

WARP = 32
SHARED_BASE = 1024
"""The address of shared memory. Swizzled layouts need a multiple of 1024."""
_MANY = 63
"""In place of a warp's number: several warps."""


class KernelError(AssertionError):
    """A kernel did what a GPU does not allow, or does not define."""


class GlobalMemory:
    """The memory of this process, as far as it belongs to the arguments of a kernel.

    Args:
        areas: address and bytes of each.
    """

    def __init__(self, areas: Sequence[tuple[int, int]]) -> None:
        areas = sorted({area for area in areas if area[0]})  # without tensors on the meta device
        self._starts = np.array([0, *(start for start, _ in areas)], np.uint64)
        self._stops = np.array([0, *(start + size for start, size in areas)], np.uint64)

    def cells(self, address: Array, dtype: np.dtype[Any], count: int) -> tuple[Array, Array]:
        """Return memory as numbers of a type, and the places [T, count] of an access.

        Raises:
            KernelError: it lies outside of the arguments.
        """
        self._check(address, dtype.itemsize * count)
        first = address // np.uint64(dtype.itemsize) - np.uint64(1)
        return self._view(dtype), first[:, None] + np.arange(count, dtype=np.uint64)

    def _view(self, dtype: np.dtype[Any]) -> Array:
        """Return memory as numbers of a type, from the second on: numpy takes no address 0."""
        interface = {"data": (dtype.itemsize, False), "shape": (2**47 // dtype.itemsize,)}
        whole = type("Whole", (), {})()
        whole.__array_interface__ = interface | {"typestr": dtype.str, "version": 3}
        return np.asarray(whole)

    def _check(self, address: Array, size: int) -> None:
        area = np.searchsorted(self._starts, address, "right") - 1
        stop = self._stops[area]
        outside = (address >= stop) | (stop - address < size)
        if outside.any():
            raise KernelError(f"{outside.sum()} accesses lie outside of the arguments' memory")


class _Copies(NamedTuple):
    """Asynchronous copies to shared memory that one instruction has begun."""

    size: int
    """Bytes of each."""
    group: Array
    """The group of each thread's copy; -1: it has none, or has waited for it."""
    target: Array
    """Their addresses in shared memory."""


class SharedMemory:
    """The shared memory of programs, and who has used it since the last barrier.

    An access leaves a stamp on each byte: the program's epoch, which is the number of barriers that
    it has passed, and the warp.

    Args:
        count: programs.
        num_threads: of a program.
        num_bytes: of a program.
    """

    def __init__(self, count: int, num_threads: int, num_bytes: int) -> None:
        self._num_threads, self._num_bytes = num_threads, num_bytes
        size = -(-num_bytes // 128) * 128
        self._numbers = np.full((count, size), 255, np.uint8)
        self._epoch = np.zeros(count, np.int32)
        self._written = np.full((count, size), -1, np.int32)  # stamps
        self._read = np.full((count, size), -1, np.int32)
        self._in_flight = np.zeros((count, size), bool)  # bytes that asynchronous copies write
        self._copies: list[_Copies] = []
        self._copy_group = np.zeros(count * num_threads, np.int32)  # to which a new copy belongs

    def keep(self, live: Array, threads: Array) -> None:
        """Forget all programs but those of the mask `live`; `threads` is that of their threads."""
        for name in ("_numbers", "_epoch", "_written", "_read", "_in_flight"):
            setattr(self, name, getattr(self, name)[live])
        self._copy_group = self._copy_group[threads]
        self._copies = [
            _Copies(copies.size, copies.group[threads], copies.target[threads])
            for copies in self._copies
        ]

    def pass_barrier(self, programs: Array) -> None:
        """Begin a new epoch of the programs of a mask."""
        self._epoch += programs

    def cells(
        self, address: Array, threads: Array, dtype: np.dtype[Any], count: int
    ) -> tuple[Array, Array]:
        """Return memory as numbers of a type, and the places [T, count] of an access.

        Raises:
            KernelError: it lies outside of the program's memory.
        """
        place = self._places(address, threads, dtype.itemsize * count)[:, None] // dtype.itemsize
        return self._numbers.reshape(-1).view(dtype), place + np.arange(count)

    def _places(self, address: Array, threads: Array, size: int) -> Array:
        """Return the places in shared memory of accesses of `size` bytes."""
        place = address.astype(np.int64) - SHARED_BASE
        if ((place < 0) | (place + size > self._num_bytes)).any():
            raise KernelError("an access lies outside of shared memory")
        return place + threads // self._num_threads * self._numbers.shape[1]

    def _stamps(self, threads: Array) -> Array:
        """Return epoch and warp of each thread as one number [T, 1]."""
        program = threads // self._num_threads
        stamps = self._epoch[program] * 64 + threads % self._num_threads // WARP
        return stamps[:, None]

    def note_reads(self, index: Array, itemsize: int, threads: Array) -> None:
        """Raise an error for numbers [T, n] that another warp has written since the last barrier,
        that a copy may still write, or that nothing has written.
        """
        place, stamps = _bytes(index, itemsize), self._stamps(threads)
        written = self._written.reshape(-1)[place]
        if (written == -1).any():
            raise KernelError("shared memory is read that nothing has written")
        if (self._in_flight.reshape(-1)[place]).any():
            raise KernelError("a copy is read that its thread has not waited for")
        if _by_another(written, stamps).any():
            raise KernelError("a warp reads what another one wrote, with no barrier between them")
        _note(self._read, place, stamps)

    def note_writes(self, index: Array, itemsize: int, threads: Array) -> None:
        """Raise an error for numbers [T, n] that another warp has used since the last barrier."""
        place, stamps = _bytes(index, itemsize), self._stamps(threads)
        for verb, earlier in (("read", self._read), ("wrote", self._written)):
            if _by_another(earlier.reshape(-1)[place], stamps).any():
                raise KernelError(f"a warp overwrites what another one {verb}, with no barrier")
        _note(self._written, place, stamps)

    def commit_copies(self, mask: Array) -> None:
        """Let later copies of the threads of `mask` belong to a new group."""
        self._copy_group = self._copy_group + mask

    def begin_copies(self, target: Array, size: int, mask: Array) -> None:
        """Note copies of `size` bytes of the threads of `mask`, which are in flight now."""
        threads = np.flatnonzero(mask)
        self._in_flight.reshape(-1)[self._target_bytes(target, size, threads)] = True
        self._copies.append(_Copies(size, np.where(mask, self._copy_group, -1), target))

    def finish_copies(self, mask: Array, open_groups: int) -> None:
        """Let the threads of `mask` wait until only their last `open_groups` groups are in flight.

        What the copies wrote counts as written now.
        """
        for copies in self._copies:
            done = mask & (copies.group >= 0) & (copies.group < self._copy_group - open_groups)
            threads = np.flatnonzero(done)
            copies.group[done] = -1
            place = self._target_bytes(copies.target, copies.size, threads)
            self._in_flight.reshape(-1)[place] = False
            _note(self._written, place, self._stamps(threads))
        self._copies = [copies for copies in self._copies if (copies.group >= 0).any()]

    def _target_bytes(self, target: Array, size: int, threads: Array) -> Array:
        return self._places(target[threads], threads, size)[:, None] + np.arange(size)


def _by_another(earlier: Array, stamps: Array) -> Array:
    """Return where an access of another warp in the same epoch left the stamp `earlier`."""
    return (earlier // 64 == stamps // 64) & (earlier != stamps)


def _note(cells: Array, place: Array, stamps: Array) -> None:
    """Leave stamps [T, 1] at `place` [T, n], or that several warps have been there."""
    cells = cells.reshape(-1)
    many = np.broadcast_to(stamps // 64 * 64 + _MANY, place.shape)
    new = np.where(_by_another(cells[place], stamps), many, stamps)
    cells[place] = new
    lost = cells[place] != new  # to another warp with the same place
    cells[place[lost]] = many[lost]


def _bytes(index: Array, itemsize: int) -> Array:
    """Return the places of the bytes of numbers [T, count]."""
    if itemsize == 1:
        return index
    place = index[:, :, None] * itemsize + np.arange(itemsize)
    return place.reshape(len(index), index.shape[1] * itemsize)
