"""Reads answers that are messages to channels or recipients: those of gpt-oss and Muse Glimmer.

gpt-oss writes harmony:
<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

Muse Glimmer:
to=self<|message|>...<|eom|><|start|>assistant to=f<|message|><atem:function_calls>
<atem:invoke name="f">
<atem:parameter name="city">Rome</atem:parameter>
</atem:invoke>
</atem:function_calls><|eot|>
"""

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, Literal

from nanovllm.apps.server.output_parsers.parameter_types import Function
from nanovllm.apps.server.output_parsers.parts import (
    Part,
    PartsReader,
    ReasoningDelta,
    Steps,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    marked_tag,
    new_call_id,
    prefix_at_end,
)
from nanovllm.apps.server.output_parsers.reasoning import HARMONY, MUSE, ReasoningFormat
from nanovllm.apps.server.output_parsers.tagged_calls import InvokeParser
from nanovllm.apps.server.output_parsers.tool_calls import MAX_CALLS

HARMONY_TAGS = (
    *("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    *("<|channel|>", "<|constrain|>"),
)
MUSE_TAGS = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
ATEM_TAGS = ("<atem:function_calls>", "</atem:function_calls>")

_START, _MESSAGE = HARMONY_TAGS[:2]
_CHANNEL, _CONSTRAIN = HARMONY_TAGS[-2:]
_CHANNEL_NAME = re.compile(r"\W*(analysis|commentary|final)(?![a-z])[?.…]*")
_READERS = ("assistant", "user", "all")  # recipients that are not functions
_CONTENT_TYPES = ("json", "code", "text")
_CONTENT_TYPE = re.compile(r"\A\s*(?:json|code|text)\b")

Kind = Literal["text", "reasoning", "call"]  # what a message is


class ChannelsParser(PartsReader):
    """Splits an answer into messages, each after a header. Text without a header is text.

    Messages of one kind are joined by line ends.

    Args:
        has_reasoning, has_calls: False leaves these in the text.
        started: the prompt ends inside a message of reasoning.
        marked: tags that have TOKEN_MARK before them.
        functions: their schemas have the types of arguments.
    """

    reasoning: ClassVar[ReasoningFormat]
    tags: ClassVar[tuple[str, ...]]
    """The tag before a header, but for the first; between a header and its message; after a
    message; others, of which those of harmony's headers are last."""
    untagged_header: ClassVar[re.Pattern[str]]  # matches a header that does not begin with a tag
    recipient: ClassVar[re.Pattern[str]]  # finds the recipient that a header names
    thought_header: ClassVar[str]
    """The header of a message of reasoning in a grammar, with {0} for the first of the tags."""
    text_opening: ClassVar[str]  # likewise what stands before the text of an answer

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
        self._tags = {marked_tag(tag, marked): tag for tag in self.tags}
        self._header: list[tuple[str, str]] | None = None if started else [("", "")]
        """The tags of the header that is read, each with the text after it; None in a message."""
        self._is_open = False  # the header began with a tag, so it is one
        self._kind: Kind = "reasoning" if started and has_reasoning else "text"
        self._num_calls = 0
        self._said: set[Kind] = set()  # kinds that an earlier message has
        self._is_first = True  # nothing of the message was returned yet

    def _answer(self) -> Steps[None]:
        any_tag = re.compile("|".join(map(re.escape, self._tags)))
        while not self._ended:
            end = 0
            for match in any_tag.finditer(self._text):
                self._read(self._text[end : match.start()])
                self._read_tag(self._tags[match[0]])
                end = match.end()
            text = self._text[end:]
            self._text = prefix_at_end(text, self._tags)
            self._read(text.removesuffix(self._text))
            yield
        if not self._cut:
            self._read(self._text)
        self._end_message()

    def _read(self, text: str) -> None:
        """Read text that has no tag."""
        if self._header is None:
            self._send(text)
            return
        tag, before = self._header[-1]
        self._header[-1] = (tag, before + text)
        if not self._is_open and not self._may_be_header(before + text):
            self._begin_message("text")
            self._send(before + text)

    def _read_tag(self, tag: str) -> None:
        if tag == _MESSAGE:
            if self._header is not None:
                self._end_header(has_message=True)
        elif tag not in (_CHANNEL, _CONSTRAIN):
            self._end_message()
            self._header = [("", "")]
            self._is_open = tag == _START
        elif self._header is not None:
            self._header.append((tag, ""))
            self._is_open = True
        elif tag == _CHANNEL:  # the model forgot <|end|><|start|>
            self._end_message()
            self._header = [(tag, "")]
            self._is_open = True

    def _may_be_header(self, text: str) -> bool:
        """Whether a text that follows no tag may be a header's beginning, such as " to=user"."""
        if self.untagged_header.fullmatch(text):
            return True
        words = " ".join(f"{text}.".split())[:-1]  # a space at the end stays
        return any(header.startswith(words) for header in ("assistant to=", "to="))

    @abstractmethod
    def _end_header(self, *, has_message: bool = False) -> None:
        """Begin the message that the header announces, unless it was cut off.

        `has_message` is whether its tag was read; else the answer ended, or the model forgot it.
        """

    def _may_call(self) -> bool:
        return self._has_calls and self._num_calls < MAX_CALLS

    def _begin_message(self, kind: Kind) -> None:
        self._header = None
        self._kind = kind
        self._is_first = True

    def _end_message(self) -> None:
        """End the message, or a header that no message follows."""
        if self._header is not None:
            self._end_header()
            self._header = None
        self._end_call()
        if not self._is_first:
            self._said.add(self._kind)
        self._is_first = True

    def _send(self, text: str) -> None:
        """Return a piece of the message."""
        if self._kind == "call":
            self._send_call(text)
        elif text:
            self._add_text(self._kind, text)

    def _add_text(self, kind: Kind, text: str) -> None:
        """Return a piece of text or reasoning, on a new line after an earlier message."""
        if self._is_first and kind in self._said:
            text = f"\n{text}"
        self._is_first = False
        make = ReasoningDelta if kind == "reasoning" else TextDelta
        self._parts.append(make(text))

    @abstractmethod
    def _send_call(self, text: str) -> None:
        """Return a piece of a message with calls."""

    @abstractmethod
    def _end_call(self) -> None:
        """Return what is left of a message with calls, if there is one."""

    @classmethod
    def answer_rules(
        cls, literal: Callable[[str], str], tag_ids: Mapping[str, int], *, inside: bool
    ) -> str:
        """Return rules in llguidance's Lark, in which `start` is `answer` after reasoning.

        Args:
            literal: returns a tag as it stands in a grammar.
            inside: whether the prompt ends inside the reasoning.
        """
        start, message, end = map(literal, cls.tags[:3])
        is_token = cls.tags[2] in tag_ids
        closed = f"closed: THOUGHT {end}" if is_token else f"closed[suffix={end}]: THOUGHT"
        header = cls.thought_header.format(*map(literal, cls.tags))
        begin = f'closed {start} "assistant" ' if inside else ""
        return (
            f"start: {begin}thought* answer\n"
            f'thought: {header} {message} closed {start} "assistant"\n'
            f"{closed}\nTHOUGHT: /(?s:.*)/\n"
        )


class HarmonyParser(ChannelsParser):
    """The channel analysis is reasoning; a message to a function is a call; all else is text.

    So is text with which the model breaks the format: without a header, or in an unknown channel.
    The types of arguments need no functions: they are JSON.
    """

    reasoning = HARMONY
    tags = HARMONY_TAGS
    untagged_header = re.compile(r"\s*+(?:assistant\s++)?to=\S*+(?:\s++\S*+)?\s*+")
    recipient = re.compile(r"\bto=(\S+)")
    thought_header = '{5} ("analysis" | "commentary")'
    text_opening = '{5} "final" {1}'

    _name = ""  # of the call that has no arguments yet

    def _end_header(self, *, has_message: bool = False) -> None:
        """Begin a message. What belongs to no header is its text."""
        assert self._header is not None
        channel = recipient = None
        rest = self._header[0][1]
        if self._is_open or has_message:
            channel, recipient, rest = self._read_header(self._header)
            # One word is a type of content, or what is there of a channel's name.
            is_name = has_message or self._cut or rest.strip() in _CONTENT_TYPES
            if is_name and len(rest.split()) < 2:
                rest = ""
        name = (recipient or "").removeprefix("functions.")
        if name and self._may_call() and (has_message or rest.lstrip().startswith("{")):
            self._begin_message("call")
            self._name = name
            self._send("" if has_message else rest.lstrip())
            return
        is_reasoning = channel == "analysis" and self._has_reasoning
        self._begin_message("reasoning" if is_reasoning else "text")
        if rest.strip():
            self._send(rest.lstrip() if self._is_open else rest)

    def _read_header(self, sections: list[tuple[str, str]]) -> tuple[str | None, str | None, str]:
        """Return the channel and the recipient that a header names, and the rest of its text:
        there is some if the model forgot <|message|>.
        """
        channel = recipient = None
        rest = ""
        for tag, text in sections:
            found = self.recipient.search(text)
            if found is not None:
                text = text[: found.start()] + text[found.end() :]
                if found[1] not in _READERS:
                    recipient = recipient or found[1]
            if tag == _CHANNEL:
                name = _CHANNEL_NAME.match(text)
                if name is not None:
                    channel = name[1]
                    text = text[name.end() :]
                elif recipient is not None and len(text.split()) < 2:
                    text = ""  # the name of an unknown channel
            elif tag == "":
                text = text.lstrip().removeprefix("assistant")
            elif tag == _CONSTRAIN:
                text = _CONTENT_TYPE.sub("", text)
            rest = f"{rest} {text}" if rest.strip() else text
        return channel, recipient, rest

    def _send_call(self, text: str) -> None:
        if not text:
            return
        if self._name:
            self._parts.append(ToolCallStart(self._num_calls, new_call_id(), self._name))
            self._num_calls += 1
            self._name = ""
        self._parts.append(ToolCallArguments(self._num_calls - 1, text))

    def _end_call(self) -> None:
        if self._name and not self._cut:
            self._send_call("{}")
        self._name = ""


class AtemParser(InvokeParser):
    """<atem:function_calls>, in it <atem:invoke name="f"> and a tag for each parameter.

    The arguments may be JSON. A model that is told of recipients such as f.* may call f.f.
    """

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
    tags = MUSE_TAGS
    untagged_header = re.compile(r"\s*(?:assistant)?\s*(?:to=[^\s<]*)?\s*")
    recipient = re.compile(r"\bto=([^\s<]+)")
    thought_header = '" to=self"'
    text_opening = '" to=user" {1}'

    _calls: AtemParser | None = None  # of the message, if it is one to a function

    def _end_header(self, *, has_message: bool = False) -> None:
        assert self._header is not None
        text = self._header[0][1]
        if has_message:
            self._begin_message(self._kind_of(text))
        elif not self._cut:
            self._begin_message("text")
            self._send(text.strip().removeprefix("assistant").lstrip())

    def _kind_of(self, header: str) -> Kind:
        recipient = self.recipient.search(header)
        if recipient is None or recipient[1] == "user":
            return "text"
        if recipient[1] == "self":
            return "reasoning" if self._has_reasoning else "text"
        return "call" if self._may_call() else "text"

    def _send_call(self, text: str) -> None:
        if self._calls is None:
            self._calls = AtemParser(ATEM_TAGS, self._functions)
        self._add(self._calls.feed(text))

    def _end_call(self) -> None:
        if self._calls is not None:
            self._add(self._calls.finish(cut=self._cut))
            self._calls = None

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
