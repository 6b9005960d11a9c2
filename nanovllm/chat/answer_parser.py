"""Splits one answer into its parts: reasoning, text and tool calls.

Pure text: knows no requests, no tokens and no server.
"""

import dataclasses

from nanovllm.chat.parts import Part, PartsReader, ReasoningDelta, TextDelta, ToolCallArguments
from nanovllm.options.sampling_params import TOKEN_MARK


class AnswerParser:
    """Splits one answer into parts. The parts are the same, joined, however its text is cut.

    Args:
        reasoning: splits the reasoning off; in harmony, the calls too.
        tools: splits the calls off the rest.
        several: whether calls after the first are returned.
    """

    def __init__(
        self, reasoning: PartsReader | None, tools: PartsReader | None, *, several: bool
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._several = several

    def feed(self, delta: str) -> list[Part]:
        """Return the parts that are certain after the next piece of text."""
        parts: list[Part] = [TextDelta(delta)] if delta else []
        if self._reasoning is not None:
            parts = self._reasoning.feed(delta)
        return self._sent(self._with_calls(parts))

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return the parts that were held back. Nothing may be fed afterwards.

        Args:
            cut: whether the answer was cut off; then the beginning of a tag at its end is dropped.
        """
        parts = [] if self._reasoning is None else self._reasoning.finish(cut=cut)
        parts = self._with_calls(parts)
        parts += [] if self._tools is None else self._tools.finish(cut=cut)
        return self._sent(parts)

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._tools.feed(part.text) if isinstance(part, TextDelta) else [part]
        return found

    def _sent(self, parts: list[Part]) -> list[Part]:
        """Return the parts to send, with pieces of the same text joined.

        A tag where no tag belongs is text: without its mark, which is no character.
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
