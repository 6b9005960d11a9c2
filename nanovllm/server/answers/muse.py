"""Reads answers of Muse Glimmer: messages to recipients, each behind a header.

     to=self<|message|>...<|eom|><|start|>assistant to=f<|message|><atem:function_calls>
    <atem:invoke name="f">
    <atem:parameter name="city">Rome</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eot|>

Pure text: knows no requests, no tokens and no server.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

from nanovllm.server.answers.call_arguments import Function
from nanovllm.server.answers.parts import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.server.answers.reasoning import MUSE, TagsReader, marked_tag
from nanovllm.server.answers.tagged_calls import TaggedParser
from nanovllm.server.answers.tool_calls import MAX_CALLS

REASONING = MUSE
START = "<|start|>"
MESSAGE = "<|message|>"
END = "<|eom|>"
END_OF_TURN = "<|eot|>"
ENDS_OF_ANSWER = (END_OF_TURN,)
TAGS = (START, MESSAGE, END, *ENDS_OF_ANSWER)
CALLS = "<atem:function_calls>"
CALLS_END = "</atem:function_calls>"
INVOKE = '<atem:invoke name="'
INVOKE_END = "</atem:invoke>"

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER = re.compile(r"\s*(?:assistant)?\s*(?:to=[^\s<]*)?\s*")

_Kind = Literal["text", "reasoning", "call"]


class AtemParser(TaggedParser):
    """<atem:function_calls>, in it <atem:invoke name="f"> and a tag for each parameter.

    The arguments may be a JSON object instead. A model that is told of recipients such as f.* may
    call f.f.
    """

    tag = CALLS
    closing = CALLS_END
    function = (INVOKE, INVOKE_END)
    parameter = ('<atem:parameter name="', "</atem:parameter>")
    name_end = '">'
    trims_values = False

    def _start(self, name: str, call_id: str | None = None) -> None:
        first, _, second = name.partition(".")
        known = {function.name for function in self._functions}
        super()._start(first if first == second and first in known - {name} else name, call_id)


class MuseParser(TagsReader):
    """Splits an answer into reasoning, text and calls.

    A message to itself is the model's reasoning, one to the user or to nobody is text, and one to
    a function has calls. Text without a header is text. Messages of one kind are joined by line
    ends.

    Args:
        has_reasoning: False leaves reasoning in the text.
        has_calls: False leaves calls in the text.
        started: the prompt ends inside a message of reasoning.
        marked: tags that have TOKEN_MARK before them.
        functions: those that may be called: their schemas have the types of arguments.
    """

    def __init__(
        self,
        *,
        has_reasoning: bool = True,
        has_calls: bool = True,
        started: bool = False,
        marked: Collection[str] = (),
        functions: Sequence[Function] = (),
    ) -> None:
        super().__init__()
        self._has_reasoning = has_reasoning
        self._has_calls = has_calls
        self._functions = functions
        self._tags = {marked_tag(tag, marked): tag for tag in TAGS}
        self._header: str | None = None if started else ""  # None inside a message
        self._is_open = False  # the header began with a tag, so it is one
        self._kind: _Kind = "reasoning" if started and has_reasoning else "text"
        self._calls: AtemParser | None = None  # of the message, if it is one to a function
        self._num_calls = 0  # of earlier messages
        self._said: set[_Kind] = set()  # kinds that an earlier message has
        self._is_first = True  # nothing of the message was returned yet

    def _answer(self) -> Iterator[None]:
        """Read all messages."""
        yield from self._pieces()
        self._end_message()

    def _read(self, text: str) -> None:
        if self._header is None:
            self._send(text)
            return
        self._header += text
        if not self._is_open and not _may_be_header(self._header):
            text = self._header
            self._header = None
            self._begin_message("text")
            self._send(text)

    def _read_tag(self, tag: str) -> None:
        if tag == MESSAGE:
            if self._header is not None:
                self._begin_message(self._kind_of(self._header))
                self._header = None
            return
        self._end_message()
        self._header = ""
        self._is_open = tag == START

    def _kind_of(self, header: str) -> _Kind:
        recipient = _RECIPIENT.search(header)
        if recipient is None or recipient[1] == "user":
            return "text"
        if recipient[1] == "self":
            return "reasoning" if self._has_reasoning else "text"
        return "call" if self._has_calls and self._num_calls < MAX_CALLS else "text"

    def _begin_message(self, kind: _Kind) -> None:
        self._kind = kind
        self._is_first = True
        self._calls = AtemParser((), self._functions) if kind == "call" else None

    def _end_message(self) -> None:
        """End the message, or a header that none follows: it is text, unless it was cut off."""
        if self._header is not None and not self._cut:
            text = self._header.strip().removeprefix("assistant").lstrip()
            self._begin_message("text")
            self._send(text)
        self._header = None
        if self._calls is not None:
            self._add(self._calls.finish(cut=self._cut))
            self._calls = None
        if not self._is_first:
            self._said.add(self._kind)
        self._is_first = True

    def _send(self, text: str) -> None:
        """Return a piece of the message."""
        if self._calls is not None:
            self._add(self._calls.feed(text))
        elif text:
            make = ReasoningDelta if self._kind == "reasoning" else TextDelta
            self._add([make(text)])

    def _add(self, parts: list[Part]) -> None:
        """Return parts, after those of earlier messages."""
        for part in parts:
            if isinstance(part, ToolCallStart):
                part = dataclasses.replace(part, index=self._num_calls)
                self._num_calls += 1
            elif isinstance(part, ToolCallArguments):
                part = dataclasses.replace(part, index=self._num_calls - 1)
            else:
                kind: _Kind = "reasoning" if isinstance(part, ReasoningDelta) else "text"
                if self._is_first and kind in self._said:
                    part = dataclasses.replace(part, text=f"\n{part.text}")
                self._is_first = False
            self._parts.append(part)


def _may_be_header(text: str) -> bool:
    """Whether a text that follows no tag may be a header's beginning, such as " to=user"."""
    if _HEADER.fullmatch(text):
        return True
    words = " ".join(f"{text}.".split())[:-1]  # a space at the end stays
    return any(header.startswith(words) for header in ("assistant to=", "to="))


make_parser = MuseParser


def answer_rules(literal: Callable[[str], str], tag_ids: Mapping[str, int], *, inside: bool) -> str:
    """Return rules in llguidance's Lark, of which `start` is `answer` behind reasoning.

    Args:
        literal: returns a tag as a grammar has it.
        tag_ids: ids of the tags that are tokens.
        inside: whether the prompt ends inside the reasoning.
    """
    message, end, start = map(literal, (MESSAGE, END, START))
    closed = f"closed: THOUGHT {end}" if END in tag_ids else f"closed[suffix={end}]: THOUGHT"
    begin = f'closed {start} "assistant" ' if inside else ""
    return (
        f"start: {begin}thought* answer\n"
        f'thought: " to=self" {message} closed {start} "assistant"\n'
        f"{closed}\nTHOUGHT: /(?s:.*)/\n"
    )


def text_opening(literal: Callable[[str], str]) -> str:
    """Return what stands before the text of an answer, in a grammar."""
    return f'" to=user" {literal(MESSAGE)}'
