"""How Python writes a call of a C kernel, for `nv_run` to read: see csrc/run.c."""

import struct
from collections.abc import Sequence
from pathlib import Path

from nanovllm.kernels.cpu.signatures import KERNELS

SOURCES = sorted(Path(__file__).with_name("csrc").glob("*.[ch]"))
CALL_BYTES = 8 * 26
"""A call has CALL_WORDS words of 64 bits: the kernel's number, its arguments, padding."""

_NUMBERS = {name: number for number, name in enumerate(KERNELS)}


def _format(kinds: str) -> struct.Struct:
    types = "".join("d" if kind == "F" else "q" for kind in kinds)
    return struct.Struct(f"@q{types}{CALL_BYTES - 8 - 8 * len(kinds)}x")


_FORMATS = {name: _format(kinds) for name, kinds in KERNELS.items()}


def pack_call(name: str, args: Sequence[int | float]) -> bytes:
    """Return a call of kernel `name` as `nv_run` reads it; pointers in `args` are addresses."""
    return _FORMATS[name].pack(_NUMBERS[name], *args)


def size_of(name: str, args: Sequence[int | float]) -> int | float | None:
    """Return the size in `args` that `nv_run` can replace, None if kernel `name` has none."""
    sizes = [arg for arg, kind in zip(args, KERNELS[name], strict=True) if kind in "TR"]
    return sizes[0] if sizes else None
