"""How Python calls a C kernel: a call is bytes, which `nv_run` of csrc/run.c reads.

A kernel is a function of csrc whose name begins with nv_ and whose first argument is a team. The
types of its arguments are read where it is defined.
"""

import re
import struct
from collections.abc import Sequence
from pathlib import Path

CSRC = Path(__file__).with_name("csrc")
SOURCES = sorted(CSRC.glob("*.[ch]"))
FLAGS = ("-O3", "-ffp-contract=off", "-pthread", "-fPIC")
"""How they are compiled. No product and sum is rounded once but where the source says so, with
fma_(): each compiler then makes kernels with the same bits."""
CALL_BYTES = 8 * 26
"""A call has CALL_WORDS words of 64 bits: the kernel's number, its arguments, padding."""

_DEFINITION = re.compile(r"^void (nv_\w+)\(team \*\w+, ([^)]+)\) \{", re.MULTILINE)
_ARGUMENTS = {
    name: " ".join(arguments.split())
    for source in SOURCES
    if source.suffix == ".c"
    for name, arguments in _DEFINITION.findall(source.read_text(encoding="utf-8"))
}
_KINDS = {"ptrdiff_t": "N", "float": "F", "token_count": "T", "row_count": "R"}
_WORDS = {
    "P": "a[{}].p",
    "N": "a[{}].n",
    "F": "(float)a[{}].f",
    "T": "tokens < 0 ? a[{}].n : tokens",
    "R": "rows < 0 ? a[{}].n : rows",
}
"""How C reads an argument of each kind from the words of a call."""


KERNELS = {
    name: "".join("P" if "*" in each else _KINDS[each.split()[0]] for each in arguments.split(","))
    for name, arguments in _ARGUMENTS.items()
}
"""The arguments of each kernel, in the order of the kernels' numbers: a letter an argument.

P: a pointer; N: an integer; F: a float; T: the number of tokens; R: of rows.
"""


def _case(name: str, kinds: str) -> str:
    words = [_WORDS[kind].format(index) for index, kind in enumerate(kinds)]
    return f"case {_NUMBERS[name]}: {name}({', '.join(['t', *words])}); break;"


_NUMBERS = {name: number for number, name in enumerate(KERNELS)}
DISPATCH = "\n".join(
    [
        '#include "kernels.h"',
        *(f"void {name}(team *t, {arguments});" for name, arguments in _ARGUMENTS.items()),
        "void run_call(team *t, const word *call, ptrdiff_t tokens, ptrdiff_t rows) {",
        "const word *a = call + 1;",
        "switch (call->n) {",
        *(_case(name, kinds) for name, kinds in KERNELS.items()),
        "}",
        "}",
        "",
    ]
)
"""The C code that calls a kernel by its number."""


def c_files(directory: Path) -> list[Path]:
    """Return the files to compile, with CSRC as include path. Write DISPATCH to `directory`."""
    dispatch = directory / "run_call.c"
    dispatch.write_text(DISPATCH, encoding="utf-8")
    return [dispatch, *(source for source in SOURCES if source.suffix == ".c")]


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
