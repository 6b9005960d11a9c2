"""Reads answers in harmony, the format of gpt-oss: messages in channels, each after a header.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
"""

import re
from collections.abc import Callable, Iterator

from nanovllm.apps.server.output_parsers.channels import ChannelsParser, Kind
from nanovllm.apps.server.output_parsers.parts import (
    ToolCallArguments,
    ToolCallStart,
    new_call_id,
)
from nanovllm.apps.server.output_parsers.reasoning import HARMONY
from nanovllm.apps.server.output_parsers.tool_calls import MAX_CALLS

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
"""Recipients that are not functions."""
_CONTENT_TYPES = ("json", "code", "text")
_CONTENT_TYPE = re.compile(r"\A\s*(?:json|code|text)\b")


class HarmonyParser(ChannelsParser):
    """The channel analysis is reasoning; a message to a function is a call; all else is text.

    So is text with which the model breaks the format: without a header, or in an unknown channel.
    The types of arguments need no functions: they are JSON.
    """

    reasoning = HARMONY
    tags = TAGS
    start = START
    message = MESSAGE
    end = END
    untagged_header = _UNTAGGED_HEADER

    def _begin_answer(self, *, inside: bool) -> None:
        self._sections: list[tuple[str, str]] | None = None if inside else [("", "")]
        self._name = ""  # of the call that has no arguments yet

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
        if not self._is_open and not self._may_be_header(before + text):
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

    def _begin_message(self, kind: Kind) -> None:
        super()._begin_message(kind)
        self._sections = None

    def _end_message(self) -> None:
        if self._name and not self._cut:
            self._send("{}")
        self._name = ""
        super()._end_message()

    def _send(self, text: str) -> None:
        """Return a piece of the message."""
        if not text:
            return
        if self._kind != "call":
            self._add_text(self._kind, text)
            return
        if self._name:
            self._parts.append(ToolCallStart(self._num_calls, new_call_id(), self._name))
            self._num_calls += 1
            self._name = ""
        self._parts.append(ToolCallArguments(self._num_calls - 1, text))

    @classmethod
    def _thought_header(cls, literal: Callable[[str], str]) -> str:
        return f'{literal(CHANNEL)} ("analysis" | "commentary")'

    @classmethod
    def text_opening(cls, literal: Callable[[str], str]) -> str:
        return f'{literal(CHANNEL)} "final" {literal(MESSAGE)}'


def _read_header(sections: list[tuple[str, str]]) -> tuple[str | None, str | None, str]:
    """Return the channel and the recipient that a header names, and what belongs to no header.

    There is some if the model forgot <|message|>.

    Args:
        sections: its tags, each with the text after it.
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
