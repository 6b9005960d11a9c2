"""Splits one answer into its parts: reasoning, text and tool calls, without special tokens.

Pure text: knows no requests, no tokens and no server.
"""

import dataclasses
import re
from collections.abc import Collection

from nanovllm.server.parts import Part, ReasoningDelta, TextDelta
from nanovllm.server.reasoning import ReasoningParser
from nanovllm.server.tool_calls import ToolCallParser


class AnswerParser:
    """Splits one answer into parts. The parts are the same, joined, however its text is cut.

    Args:
        special_tokens: texts that are dropped.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolCallParser | None,
        special_tokens: Collection[str],
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._filter = _Filter(special_tokens) if special_tokens else None

    def feed(self, delta: str) -> list[Part]:
        """Return the parts that are certain after the next piece of text."""
        parts: list[Part] = [TextDelta(delta)] if delta else []
        if self._reasoning is not None:
            parts = self._reasoning.feed(delta)
        return self._sent(self._with_calls(parts), ended=False)

    def finish(self) -> list[Part]:
        """Return the parts that were held back. Nothing may be fed afterwards."""
        parts = [] if self._reasoning is None else self._reasoning.finish()
        parts = self._with_calls(parts)
        parts += [] if self._tools is None else self._tools.finish()
        return self._sent(parts, ended=True)

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._tools.feed(part.text) if isinstance(part, TextDelta) else [part]
        return found

    def _sent(self, parts: list[Part], *, ended: bool) -> list[Part]:
        """Return parts without special tokens, and with pieces of the same text joined."""
        if self._filter is not None:
            parts = self._filter.run(parts, ended=ended)
        joined: list[Part] = []
        for part in parts:
            last = joined[-1] if joined else None
            if isinstance(part, TextDelta | ReasoningDelta) and type(last) is type(part):
                joined[-1] = dataclasses.replace(part, text=last.text + part.text)
            else:
                joined.append(part)
        return joined


class _Filter:
    """Drops special tokens from text and reasoning."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len))))
        self._prefixes = {token[:end] for token in tokens for end in range(1, len(token))}
        self._longest = max(map(len, tokens)) - 1
        self._held: TextDelta | ReasoningDelta | None = None  # what may begin a token

    def run(self, parts: list[Part], *, ended: bool) -> list[Part]:
        """Return the parts without special tokens; what may begin one waits, until the end."""
        kept: list[Part] = []
        for part in parts:
            held, self._held = self._held, None
            if held is not None and type(held) is not type(part):
                kept.append(held)
                held = None
            if isinstance(part, TextDelta | ReasoningDelta):
                text, rest = self._split(("" if held is None else held.text) + part.text)
                kept += [dataclasses.replace(part, text=text)] if text else []
                self._held = dataclasses.replace(part, text=rest) if rest else None
            else:
                kept.append(part)
        if ended and self._held is not None:
            kept.append(self._held)
        return kept

    def _split(self, text: str) -> tuple[str, str]:
        """Return what is certain of a text, without tokens, and what may begin one."""
        *before, tail = self._pattern.split(text)
        lengths = range(min(self._longest, len(tail)), 0, -1)
        num_held = next((n for n in lengths if tail[-n:] in self._prefixes), 0)
        end = len(tail) - num_held
        return "".join(before) + tail[:end], tail[end:]
