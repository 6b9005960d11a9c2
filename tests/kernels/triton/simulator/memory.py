"""Global and shared memory of simulated programs. An access outside of the arguments' memory or of
shared memory is an error.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.kernels.triton.simulator.arithmetic import Array

WARP = 32
SHARED_BASE = 1024
"""The address of shared memory. Swizzled layouts need a multiple of 1024."""


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


class SharedMemory:
    """The shared memory of programs.

    Args:
        count: programs.
        num_threads: of a program.
        num_bytes: of a program.
    """

    def __init__(self, count: int, num_threads: int, num_bytes: int) -> None:
        self._num_threads, self._num_bytes = num_threads, num_bytes
        size = -(-num_bytes // 128) * 128
        self._numbers = np.full((count, size), 255, np.uint8)

    def keep(self, live: Array) -> None:
        """Forget all programs but those of the mask `live`."""
        self._numbers = self._numbers[live]

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
