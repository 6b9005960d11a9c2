"""Splits one answer into its parts: reasoning, text and tool calls.

Pure text: knows no requests, no tokens and no server.
"""

import dataclasses

from nanovllm.server.parts import Part, ReasoningDelta, TextDelta
from nanovllm.server.reasoning import ReasoningParser
from nanovllm.server.tool_calls import ToolCallParser


class AnswerParser:
    """Splits one answer into parts. The parts are the same, joined, however its text is cut."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, delta: str) -> list[Part]:
        """Return the parts that are certain after the next piece of text."""
        parts: list[Part] = [TextDelta(delta)] if delta else []
        if self._reasoning is not None:
            parts = self._reasoning.feed(delta)
        return _joined(self._with_calls(parts))

    def finish(self) -> list[Part]:
        """Return the parts that were held back. Nothing may be fed afterwards."""
        parts = [] if self._reasoning is None else self._reasoning.finish()
        parts = self._with_calls(parts)
        parts += [] if self._tools is None else self._tools.finish()
        return _joined(parts)

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._tools.feed(part.text) if isinstance(part, TextDelta) else [part]
        return found


def _joined(parts: list[Part]) -> list[Part]:
    """Return parts with pieces of the same text joined."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, TextDelta | ReasoningDelta) and type(last) is type(part):
            joined[-1] = dataclasses.replace(part, text=last.text + part.text)
        else:
            joined.append(part)
    return joined
