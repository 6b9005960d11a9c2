"""Splits a model's reasoning from its answer, while the text arrives."""

from collections.abc import Collection
from typing import NamedTuple

from nanovllm.apps.server.output_parsers.parts import (
    PartsReader,
    ReasoningDelta,
    Steps,
    TextDelta,
    marked_tag,
    prefix_at_end,
)
from nanovllm.chat.tool_messages import is_harmony


class ReasoningFormat(NamedTuple):
    """The tags around a model's reasoning. Line ends inside and after them belong to the tags."""

    opening: str
    closing: str
    label: str = ""  # a line that follows the opening tag, and is not reasoning; models forget it
    anywhere: bool = False  # whether reasoning may follow text, too. Then no tag is text.
    answer: tuple[str, str] = ("", "")  # tags around the text after the reasoning, or without any

    @property
    def begin(self) -> str:
        """What comes before the reasoning."""
        return self.opening + self.label


THINK = ReasoningFormat("<think>", "</think>")
HUNYUAN = ReasoningFormat("<think>", "</think>", answer=("<answer>", "</answer>"))
ERNIE = ReasoningFormat("<think>", "</think>", answer=("<response>", "</response>"))
COHERE = ReasoningFormat(
    "<|START_THINKING|>", "<|END_THINKING|>", answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
)
MINICPM3 = ReasoningFormat("<|thought_start|>", "<|thought_end|>")
MISTRAL = ReasoningFormat("[THINK]", "[/THINK]")
SEED = ReasoningFormat("<seed:think>", "</seed:think>")
GEMMA4 = ReasoningFormat("<|channel>", "<channel|>", "thought", anywhere=True)
# `channels` has the parsers of these.
HARMONY = ReasoningFormat("<|channel|>", "<|end|>", "analysis<|message|>")
MUSE = ReasoningFormat(" to=self<|message|>", "<|eom|>")
_THINK_NAMES = (
    *("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "ling3", "minimax_m2"),
    *("nemotron_v3", "poolside_v1"),
)
REASONING_FORMATS = {
    **dict.fromkeys(_THINK_NAMES, THINK),
    "ernie45": ERNIE,
    "hunyuan_a13b": HUNYUAN,
    "cohere_command3": COHERE,
    "minicpm3": MINICPM3,
    "mistral": MISTRAL,
    "seed_oss": SEED,
    "gemma4": GEMMA4,
    "openai_gptoss": HARMONY,
    "muse_glimmer": MUSE,
}
"""By the names that vLLM gives its reasoning parsers."""


class ReasoningParser(PartsReader):
    """Finds the reasoning of an answer: at its start, where tags that follow are text; or anywhere.

    Reasoning that is not closed runs to the end of the answer. A repeated opening tag says nothing.

    Args:
        started: the prompt ends with the opening tag, so the answer starts inside.
        answer_started: the prompt ends with the tag before the text.
        marked: tags that have TOKEN_MARK before them.
    """

    def __init__(
        self,
        tags: ReasoningFormat,
        *,
        started: bool,
        answer_started: bool = False,
        marked: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._opening = marked_tag(tags.opening, marked)
        self._closing = marked_tag(tags.closing, marked)
        self._label = tags.label
        self._anywhere = tags.anywhere
        self._answer_tags = tags.answer
        self._answer_started = answer_started
        self.is_open = started  # whether what was read last is reasoning that is not closed

    def _answer(self) -> Steps[None]:
        """Read the answer. Only what may belong to a tag is held back."""
        if not self.is_open:
            yield from self._skip_closings()
        yield from self._read_opening()
        if self.is_open:
            yield from self._reasoning()
        if self._answer_tags[0]:
            yield from self._tagged_answer()
        tags = (self._opening, self._closing) if self._anywhere else ()
        while True:
            text, tag = self._up_to(*tags)
            if text:
                self._parts.append(TextDelta(text))
            if tag == self._opening:
                self._text = tag + self._text
                yield from self._reasoning()
            elif not tag:
                yield

    def _read_opening(self) -> Steps[None]:
        """Note whether reasoning begins: with its tag, or its label, if models forget the tag."""
        yield from self._skip_space()
        begin = self._pos
        has_tag = yield from self._is_next(self._opening)
        has_label = self._label != "" and (yield from self._is_next(f"{self._label}\n"))
        rest = self._text[begin:]
        self._pos = 0
        if has_tag or has_label:
            self.is_open = True
            self._text = rest if has_tag else self._opening + rest
        elif self._cut and self._opening.startswith(rest):
            self._text = self._text[:begin]

    def _reasoning(self) -> Steps[None]:
        """Read reasoning from its opening tag on, its closing tag, and the line ends after it."""
        self.is_open = True
        yield from self._skip_openings()
        tags = (self._closing, self._opening) if self._anywhere else (self._closing,)
        line_ends = ""  # they are the closing tag's, if it comes next
        while self.is_open:
            text, tag = self._up_to(*tags)
            text = line_ends + text
            line_ends = text[len(text.rstrip("\n")) :]
            if text := text.removesuffix(line_ends):
                self._parts.append(ReasoningDelta(text))
            if tag == self._opening:
                self._text = tag + self._text
                yield from self._skip_openings()
            elif tag:
                self.is_open = False
            else:
                yield
        yield from self._skip_line_ends()
        yield from self._skip_closings()

    def _tagged_answer(self) -> Steps[None]:
        """Read text up to the tag after it, if it begins with the tag before it."""
        opening, closing = self._answer_tags
        if not (yield from self._drop_tag(opening)) and not self._answer_started:
            if self._cut and self._text.isspace():  # what it stands before was cut off
                self._text = ""
            return
        yield from self._skip_line_ends()
        line_ends = ""  # they are the closing tag's, if it comes next
        while True:
            text, tag = self._up_to(closing)
            text = line_ends + text
            line_ends = text[len(text.rstrip("\n")) :]
            if text := text.removesuffix("" if self._ended and not tag else line_ends):
                self._parts.append(TextDelta(text))
            if tag or self._ended:
                break
            yield
        yield from self._skip_line_ends()

    def _up_to(self, *tags: str) -> tuple[str, str]:
        """Read up to the next of these tags, and the tag; return the text before it, and the tag.

        It is "" if none has come: then an end of the text that may begin one is not read.
        """
        found = [(place, tag) for tag in tags if (place := self._text.find(tag)) >= 0]
        if found:
            place, tag = min(found)
            text = self._text[:place]
            self._text = self._text[place + len(tag) :]
            return text, tag
        held = prefix_at_end(self._text, tags)
        text = self._text.removesuffix(held)
        self._text = held
        if self._ended:
            self._text = ""
            text += "" if self._cut else held
        return text, ""

    def _skip_openings(self) -> Steps[None]:
        """Skip opening tags with their labels, and the line ends after them."""
        while (yield from self._drop_tag(self._opening)):
            if (yield from self._accept(self._label)):
                following = yield from self._peek()
                if following not in ("", "\n", self._closing[0]):
                    self._pos = 0
            self._drop_read()
        yield from self._skip_line_ends()

    def _skip_closings(self) -> Steps[None]:
        """Skip closing tags that close nothing, and the line ends after them."""
        while (yield from self._drop_tag(self._closing)):
            yield from self._skip_line_ends()

    def _drop_tag(self, tag: str) -> Steps[bool]:
        """Drop white space and a tag, or what there is of it; return whether the tag came next."""
        yield from self._skip_space()
        start = self._pos
        found = yield from self._accept(tag)
        if self._pos == start:
            self._pos = 0
        self._drop_read()
        return found

    def _skip_line_ends(self) -> Steps[None]:
        while (yield from self._peek()) == "\n":
            self._pos += 1
        self._drop_read()


def find_reasoning_format(chat_template: str | None) -> ReasoningFormat | None:
    """Return the tags that a chat template has."""
    template = chat_template or ""
    if is_harmony(template):
        return HARMONY
    if "to=self<|message|>" in template:
        return MUSE
    if COHERE.answer[0] in template:
        return COHERE
    for tags in (HUNYUAN, ERNIE):
        has_results = "<response>" in tags.answer and "<minimax:" in template
        if all(tag in template for tag in (tags.closing, *tags.answer)) and not has_results:
            return tags
    known = (THINK, MISTRAL, SEED, GEMMA4, COHERE, MINICPM3)
    return next((tags for tags in known if tags.closing in template), None)
