"""Splits a model's reasoning from its answer, while the text arrives.

Pure text: knows no requests, no tokens and no server.
"""

import enum
from collections.abc import Collection
from typing import NamedTuple

from nanovllm.chat.parts import Part, ReasoningDelta, TextDelta
from nanovllm.options.sampling_params import TOKEN_MARK


class ReasoningFormat(NamedTuple):
    """The tags around a model's reasoning. Line ends inside and behind them belong to the tags."""

    opening: str
    closing: str
    label: str = ""
    """Text that follows the opening tag, and is no reasoning."""

    @property
    def begin(self) -> str:
        """What comes before the reasoning."""
        return self.opening + self.label


THINK = ReasoningFormat("<think>", "</think>")
MISTRAL = ReasoningFormat("[THINK]", "[/THINK]")
GEMMA4 = ReasoningFormat("<|channel>", "<channel|>", "thought")
HARMONY = ReasoningFormat("<|channel|>", "<|end|>", "analysis<|message|>")
"""One of several channels: `harmony` has the parser."""
REASONING_FORMATS = {
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "mistral": MISTRAL,
    "gemma4": GEMMA4,
    "openai_gptoss": HARMONY,
}
"""By the names that vLLM gives its reasoning parsers."""


def find_reasoning_format(chat_template: str | None) -> ReasoningFormat | None:
    """Return the tags that a chat template has."""
    template = chat_template or ""
    if is_harmony(template):
        return HARMONY
    return next((tags for tags in (THINK, MISTRAL, GEMMA4) if tags.closing in template), None)


def is_harmony(template: str) -> bool:
    """Whether a chat template writes harmony, the format of gpt-oss."""
    return "<|channel|>" in template and "<|message|>" in template


def marked_tag(tag: str, marked: Collection[str]) -> str:
    """Return a tag as the text has it: a special token has TOKEN_MARK before it."""
    return TOKEN_MARK + tag if tag in marked else tag


class _State(enum.Enum):
    START = enum.auto()
    REASONING = enum.auto()
    BEHIND = enum.auto()  # between the reasoning and the text
    TEXT = enum.auto()


class ReasoningParser:
    """Finds reasoning at the start of an answer; tags anywhere else are text.

    Reasoning that is not closed runs to the end of the answer.

    Args:
        started: the prompt ends with the opening tag, so the answer starts inside.
        marked: tags that have TOKEN_MARK before them.
    """

    def __init__(
        self, tags: ReasoningFormat, *, started: bool, marked: Collection[str] = ()
    ) -> None:
        self._begin = marked_tag(tags.opening, marked) + tags.label
        self._closing = marked_tag(tags.closing, marked)
        self._started = started
        self._state = _State.START
        self._held = ""
        self._is_first = True  # no reasoning was returned yet

    def feed(self, delta: str) -> list[Part]:
        """Return what is certain now; only what may belong to a tag is held back."""
        return self._run(delta, ended=False, cut=False)

    def finish(self, *, cut: bool) -> list[Part]:
        """Return what was held back, as `AnswerParser.finish` does."""
        return self._run("", ended=True, cut=cut)

    def _run(self, delta: str, *, ended: bool, cut: bool) -> list[Part]:
        self._held += delta
        parts: list[Part] = []
        if self._state is _State.START:
            self._state = self._after_start(ended, cut)
        if self._state is _State.REASONING:
            self._add_reasoning(parts, ended, cut)
        if self._state is _State.BEHIND:
            self._held = self._held.lstrip("\n")
            self._state = _State.TEXT if self._held else _State.BEHIND
        if self._state is _State.TEXT and self._held:
            parts.append(TextDelta(self._held))
            self._held = ""
        return parts

    def _after_start(self, ended: bool, cut: bool) -> _State:
        """Drop the opening tag if it is there; a model may repeat that of the prompt."""
        begin = self._held.lstrip()
        if begin.startswith(self._begin):
            self._held = begin[len(self._begin) :]
            return _State.REASONING
        if self._begin.startswith(begin):
            if not ended:
                return _State.START
            if cut:
                self._held = self._held.removesuffix(begin)
        return _State.REASONING if self._started else _State.TEXT

    def _add_reasoning(self, parts: list[Part], ended: bool, cut: bool) -> None:
        if self._is_first:
            self._held = self._held.lstrip("\n")
        text, closing, rest = self._held.partition(self._closing)
        if not closing and (cut or not ended):
            text = text.removesuffix(prefix_at_end(text, self._closing))
        text = text.rstrip("\n")
        if closing:
            self._state, self._held = _State.BEHIND, rest
        else:
            self._held = "" if ended else self._held[len(text) :]
        if text:
            parts.append(ReasoningDelta(text))
            self._is_first = False


def prefix_at_end(text: str, tag: str) -> str:
    """Return the longest end of a text with which a tag may begin; not the whole tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return tag[:length]
    return ""
