"""The parts of an answer: text, reasoning and tool calls, in the order in which they arrive.

Values only; `answers` makes them of a model's text, the routes send them to clients.
"""

import dataclasses


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
