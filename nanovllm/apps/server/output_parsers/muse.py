"""Reads answers of Muse Glimmer: messages to recipients, each after a header.

to=self<|message|>...<|eom|><|start|>assistant to=f<|message|><atem:function_calls>
<atem:invoke name="f">
<atem:parameter name="city">Rome</atem:parameter>
</atem:invoke>
</atem:function_calls><|eot|>
"""

import dataclasses
import re
from collections.abc import Callable

from nanovllm.apps.server.output_parsers.channels import ChannelsParser, Kind
from nanovllm.apps.server.output_parsers.parts import (
    Part,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.output_parsers.reasoning import MUSE
from nanovllm.apps.server.output_parsers.tagged_calls import InvokeParser
from nanovllm.apps.server.output_parsers.tool_calls import MAX_CALLS

START = "<|start|>"
MESSAGE = "<|message|>"
END = "<|eom|>"
END_OF_TURN = "<|eot|>"
ENDS_OF_ANSWER = (END_OF_TURN,)
TAGS = (START, MESSAGE, END, *ENDS_OF_ANSWER)

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER = re.compile(r"\s*(?:assistant)?\s*(?:to=[^\s<]*)?\s*")


class AtemParser(InvokeParser):
    """<atem:function_calls>, in it <atem:invoke name="f"> and a tag for each parameter.

    The arguments may be a JSON object instead. A model that is told of recipients such as f.* may
    call f.f.
    """

    tag = "<atem:function_calls>"
    closing = "</atem:function_calls>"
    function = ('<atem:invoke name="', "</atem:invoke>")
    parameter = ('<atem:parameter name="', "</atem:parameter>")

    def _start(self, name: str, call_id: str | None = None) -> None:
        first, _, second = name.partition(".")
        known = {function.name for function in self._functions}
        super()._start(first if first == second and first in known - {name} else name, call_id)


class MuseParser(ChannelsParser):
    """A message to itself is the model's reasoning; one to the user or without an addressee is
    text; one to a function has calls.
    """

    reasoning = MUSE
    tags = TAGS
    start = START
    message = MESSAGE
    end = END
    untagged_header = _HEADER

    def _begin_answer(self, *, inside: bool) -> None:
        self._header: str | None = None if inside else ""  # None inside a message
        self._calls: AtemParser | None = None  # of the message, if it is one to a function

    def _read(self, text: str) -> None:
        if self._header is None:
            self._send(text)
            return
        self._header += text
        if not self._is_open and not self._may_be_header(self._header):
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

    def _kind_of(self, header: str) -> Kind:
        recipient = _RECIPIENT.search(header)
        if recipient is None or recipient[1] == "user":
            return "text"
        if recipient[1] == "self":
            return "reasoning" if self._has_reasoning else "text"
        return "call" if self._has_calls and self._num_calls < MAX_CALLS else "text"

    def _begin_message(self, kind: Kind) -> None:
        super()._begin_message(kind)
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
        super()._end_message()

    def _send(self, text: str) -> None:
        """Return a piece of the message."""
        if self._calls is not None:
            self._add(self._calls.feed(text))
        elif text:
            self._add_text(self._kind, text)

    def _add(self, parts: list[Part]) -> None:
        """Return parts of a message with calls, which are counted on from earlier messages."""
        for part in parts:
            if isinstance(part, ToolCallStart):
                self._parts.append(dataclasses.replace(part, index=self._num_calls))
                self._num_calls += 1
            elif isinstance(part, ToolCallArguments):
                self._parts.append(dataclasses.replace(part, index=self._num_calls - 1))
            else:
                self._add_text("text", part.text)

    @classmethod
    def _thought_header(cls, literal: Callable[[str], str]) -> str:
        return '" to=self"'

    @classmethod
    def text_opening(cls, literal: Callable[[str], str]) -> str:
        return f'" to=user" {literal(MESSAGE)}'
