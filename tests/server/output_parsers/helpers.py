"""What the tests of parsers share: answers put together from their parts, and cut texts."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from nanovllm.apps.server.output_parsers.parts import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.output_parsers.tool_calls import ToolCallParser

Answer = list[str | tuple[str, str]]
"""Pieces of text, and calls as (name, arguments), in order."""


def check_calls(parse: Callable[..., Answer], text: str, answer: Answer) -> None:
    """Check what `parse` makes of a text at once and by characters, and that arguments are JSON."""
    assert parse(text) == parse(text, [1] * len(text)) == answer
    for part in answer:
        if isinstance(part, tuple):
            json.loads(part[1])


def joined(parts: list[Part]) -> Answer:
    """Return an answer with its pieces joined."""
    answer: Answer = []
    for part in parts:
        last = answer[-1] if answer else None
        if isinstance(part, ToolCallStart):
            assert part.index == sum(isinstance(item, tuple) for item in answer)
            answer.append((part.name, ""))
        elif isinstance(part, ToolCallArguments):
            assert isinstance(last, tuple)
            answer[-1] = (last[0], last[1] + part.text)
        elif isinstance(last, str):
            answer[-1] = last + part.text
        else:
            answer.append(part.text)
    return answer


def parse(kind: type[ToolCallParser], pieces: list[str], *, cut: bool = False) -> Answer:
    """Return the answer that comes in `pieces`."""
    parser = kind()
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined(parts + parser.finish(cut=cut))


def cut(text: str, sizes: list[int]) -> list[str]:
    """Return a text in pieces of these sizes, and the rest in one."""
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


class Split(NamedTuple):
    """The parts of an answer, joined by kind."""

    reasoning: str
    text: str
    calls: list[tuple[str, str]]
    """As (name, arguments)."""


def split(parts: list[Part]) -> Split:
    """Return the reasoning, the text and the calls of an answer."""
    reasoning = ""
    text = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case ReasoningDelta():
                reasoning += part.text
            case TextDelta():
                text += part.text
            case ToolCallStart():
                assert part.index == len(calls)
                calls.append((part.name, ""))
            case ToolCallArguments():
                assert part.index == len(calls) - 1
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + part.text)
    return Split(reasoning, text, calls)


def json_values(
    texts: st.SearchStrategy[str], keys: st.SearchStrategy[str]
) -> st.SearchStrategy[Any]:
    """Return a strategy for what JSON can say, of `texts`, and of objects with `keys`."""
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        st.none() | st.booleans() | numbers | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=8,
    )
