"""Splits a model's reasoning from its answer, while the text arrives.

Pure text: knows no requests, no tokens and no server.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from nanovllm.chat.parts import PartsReader, ReasoningDelta, TextDelta
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


class ReasoningParser(PartsReader):
    """Finds reasoning at the start of an answer; tags anywhere else are text.

    Reasoning that is not closed runs to the end of the answer.

    Args:
        started: the prompt ends with the opening tag, so the answer starts inside.
        marked: tags that have TOKEN_MARK before them.
    """

    def __init__(
        self, tags: ReasoningFormat, *, started: bool, marked: Collection[str] = ()
    ) -> None:
        super().__init__()
        self._begin = marked_tag(tags.opening, marked) + tags.label
        self._closing = marked_tag(tags.closing, marked)
        self._started = started

    def _answer(self) -> Iterator[None]:
        """Read the answer. Only what may belong to a tag is held back."""
        while not self._ended and self._begin.startswith(self._text.lstrip()):
            yield
        text = self._text.lstrip()
        has_tag = text.startswith(self._begin)  # a model may repeat that of the prompt
        if has_tag:
            self._text = text.removeprefix(self._begin)
        elif self._cut and self._begin.startswith(text):
            self._text = self._text.removesuffix(text)
        if has_tag or self._started:
            yield from self._reasoning()
        while True:
            if self._text:
                self._parts.append(TextDelta(self._text))
            self._text = ""
            yield

    def _reasoning(self) -> Iterator[None]:
        """Read reasoning, its closing tag, and the line ends behind it."""
        yield from self._skip_line_ends()
        while True:
            text, closing, rest = self._text.partition(self._closing)
            if not closing and (self._cut or not self._ended):
                text = text.removesuffix(prefix_at_end(text, self._closing))
            text = text.rstrip("\n")
            if text:
                self._parts.append(ReasoningDelta(text))
            if closing or self._ended:
                break
            self._text = self._text[len(text) :]
            yield
        self._text = rest
        yield from self._skip_line_ends()

    def _skip_line_ends(self) -> Iterator[None]:
        while not (text := self._text.lstrip("\n")) and not self._ended:
            yield
        self._text = text


def prefix_at_end(text: str, tag: str) -> str:
    """Return the longest end of a text with which a tag may begin; not the whole tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return tag[:length]
    return ""
