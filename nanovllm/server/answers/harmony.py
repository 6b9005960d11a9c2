"""Reads answers in harmony, the format of gpt-oss: messages in channels, each behind a header.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

Pure text: knows no requests, no tokens and no server.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

from nanovllm.server.answers.call_arguments import Function, new_call_id
from nanovllm.server.answers.parts import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.server.answers.reasoning import HARMONY, TagsReader, marked_tag
from nanovllm.server.answers.tool_calls import MAX_CALLS

REASONING = HARMONY
START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
ENDS_OF_ANSWER = ("<|call|>", "<|return|>")
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, *ENDS_OF_ANSWER)

_CHANNEL_NAME = re.compile(r"\W*(analysis|commentary|final)(?![a-z])[?.…]*")
_RECIPIENT = re.compile(r"\bto=(\S+)")
_UNTAGGED_HEADER = re.compile(r"\s*+(?:assistant\s++)?to=\S*+(?:\s++\S*+)?\s*+")
_READERS = ("assistant", "user", "all")
"""Recipients that are no functions."""
_CONTENT_TYPES = ("json", "code", "text")
_CONTENT_TYPE = re.compile(r"\A\s*(?:json|code|text)\b")

_Kind = Literal["text", "reasoning", "call"]


class HarmonyParser(TagsReader):
    """Splits an answer into reasoning, text and calls.

    The channel analysis is reasoning; a message to a function is a call; all else is text, also
    where the model breaks the format: text without a header, or in an unknown channel. Messages of
    one kind are joined by line ends.

    Args:
        has_reasoning: False leaves reasoning in the text.
        has_calls: False leaves the arguments of calls in the text.
        started: the prompt ends inside a message of the channel analysis.
        marked: tags that have TOKEN_MARK before them.
    """

    def __init__(
        self,
        *,
        has_reasoning: bool = True,
        has_calls: bool = True,
        started: bool = False,
        marked: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._has_reasoning = has_reasoning
        self._has_calls = has_calls
        self._tags = {marked_tag(tag, marked): tag for tag in TAGS}
        self._sections: list[tuple[str, str]] | None = None if started else [("", "")]
        self._is_open = False  # the header began with a tag, so it is one
        self._kind: _Kind = "reasoning" if started and has_reasoning else "text"
        self._name = ""  # of the call that has no arguments yet
        self._num_calls = 0
        self._said: set[_Kind] = set()  # kinds that an earlier message has
        self._is_first = True  # nothing of the message was returned yet

    def _answer(self) -> Iterator[None]:
        """Read all messages.

        Of an answer that was cut off, a header and a call without arguments are dropped, too.
        """
        yield from self._pieces()
        if self._sections is not None:
            self._end_header()
        self._end_message()

    def _read(self, text: str) -> None:
        if self._sections is None:
            self._send(text)
            return
        tag, before = self._sections[-1]
        self._sections[-1] = (tag, before + text)
        if not self._is_open and not _may_be_header(before + text):
            self._begin_message("text")
            self._send(before + text)

    def _read_tag(self, tag: str) -> None:
        if tag == MESSAGE:
            if self._sections is not None:
                self._end_header(has_message=True)
        elif tag in (START, END, *ENDS_OF_ANSWER):
            if self._sections is not None:
                self._end_header()
            self._end_message()
            self._sections = [("", "")]
            self._is_open = tag == START
        elif self._sections is not None:
            self._sections.append((tag, ""))
            self._is_open = True
        elif tag == CHANNEL:  # the model forgot <|end|><|start|>
            self._end_message()
            self._sections = [(tag, "")]
            self._is_open = True

    def _end_header(self, *, has_message: bool = False) -> None:
        """Begin the message that the header announces. What belongs to no header is its text."""
        assert self._sections is not None
        channel = None
        recipient = None
        rest = self._sections[0][1]
        if self._is_open or has_message:
            channel, recipient, rest = _read_header(self._sections)
            # One word is a type of content, or what is there of a channel's name.
            is_name = has_message or self._cut or rest.strip() in _CONTENT_TYPES
            if is_name and len(rest.split()) < 2:
                rest = ""
        name = (recipient or "").removeprefix("functions.")
        may_call = self._has_calls and self._num_calls < MAX_CALLS
        if name and may_call and (has_message or rest.lstrip().startswith("{")):
            self._begin_message("call")
            self._name = name
            self._send("" if has_message else rest.lstrip())
            return
        is_reasoning = channel == "analysis" and self._has_reasoning
        self._begin_message("reasoning" if is_reasoning else "text")
        if rest.strip():
            self._send(rest.lstrip() if self._is_open else rest)

    def _begin_message(self, kind: _Kind) -> None:
        self._sections = None
        self._kind = kind
        self._is_first = True

    def _end_message(self) -> None:
        if self._name and not self._cut:
            self._send("{}")
        self._name = ""
        if not self._is_first:
            self._said.add(self._kind)
        self._is_first = True

    def _send(self, text: str) -> None:
        """Return a piece of the message."""
        if not text:
            return
        if self._kind == "call":
            if self._name:
                self._parts.append(ToolCallStart(self._num_calls, new_call_id(), self._name))
                self._num_calls += 1
                self._name = ""
            self._parts.append(ToolCallArguments(self._num_calls - 1, text))
            return
        if self._is_first and self._kind in self._said:
            text = f"\n{text}"
        self._is_first = False
        make = ReasoningDelta if self._kind == "reasoning" else TextDelta
        self._parts.append(make(text))


def _may_be_header(text: str) -> bool:
    """Whether a text that follows no tag may be a header's beginning, such as " to=functions.f"."""
    if _UNTAGGED_HEADER.fullmatch(text):
        return True
    words = " ".join(f"{text}.".split())[:-1]  # a space at the end stays
    return any(header.startswith(words) for header in ("assistant to=", "to="))


def _read_header(sections: list[tuple[str, str]]) -> tuple[str | None, str | None, str]:
    """Return the channel and the recipient that a header names, and what belongs to no header.

    There is some if the model forgot <|message|>.

    Args:
        sections: its tags, each with the text behind it.
    """
    channel = recipient = None
    rest = ""
    for tag, text in sections:
        found = _RECIPIENT.search(text)
        if found is not None:
            text = text[: found.start()] + text[found.end() :]
            if found[1] not in _READERS:
                recipient = recipient or found[1]
        if tag == CHANNEL:
            name = _CHANNEL_NAME.match(text)
            if name is not None:
                channel = name[1]
                text = text[name.end() :]
            elif recipient is not None and len(text.split()) < 2:
                text = ""  # the name of an unknown channel
        elif tag == "":
            text = text.lstrip().removeprefix("assistant")
        elif tag == CONSTRAIN:
            text = _CONTENT_TYPE.sub("", text)
        rest = f"{rest} {text}" if rest.strip() else text
    return channel, recipient, rest


def make_parser(
    *,
    has_reasoning: bool,
    has_calls: bool,
    started: bool,
    marked: Collection[str],
    functions: Sequence[Function],
) -> HarmonyParser:
    """Return a parser of one answer. The types of arguments need no functions: they are JSON."""
    return HarmonyParser(
        has_reasoning=has_reasoning, has_calls=has_calls, started=started, marked=marked
    )


def answer_rules(literal: Callable[[str], str], tag_ids: Mapping[str, int], *, inside: bool) -> str:
    """Return rules in llguidance's Lark, of which `start` is `answer` behind reasoning.

    Args:
        literal: returns a tag as a grammar has it.
        tag_ids: ids of the tags that are tokens.
        inside: whether the prompt ends inside the reasoning.
    """
    channel, message, end, start = map(literal, (CHANNEL, MESSAGE, END, START))
    next_message = f'{start} "assistant"'
    closed = f"closed: THOUGHT {end}" if END in tag_ids else f"closed[suffix={end}]: THOUGHT"
    begin = f"closed {next_message} " if inside else ""
    return (
        f"start: {begin}thought* answer\n"
        f'thought: {channel} ("analysis" | "commentary") {message} closed {next_message}\n'
        f"{closed}\nTHOUGHT: /(?s:.*)/\n"
    )


def text_opening(literal: Callable[[str], str]) -> str:
    """Return what stands before the text of an answer, in a grammar."""
    return f'{literal(CHANNEL)} "final" {literal(MESSAGE)}'
