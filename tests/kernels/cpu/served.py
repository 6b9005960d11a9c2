"""The C kernels compiled for another processor, run by an emulator on this process's memory."""

import ctypes
import hashlib
import struct
import subprocess
from pathlib import Path
from typing import Self

import numpy as np

from nanovllm.kernels.cpu import build
from nanovllm.kernels.cpu.calls import CALL_BYTES, CSRC, DISPATCH, KERNELS, SOURCES, c_files
from nanovllm.utils import disk_cache

_SERVER = Path(__file__).with_name("served_kernels.c")

_PAGE = 4096
_RETURN, _END = 1, 2
_ELSEWHERE = 1 << 45
"""Flipped in the addresses that the kernels get, so that none is one of the emulator's own."""


def compiled(compiler: list[str]) -> Path:
    """Return the program that runs the kernels, compiled once for all runs of the tests."""
    cache = disk_cache.cache_directory()
    assert cache is not None
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True).stdout
    code = [path.read_bytes() for path in (_SERVER, *SOURCES)]
    key = hashlib.sha256(repr((code, DISPATCH, compiler, version)).encode()).hexdigest()[:24]
    if not (cache / f"served-{key}").exists():
        with disk_cache.new_directory(cache) as directory:
            program = Path(directory, f"served-{key}")
            sources = [_SERVER, *c_files(Path(directory))]
            objects = {path: f"{directory}/{path.stem}.o" for path in sources}
            command = [*compiler, f"-I{CSRC}", "-c"]
            build._run(*([*command, f"{s}", "-o", o] for s, o in objects.items()))
            build._run([*compiler, "-static", *objects.values(), "-o", f"{program}", "-lm"])
            disk_cache.store(program, cache)
    return cache / f"served-{key}"


class ServedKernels:
    """Takes the place of the library of kernels: `nv_run` has another process run the calls.

    Pointers are found in the arguments of the calls, not in the memory to which these point.
    """

    def __init__(self, program: Path, emulator: list[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([*emulator, program], stdin=pipe, stdout=pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def nv_run(self, calls: bytes, count: int, tokens: int, rows: int, threads: int) -> int:
        assert self._process.stdin is not None
        moved = b"".join(map(_move, struct.iter_unpack(f"@{CALL_BYTES // 8}q", calls)))
        self._process.stdin.write(struct.pack("@5q", len(moved), count, tokens, rows, threads))
        self._process.stdin.write(moved)
        self._process.stdin.flush()
        while (address := self._read_word()) != _END:
            if address == _RETURN:
                page = self._read_word() ^ _ELSEWHERE
                before, after = np.frombuffer(self._read(2 * _PAGE), np.uint8).reshape(2, -1)
                # No other bytes: threads of this process may have changed these meanwhile.
                changed = before != after
                _bytes_at(page)[changed] = after[changed]
            else:
                self._process.stdin.write(_bytes_at(address ^ _ELSEWHERE).tobytes())
                self._process.stdin.flush()
        return self._read_word()

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        received = self._process.stdout.read(count)
        assert len(received) == count, "the emulated kernels have ended"
        return received

    def _read_word(self) -> int:
        return int.from_bytes(self._read(8), "little")


def _move(call: tuple[int, ...]) -> bytes:
    """Return a call with other addresses."""
    kinds = [*KERNELS.values()][call[0]].ljust(len(call) - 1)
    moved = [
        word ^ _ELSEWHERE if kind == "P" and word else word
        for kind, word in zip(kinds, call[1:], strict=True)
    ]
    return struct.pack(f"@{len(call)}q", call[0], *moved)


def _bytes_at(page: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * _PAGE).from_address(page))
