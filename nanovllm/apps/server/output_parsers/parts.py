"""The parts of an answer: text, reasoning and tool calls, in the order in which they arrive.

`PartsReader` is what makes them of a model's text; the routes send them to clients.
"""

import dataclasses
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator


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
    """Splits an answer into parts while it arrives. They are the same, joined, however it is cut.

    An answer is read by one iterator, which stops where it needs more text.
    """

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
        """Read `_text` and add to `_parts`."""


def new_call_id() -> str:
    """Return an id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"
