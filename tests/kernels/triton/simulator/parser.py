"""Reads the PTX of one kernel: its instructions, labels and registers. Knows no meanings."""

import re
from typing import Any, NamedTuple

Operand = Any
"""A register or another name is a string, a number is an int (of a float, its bits), a list in
braces is a tuple, and the rest is an `Address`."""


class Address(NamedTuple):
    """A place in memory: [base + offset]."""

    base: Operand
    """A register, or the name of a parameter."""
    offset: int


class Instruction(NamedTuple):
    """One instruction."""

    text: str
    op: str
    """With its suffixes, such as "add.s32"."""
    operands: tuple[Operand, ...]
    guard: str | None
    """The predicate register without which a thread skips the instruction."""
    negated: bool
    """Whether it skips with it instead."""


class Kernel(NamedTuple):
    """The code of a kernel."""

    name: str
    num_threads: int
    instructions: list[Instruction]
    labels: dict[str, int]
    """The index of the instruction after each label."""
    registers: dict[str, str]
    """The type of each register, such as "b32"."""


_STATEMENT = re.compile(
    r"\s*(?:(?P<brace>[{}])|(?P<label>[$%\w.]+):(?!:)|\.reg\s+\.(?P<type>\w+)\s+(?P<names>[^;]+);"
    r"|\.(?:loc|file)[^\n]*\n|\.pragma[^;]*;|(?P<text>[^;]+);)"
)
_OPERAND = re.compile(r"[^,{}\[\]]+|\{[^}]*\}|\[[^\]]*\]")


def parse(ptx: str) -> Kernel:
    """Return the only kernel in `ptx`."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    entry = re.search(r"\.entry (\w+)\(", ptx)
    threads = re.search(r"\.reqntid (\d+)", ptx)
    assert entry
    assert threads
    kernel = Kernel(entry[1], int(threads[1]), [], {}, {})
    scopes: list[dict[str, str]] = []  # the registers of each open brace, by their name in the text
    place, num_scopes = ptx.index("{", threads.end()), 0
    while found := _STATEMENT.match(ptx, place):
        place = found.end()
        if found["brace"] == "{":
            scopes.append({})
            num_scopes += 1
        elif found["brace"]:
            scopes.pop()
            if not scopes:
                return kernel
        elif found["label"]:
            kernel.labels[found["label"]] = len(kernel.instructions)
        elif found["names"]:
            for name in _declared(found["names"]):
                # Braces of inline assembly declare the same names again and again.
                scopes[-1][name] = name if len(scopes) == 1 else f"{name}@{num_scopes}"
                kernel.registers[scopes[-1][name]] = found["type"]
        elif found["text"]:
            kernel.instructions.append(_instruction(found["text"], scopes))
    raise ValueError(f"cannot read {ptx[place : place + 80]!r}")


def _declared(names: str) -> list[str]:
    """Return the names in a declaration such as "%r<3>" or "a, b"."""
    found = []
    for name in names.split(","):
        base, _, count = name.strip().rstrip(">").partition("<")
        found += [f"{base}{index}" for index in range(int(count))] if count else [base]
    return found


def _instruction(text: str, scopes: list[dict[str, str]]) -> Instruction:
    text = " ".join(text.split())
    guard, negated, rest = re.match(r"(?:@(!?)([%\w]+) )?(.*)", text).group(2, 1, 3)  # type: ignore[union-attr]
    op, _, operands = rest.partition(" ")
    return Instruction(
        text,
        op,
        tuple(_operand(item, scopes) for item in _OPERAND.findall(operands) if item.strip()),
        _name(guard, scopes) if guard else None,
        bool(negated),
    )


def _operand(text: str, scopes: list[dict[str, str]]) -> Operand:
    text = text.strip()
    if text[0] == "{":
        return tuple(_operand(item, scopes) for item in text[1:-1].split(","))
    if text[0] == "[":
        base, _, offset = text[1:-1].partition("+")
        return Address(_operand(base, scopes), int(offset or 0))
    if "|" in text:  # a value and a predicate
        return tuple(_operand(item, scopes) for item in text.split("|"))
    if text[:2] in ("0f", "0d"):
        return int(text[2:], 16)
    if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+U?", text):
        return int(text.rstrip("U"), 0)
    return _name(text, scopes)


def _name(text: str, scopes: list[dict[str, str]]) -> str:
    return next((scope[text] for scope in reversed(scopes) if text in scope), text)
