"""What this machine can do at most: how fast all threads read memory, and multiply numbers.

rates.c is compiled with the compiler of the kernels, for this processor.
"""

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from nanovllm.kernels.cpu.build import find_compiler
from nanovllm.utils.system import anonymous_memory

INSTRUCTIONS = ("float32", "bfloat16", "bfloat16_tiles", "int16", "int8", "int8_tiles")
"""Loops of rates.c: those of instructions that this processor lacks are missing."""
_WIDE = ("float32", "bfloat16", "bfloat16_tiles")
FASTEST = {
    32: ("float32",),
    16: _WIDE,
    8: ("int16", *_WIDE),
    4: ("int8", "int8_tiles", "int16", *_WIDE),
}
"""What multiplies weights of so many bits exactly: inputs have 16 bits beside weights of 8, and 8
beside weights of 4."""
_SECONDS = 0.01
_TRIES = 4
BUFFER_BYTES = 2**29
"""Above the last-level caches, and in huge pages."""

_Part = tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_size_t]]
"""Addresses and sizes."""


class Rates(NamedTuple):
    """Of all threads together."""

    bytes_per_second: float
    operations_per_second: dict[str, float]
    """By instruction; a multiplication and an addition are two operations."""

    def multiplying(self, bits: int) -> float:
        """Return the operations a second with weights of so many bits."""
        return max(self.operations_per_second.get(name, 0) for name in FASTEST[bits])

    def best(self, other: "Rates") -> "Rates":
        """Return the higher of each rate: a machine's speed changes within seconds."""
        operations = {
            name: max(rate, other.operations_per_second[name])
            for name, rate in self.operations_per_second.items()
        }
        return Rates(max(self.bytes_per_second, other.bytes_per_second), operations)

    def summary(self) -> str:
        """Return the rates in words."""
        rates = (f"{name} {rate / 1e9:.0f}" for name, rate in self.operations_per_second.items())
        return f"reads {self.bytes_per_second / 1e9:.1f} GB/s; Gop/s: {', '.join(rates)}"


class RateMeter:
    """Measures the rates of as many threads as torch has.

    It reads a large buffer of its own, which the process then holds, and `memory`: a part of that
    may be in a cache, or in small pages, which are slower. The faster of both counts.

    Args:
        memory: contiguous tensors, all of whose pages are in use.
    """

    def __init__(self, memory: Sequence[torch.Tensor] = ()) -> None:
        self._library = _compiled()
        self._num_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._num_threads)
        buffer = torch.frombuffer(anonymous_memory(BUFFER_BYTES), dtype=torch.uint8).fill_(1)
        self._read_in_turn = [each for each in ([buffer], list(memory)) if each]

    def measure(self) -> Rates:
        """Return the best of a few tries."""
        reading = [self._read(memory) for memory in self._read_in_turn for _ in range(_TRIES)]
        operations = {
            name: max(self._multiply(name) for _ in range(_TRIES))
            for name in INSTRUCTIONS
            if hasattr(self._library, name)
        }
        return Rates(max(reading), {name: rate for name, rate in operations.items() if rate})

    def _read(self, memory: list[torch.Tensor]) -> float:
        parts = [self._part(memory, index) for index in range(self._num_threads)]

        def read(part: _Part) -> None:
            self._library.read_arrays(*part, ctypes.c_ssize_t(len(part[0])))

        start = time.perf_counter()
        list(self._pool.map(read, parts))
        return sum(tensor.nbytes for tensor in memory) / (time.perf_counter() - start)

    def _part(self, memory: list[torch.Tensor], index: int) -> _Part:
        """Return a thread's part of each tensor."""
        sizes = [tensor.nbytes // self._num_threads // 64 * 64 for tensor in memory]
        starts = [
            tensor.data_ptr() + index * size for tensor, size in zip(memory, sizes, strict=True)
        ]
        count = len(sizes)
        return (ctypes.c_void_p * count)(*starts), (ctypes.c_size_t * count)(*sizes)

    def _multiply(self, name: str) -> float:
        loop = getattr(self._library, name)
        loop.restype = ctypes.c_double
        seconds = [ctypes.c_double(_SECONDS)] * self._num_threads
        return sum(map(float, self._pool.map(loop, seconds)))


def _compiled() -> ctypes.CDLL:
    source = Path(__file__).with_suffix(".c")
    flags = ("-O3", "-march=native", "-shared", "-fPIC")
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, "rates.so")
        subprocess.run([*find_compiler(), *flags, source, "-o", library], check=True)
        return ctypes.CDLL(str(library))
