"""From a model's text to the parts of an answer: text, reasoning and tool calls.

Pure text: knows no requests, no tokens and no server.
"""

from nanovllm.server.parts import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.server.reasoning import REASONING_FORMATS, THINK, ReasoningFormat, ReasoningParser

__all__ = [
    "AnswerFormat",
    "AnswerParser",
    "Part",
    "ReasoningDelta",
    "TextDelta",
    "ToolCallArguments",
    "ToolCallStart",
    "find_answer_format",
]


class AnswerFormat:
    """How a model marks reasoning and tool calls in its text. One per model.

    Args:
        reasoning: tags of the reasoning; None if the model has none.
    """

    def __init__(self, reasoning: ReasoningFormat | None) -> None:
        self._reasoning = reasoning
        self.needs_special_tokens = False
        """Whether tags are special tokens: the request runs with skip_special_tokens=False."""

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the tag that opens the reasoning."""
        return self._reasoning is not None and prompt.rstrip().endswith(self._reasoning.opening)

    def parser(self, *, has_tools: bool, starts_in_reasoning: bool) -> "AnswerParser":
        """Return a parser for one answer."""
        return AnswerParser(self._reasoning, starts_in_reasoning=starts_in_reasoning)


class AnswerParser:
    """Splits one answer into parts. The parts are the same, joined, however its text is cut."""

    def __init__(self, reasoning: ReasoningFormat | None, *, starts_in_reasoning: bool) -> None:
        self._reasoning = (
            None if reasoning is None else ReasoningParser(reasoning, started=starts_in_reasoning)
        )

    def feed(self, delta: str) -> list[Part]:
        """Return the parts that are certain after the next piece of text."""
        if self._reasoning is not None:
            return self._reasoning.feed(delta)
        return [TextDelta(delta)] if delta else []

    def finish(self) -> list[Part]:
        """Return the parts that were held back. Nothing may be fed afterwards."""
        return [] if self._reasoning is None else self._reasoning.finish()


def find_answer_format(
    chat_template: str | None, tool_call_parser: str, reasoning_parser: str
) -> AnswerFormat:
    """Return the format that a chat template shows, or the named one.

    Raises:
        ValueError: a name is not "auto", "none" or that of a format.
    """
    if reasoning_parser == "auto":
        return AnswerFormat(THINK if "<think>" in (chat_template or "") else None)
    if reasoning_parser not in ("none", *REASONING_FORMATS):
        names = ", ".join(("auto", "none", *REASONING_FORMATS))
        raise ValueError(f"reasoning_parser must be one of {names}, got {reasoning_parser!r}")
    return AnswerFormat(REASONING_FORMATS.get(reasoning_parser))
