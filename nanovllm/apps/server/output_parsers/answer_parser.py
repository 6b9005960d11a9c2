"""Splits one answer into its parts: reasoning, text and tool calls."""

import dataclasses

from nanovllm.apps.server.output_parsers.parts import (
    Part,
    PartsReader,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.output_parsers.reasoning import ReasoningParser
from nanovllm.apps.server.output_parsers.tool_calls import ToolCallParser
from nanovllm.options.sampling_params import TOKEN_MARK


class AnswerParser:
    """Splits one answer into parts. The parts are the same, joined, however its text is cut.

    A call in reasoning that is closed later is a thought. If nothing closes the reasoning, or only
    a tag at the end of the answer, right after the calls, then the first call ends the reasoning:
    calls and text follow. In an answer that was cut off, a call that text follows is a thought.

    Args:
        reasoning: splits the reasoning off; where messages go to channels, the calls too.
        tools: splits the calls off the rest.
        several: whether calls after the first are returned.
    """

    def __init__(
        self, reasoning: PartsReader | None, tools: ToolCallParser | None, *, several: bool
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._thought: _Thought | None = None  # the reasoning that is not known to be closed
        self._several = several

    @property
    def holds_call(self) -> bool:
        """Whether a call is held back, because it may be a thought."""
        return self._thought is not None and self._thought.has_call

    def feed(self, delta: str) -> list[Part]:
        """Return the parts that are certain after the next piece of text."""
        parts: list[Part] = [TextDelta(delta)] if delta else []
        if self._reasoning is not None:
            parts = self._reasoning.feed(delta)
        return self._sent(self._with_calls(parts))

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return the parts that were held back, as `PartsReader.finish` does."""
        parts = [] if self._reasoning is None else self._reasoning.finish(cut=cut)
        parts = self._with_calls(parts)
        if self._tools is not None:
            if self._thought is not None:
                thought = self._thought
                is_open = isinstance(self._reasoning, ReasoningParser) and self._reasoning.is_open
                has_answer = not is_open and (cut or thought.goes_on or not thought.has_call)
                parts += thought.close() if has_answer else thought.finish(cut=cut)
                parts += self._tools.feed(thought.after)
            parts += self._tools.finish(cut=cut)
        return self._sent(parts)

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        found: list[Part] = []
        for part in parts:
            if isinstance(part, ReasoningDelta):
                if self._thought is None:
                    self._thought = _Thought(self._tools.fresh())
                found += self._thought.feed(part.text)
            elif isinstance(part, TextDelta):
                if self._thought is not None:
                    found += self._thought.close()
                    self._thought = None
                found += self._tools.feed(part.text)
            else:
                found.append(part)
        return found

    def _sent(self, parts: list[Part]) -> list[Part]:
        """Return the parts to send, with pieces of the same text joined.

        A tag where none belongs is text, without its mark, which is not a character.
        """
        joined: list[Part] = []
        for part in parts:
            if isinstance(part, TextDelta | ReasoningDelta | ToolCallArguments):
                if TOKEN_MARK in part.text:
                    part = dataclasses.replace(part, text=part.text.replace(TOKEN_MARK, ""))
                if not part.text:
                    continue
            last = joined[-1] if joined else None
            if isinstance(part, TextDelta | ReasoningDelta):
                if type(last) is type(part):
                    joined[-1] = dataclasses.replace(part, text=last.text + part.text)
                else:
                    joined.append(part)
            elif self._several or part.index == 0:
                joined.append(part)
        return joined


class _Thought:
    """Reasoning that may hold a call; `calls` is a parser that has read nothing yet."""

    def __init__(self, calls: ToolCallParser) -> None:
        self._calls = calls
        self.has_call = False  # from there on it is held back
        self.after = ""  # what follows the reasoning, once it is finished
        self.goes_on = False  # text follows the call
        self._held: list[str] = []  # what was read, and may be a call

    def feed(self, text: str) -> list[Part]:
        """Return the reasoning in which no call may begin."""
        self._held.append(text)
        return self._take(self._calls.feed(text))

    def close(self) -> list[Part]:
        """Return what was held back: all of it is reasoning."""
        text = "".join(self._held)
        self._held = []
        return [ReasoningDelta(text)] if text else []

    def finish(self, *, cut: bool) -> list[Part]:
        """Return the rest of reasoning that is not closed, up to the first call."""
        parts = self._take(self._calls.finish(cut=cut))
        if not self.has_call:
            return parts
        if cut and self.goes_on:
            return self.close()
        self.after = "".join(self._held)
        return parts

    def _take(self, parts: list[Part]) -> list[Part]:
        """Return the text before the first of the calls as reasoning, and hold the rest."""
        said = ""
        for part in parts:
            if isinstance(part, ToolCallStart):
                self.has_call = True
            elif isinstance(part, TextDelta) and self.has_call:
                self.goes_on |= part.text != ""
            elif isinstance(part, TextDelta):
                said += part.text
        if not said:
            return []
        self._held = ["".join(self._held)[len(said) :]]
        return [ReasoningDelta(said)]
