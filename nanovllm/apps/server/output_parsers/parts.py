"""The parts of an answer: text, reasoning and tool calls, in the order in which they arrive.

`PartsReader` is what makes them of a model's text; the routes send them to clients.
"""

import dataclasses
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from typing import TypeVar

from nanovllm.options.sampling_params import TOKEN_MARK

T = TypeVar("T")
Steps = Generator[None, None, T]  # a piece of a reader's work. It yields where it needs more text.


class NotACall(Exception):
    """What began like a call is not one: it is text."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the text for the user."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the reasoning, which comes before the text."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of a function begins; `index` counts the calls of an answer from 0."""

    index: int
    call_id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments: JSON text as the model wrote it."""

    index: int
    text: str


Part = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class PartsReader(ABC):
    """Splits an answer into parts as it arrives. They are the same, joined, however it is cut."""

    def __init__(self) -> None:
        self._text = ""  # what is neither returned nor dropped yet
        self._pos = 0  # how much of it was read
        self._ended = self._cut = False
        self._parts: list[Part] = []
        self._run = self._answer()

    def feed(self, delta: str) -> list[Part]:
        """Return the parts that are certain after the next piece of text."""
        self._text += delta
        next(self._run, None)
        parts = self._parts
        self._parts = []
        return parts

    def finish(self, *, cut: bool) -> list[Part]:
        """Return the parts that were held back. Nothing may be fed afterwards.

        If the answer was cut off, the beginning of a tag at its end is dropped.
        """
        self._ended = True
        self._cut = cut
        return self.feed("")

    @abstractmethod
    def _answer(self) -> Steps[None]:
        """Read `_text` and add to `_parts`."""

    # Each of these reads on from where the last one ended.

    def _drop_read(self) -> str:
        """Forget the text that was read, and return it."""
        read = self._text[: self._pos]
        self._text = self._text[self._pos :]
        self._pos = 0
        return read

    def _word(self, character: re.Pattern[str]) -> Steps[str]:
        """Read the characters that match a pattern, and return them."""
        start = self._pos
        while character.fullmatch((yield from self._peek())):
            self._pos += 1
        return self._text[start : self._pos]

    def _skip_space(self) -> Steps[None]:
        while (yield from self._peek()).isspace():
            self._pos += 1

    def _skip_tags(self, tag: str) -> Steps[None]:
        """Read white space, and a tag as often as it is repeated."""
        yield from self._skip_space()
        while tag and (yield from self._accept(tag)):
            yield from self._skip_space()

    def _accept(self, string: str) -> Steps[bool]:
        """Read a string if it comes next; return whether it does. What is cut off of it is read."""
        start = self._pos
        for character in string:
            found = yield from self._peek()
            if found != character:
                self._pos = self._pos if self._cut and not found else start
                return False
            self._pos += 1
        return True

    def _accept_next(self, string: str) -> Steps[bool]:
        """Read white space, and a string as `_accept` does."""
        yield from self._skip_space()
        return (yield from self._accept(string))

    def _is_next(self, tag: str) -> Steps[bool]:
        """Whether a tag comes next; "" never does. Nothing of it is read."""
        start = self._pos
        found = tag != "" and (yield from self._accept(tag))
        self._pos = start
        return found

    def _peek(self) -> Steps[str]:
        """Return the next character; "" at the end of the answer."""
        while self._pos == len(self._text) and not self._ended:
            yield from self._more()
        return self._text[self._pos : self._pos + 1]

    def _next(self) -> Steps[str]:
        """Read white space, and return the character after it; "" at the end of the answer."""
        yield from self._skip_space()
        return (yield from self._peek())

    def _more(self) -> Steps[None]:
        """Wait for more text; raise NotACall if the answer has ended."""
        if self._ended:
            raise NotACall
        yield


def new_call_id() -> str:
    """Return an id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


def marked_tag(tag: str, marked: Collection[str]) -> str:
    """Return a tag as the text has it: a special token has TOKEN_MARK before it."""
    return TOKEN_MARK + tag if tag in marked else tag


def prefix_at_end(text: str, tags: Collection[str]) -> str:
    """Return the longest end of a text with which one of the tags may begin; not a whole tag."""
    for length in range(min(max(map(len, tags), default=1) - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(len(tag) > length and tag.startswith(end) for tag in tags):
            return end
    return ""
