"""What the tests of parsers share: parsers by the names of formats, cut texts, and joined parts."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from nanovllm.apps.server.output_parsers.parts import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    marked_tag,
)
from nanovllm.apps.server.output_parsers.tool_calls import ToolCallParser
from nanovllm.apps.server.output_parsers.tool_formats import MISTRAL_ARGS, TOOL_FORMATS
from nanovllm.options.sampling_params import TOKEN_MARK

Answer = list[str | tuple[str, str]]  # pieces of text, and calls as (name, arguments), in order


def make_parser(
    form: str, functions: Sequence[Any] = (), *, marked: Sequence[str] | None = ()
) -> ToolCallParser:
    """Return a parser of a format; of its tags those in `marked`, or all (None), are tokens."""
    found = MISTRAL_ARGS if form == "mistral" else TOOL_FORMATS[form]
    assert found.parser is not None
    marked = found.tags if marked is None else marked
    return found.parser([marked_tag(tag, marked) for tag in found.tags], functions)


def parse(
    parser: str | ToolCallParser, pieces: Sequence[str], *, cut: bool = False, **options: Any
) -> Answer:
    """Return the answer that comes in `pieces`."""
    if isinstance(parser, str):
        parser = make_parser(parser, **options)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined(parts + parser.finish(cut=cut))


def check(form: str, text: str, answer: Answer, *, cut: bool = False, **options: Any) -> None:
    """Check what is read of a text, however it is cut, and that whole arguments are JSON."""
    for size in (1, 2, 3, 7, len(text) + 1):
        assert parse(form, in_pieces(text, size), cut=cut, **options) == answer, size
    for _, arguments in (part for part in answer if isinstance(part, tuple) and not cut):
        json.loads(arguments)


def in_pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def from_tokens(tokens: Sequence[str], tags: Sequence[str]) -> str:
    """Return the text of tokens: those that are tags have their marks."""
    return "".join(marked_tag(token, tags) for token in tokens)


def marked_text(text: str, tags: Sequence[str]) -> str:
    """Return a text in which all tags are tokens."""
    for tag in filter(None, tags):
        text = text.replace(tag, TOKEN_MARK + tag)
    return text


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


class Split(NamedTuple):
    """The parts of an answer, joined by kind."""

    reasoning: str
    text: str
    calls: list[tuple[str, str]]  # as (name, arguments)


def split(parts: list[Part]) -> Split:
    """Return the reasoning, the text and the calls of an answer."""
    reasoning, text = (
        "".join(part.text for part in parts if isinstance(part, kind))
        for kind in (ReasoningDelta, TextDelta)
    )
    calls = joined([p for p in parts if isinstance(p, ToolCallStart | ToolCallArguments)])
    return Split(reasoning, text, [call for call in calls if isinstance(call, tuple)])
