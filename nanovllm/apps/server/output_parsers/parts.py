"""The parts of an answer: text, reasoning and tool calls, in the order in which they arrive.

`PartsReader` is what makes them of a model's text; the routes send them to clients.
"""

import dataclasses
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator

from nanovllm.options.sampling_params import TOKEN_MARK


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

        Args:
            cut: whether the answer was cut off; then the beginning of a tag at its end is dropped.
        """
        self._ended = True
        self._cut = cut
        return self.feed("")

    @abstractmethod
    def _answer(self) -> Iterator[None]:
        """Read `_text` and add to `_parts`; stop where more text is needed."""


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
