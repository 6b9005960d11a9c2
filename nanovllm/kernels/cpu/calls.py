"""How Python writes a call of a C kernel, for `nv_run` to read: see csrc/run.c. Knows no tensor.

A kernel is a function of csrc whose name begins with nv_ and whose first argument is a team.
"""

import re
import struct
from collections.abc import Sequence
from pathlib import Path

SOURCES = sorted(Path(__file__).with_name("csrc").glob("*.[ch]"))
CALL_BYTES = 8 * 26
"""A call has 26 words of 64 bits: the kernel's number, its arguments, padding."""

_KERNEL = re.compile(r"^void (nv_\w+)\((team \*\w+), ([^)]+)\) \{", re.MULTILINE)
_DEFINITIONS = [found for path in SOURCES for found in _KERNEL.findall(path.read_text())]
_KINDS = {"ptrdiff_t": "N", "float": "F", "token_count": "T", "row_count": "R"}
"""Of arguments, by their C type; P is a pointer. In csrc/run.c they are macros."""
_KERNELS = {
    name: "".join("P" if "*" in each else _KINDS[each.split()[0]] for each in arguments.split(","))
    for name, _, arguments in _DEFINITIONS
}
_NUMBERS = {name: number for number, name in enumerate(_KERNELS)}


def _format(kinds: str) -> struct.Struct:
    types = "".join("d" if kind == "F" else "q" for kind in kinds)
    return struct.Struct(f"@q{types}{CALL_BYTES - 8 - 8 * len(kinds)}x")


_FORMATS = {name: _format(kinds) for name, kinds in _KERNELS.items()}


def macros() -> tuple[str, str]:
    """Return the compiler's flags that define what csrc/run.c has of the kernels."""
    declarations = cases = ""
    for name, team, arguments in _DEFINITIONS:
        declarations += f"void {name}({team}, {' '.join(arguments.split())}); "
        words = ", ".join(f"{kind}({index})" for index, kind in enumerate(_KERNELS[name]))
        cases += f"case {_NUMBERS[name]}: {name}(t, {words}); break; "
    return f"-DDECLARATIONS={declarations}", f"-DCASES={cases}"


def pack_call(name: str, args: Sequence[int | float]) -> bytes:
    """Return a call of kernel `name` as `nv_run` reads it; pointers in `args` are addresses."""
    return _FORMATS[name].pack(_NUMBERS[name], *args)


def size_of(name: str, args: Sequence[int | float]) -> int | float | None:
    """Return the size in `args` that `nv_run` can replace, None if kernel `name` has none."""
    sizes = [arg for arg, kind in zip(args, _KERNELS[name], strict=True) if kind in "TR"]
    return sizes[0] if sizes else None
