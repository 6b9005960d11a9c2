"""From a model's text to the parts of an answer: text, reasoning and tool calls.

Pure text: knows no requests, no tokens but the ids of tags, and no server.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.server.parts import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.server.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    find_reasoning_format,
)
from nanovllm.server.tool_calls import ToolCallParser
from nanovllm.server.tool_formats import (
    TOOL_FORMATS,
    Function,
    ToolFormat,
    find_tool_format,
    quoted,
    tag_literal,
)
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.validation import shown

__all__ = [
    "AnswerFormat",
    "AnswerParser",
    "NamedTool",
    "Part",
    "ReasoningDelta",
    "TextDelta",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolChoice",
    "find_answer_format",
]

T = TypeVar("T")


class NamedTool(NamedTuple):
    """The tool that an answer must call."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool
"""Whether an answer may or must call tools."""


class AddedToken(Protocol):
    """A token with a text of its own, as transformers has it."""

    @property
    def content(self) -> str: ...
    @property
    def special(self) -> bool: ...


class AnswerFormat:
    """How a model marks reasoning and tool calls in its text. One per model.

    Args:
        reasoning: tags of the reasoning; None if it is not split off.
        tools: how calls are written; None if they are not looked for.
        added_tokens: the tokenizer's added tokens by id.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        added_tokens: Mapping[int, AddedToken],
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._tag_ids = {t.content: i for i, t in added_tokens.items() if t.special}
        added = {token.content for token in added_tokens.values()}
        self._may_reason = reasoning is not None and reasoning.opening in added
        tags = {*(reasoning or ()), *(tools.tags if tools is not None else ())}
        self.needs_special_tokens = bool(tags & self._tag_ids.keys())
        """Whether tags are special tokens. Then requests run with skip_special_tokens=False, and
        the parser drops the special tokens' text."""

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the tag that opens the reasoning."""
        return self._reasoning is not None and prompt.rstrip().endswith(self._reasoning.opening)

    def parser(self, *, has_tools: bool, starts_in_reasoning: bool) -> "AnswerParser":
        """Return a parser for one answer.

        Args:
            has_tools: whether to look for tool calls. Names are not compared with the tools': a
                call of a tool that does not exist is a call, as in vLLM.
        """
        reasoning = tools = None
        if self._reasoning is not None:
            reasoning = ReasoningParser(self._reasoning, started=starts_in_reasoning)
        if self._tools is not None and has_tools:
            tools = self._tools.parser()
        return AnswerParser(reasoning, tools, self._tag_ids if self.needs_special_tokens else ())

    def tool_grammar(
        self,
        tools: Sequence[Function],
        tool_choice: ToolChoice,
        *,
        parallel_tool_calls: bool = True,
        starts_in_reasoning: bool = False,
    ) -> StructuredOutputsParams | None:
        """Return what makes an answer call tools; None where it need not.

        "required" makes one call or more, a named tool exactly one. Arguments fit the schema of
        their tool; properties that it does not declare come only with "additionalProperties". A
        model that reasons may do so before.

        Args:
            parallel_tool_calls: False allows one call only.

        Raises:
            InvalidRequestError: there is no such tool, or the model's format is not known.
        """
        if tool_choice in ("none", "auto"):
            return None
        if self._tools is None:
            raise InvalidRequestError(
                f"tool_choice={shown(tool_choice)} needs a known format of tool calls: start the "
                f"server with tool_call_parser set to one of {', '.join(TOOL_FORMATS)}"
            )
        if isinstance(tool_choice, NamedTool):
            tools = [tool for tool in tools if tool.name == tool_choice.name][:1]
            parallel_tool_calls = False
        if not tools:
            name = f" named {shown(tool_choice.name)}" if isinstance(tool_choice, NamedTool) else ""
            raise InvalidRequestError(f"tool_choice needs a tool{name}, but tools has none")
        rules = self._tools.grammar(tools, several=parallel_tool_calls, tag_ids=self._tag_ids)
        return StructuredOutputsParams(grammar=self._start(starts_in_reasoning) + rules)

    def _start(self, starts_in_reasoning: bool) -> str:
        """Return the rule `start` of a grammar: `calls`, with reasoning before."""
        if self._reasoning is None or not (starts_in_reasoning or self._may_reason):
            return "start: calls\n"
        opening, closing = (tag_literal(tag, self._tag_ids) for tag in self._reasoning)
        if self._reasoning.closing in self._tag_ids:
            thought = f"thought: TEXT {closing}\n"
        else:
            thought = f"thought[suffix={quoted(self._reasoning.closing)}]: TEXT\n"
        begin = "thought" if starts_in_reasoning else f"({opening} thought)?"
        return f"start: {begin} LINES? calls\nTEXT: /(?s:.*)/\nLINES: /\\n{{1,2}}/\n{thought}"


class AnswerParser:
    """Splits one answer into parts. The parts are the same, joined, however its text is cut.

    Args:
        special_tokens: texts that are dropped.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolCallParser | None,
        special_tokens: Collection[str],
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._filter = _Filter(special_tokens) if special_tokens else None

    def feed(self, delta: str) -> list[Part]:
        """Return the parts that are certain after the next piece of text."""
        parts: list[Part] = [TextDelta(delta)] if delta else []
        if self._reasoning is not None:
            parts = self._reasoning.feed(delta)
        return self._sent(self._with_calls(parts), ended=False)

    def finish(self) -> list[Part]:
        """Return the parts that were held back. Nothing may be fed afterwards."""
        parts = [] if self._reasoning is None else self._reasoning.finish()
        parts = self._with_calls(parts)
        parts += [] if self._tools is None else self._tools.finish()
        return self._sent(parts, ended=True)

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._tools.feed(part.text) if isinstance(part, TextDelta) else [part]
        return found

    def _sent(self, parts: list[Part], *, ended: bool) -> list[Part]:
        """Return parts without special tokens, and with pieces of the same text joined."""
        if self._filter is not None:
            parts = self._filter.run(parts, ended=ended)
        joined: list[Part] = []
        for part in parts:
            last = joined[-1] if joined else None
            if isinstance(part, TextDelta | ReasoningDelta) and type(last) is type(part):
                joined[-1] = dataclasses.replace(part, text=last.text + part.text)
            else:
                joined.append(part)
        return joined


class _Filter:
    """Drops special tokens from text and reasoning."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len))))
        self._prefixes = {token[:end] for token in tokens for end in range(1, len(token))}
        self._longest = max(map(len, tokens)) - 1
        self._held: TextDelta | ReasoningDelta | None = None  # what may begin a token

    def run(self, parts: list[Part], *, ended: bool) -> list[Part]:
        """Return the parts without special tokens; what may begin one waits, until the end."""
        kept: list[Part] = []
        for part in parts:
            held, self._held = self._held, None
            if held is not None and type(held) is not type(part):
                kept.append(held)
                held = None
            if isinstance(part, TextDelta | ReasoningDelta):
                text, rest = self._split(("" if held is None else held.text) + part.text)
                kept += [dataclasses.replace(part, text=text)] if text else []
                self._held = dataclasses.replace(part, text=rest) if rest else None
            else:
                kept.append(part)
        if ended and self._held is not None:
            kept.append(self._held)
        return kept

    def _split(self, text: str) -> tuple[str, str]:
        """Return what is certain of a text, without tokens, and what may begin one."""
        *before, tail = self._pattern.split(text)
        lengths = range(min(self._longest, len(tail)), 0, -1)
        num_held = next((n for n in lengths if tail[-n:] in self._prefixes), 0)
        end = len(tail) - num_held
        return "".join(before) + tail[:end], tail[end:]


def find_answer_format(
    chat_template: str | None,
    tool_call_parser: str,
    reasoning_parser: str,
    added_tokens: Mapping[int, AddedToken] | None = None,
) -> AnswerFormat:
    """Return the format that a chat template shows, or the named one.

    Args:
        tool_call_parser: "auto" for what the template shows, "none", or a name.
        reasoning_parser: likewise.
        added_tokens: the tokenizer's added tokens by id; some of them may be tags.

    Raises:
        ConfigError: a name is not known.
    """
    tools = find_tool_format(chat_template)
    if tool_call_parser != "auto":
        tools_type = _named("tool_call_parser", tool_call_parser, TOOL_FORMATS)
        # A template that shows the newer form of a format knows better which it is.
        if tools_type is None or not isinstance(tools, tools_type):
            tools = None if tools_type is None else tools_type()
    reasoning = find_reasoning_format(chat_template)
    if reasoning_parser != "auto":
        reasoning = _named("reasoning_parser", reasoning_parser, REASONING_FORMATS)
    return AnswerFormat(reasoning, tools, added_tokens or {})


def _named(field: str, name: str, known: Mapping[str, T]) -> T | None:
    if name != "none" and name not in known:
        names = ", ".join(("auto", "none", *known))
        raise ConfigError(f"{field} must be one of {names}, got {shown(name)}")
    return known.get(name)
