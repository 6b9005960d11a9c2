"""What gpt-oss's and Muse Glimmer's formats share: an answer is messages, each after a header."""

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from nanovllm.apps.server.output_parsers.parameter_types import Function
from nanovllm.apps.server.output_parsers.parts import ReasoningDelta, TextDelta
from nanovllm.apps.server.output_parsers.reasoning import ReasoningFormat
from nanovllm.apps.server.output_parsers.text_reader import TagsReader, marked_tag

Kind = Literal["text", "reasoning", "call"]
"""What a message is."""


class ChannelsParser(TagsReader):
    """Splits an answer into reasoning, text and calls. Text without a header is text.

    Messages of one kind are joined by line ends.

    Args:
        has_reasoning: False leaves reasoning in the text.
        has_calls: False leaves calls in the text.
        started: the prompt ends inside a message of reasoning.
        marked: tags that have TOKEN_MARK before them.
        functions: those that may be called: their schemas have the types of arguments.
    """

    reasoning: ClassVar[ReasoningFormat]
    tags: ClassVar[tuple[str, ...]]
    start: ClassVar[str]
    """The tag before a header, but for the first."""
    message: ClassVar[str]
    """The tag between a header and its message."""
    end: ClassVar[str]
    """The tag after a message."""
    untagged_header: ClassVar[re.Pattern[str]]
    """Matches a header that does not begin with a tag."""

    def __init__(
        self,
        *,
        has_reasoning: bool = True,
        has_calls: bool = True,
        started: bool = False,
        marked: Collection[str] = (),
        functions: Sequence[Function] = (),
    ) -> None:
        super().__init__()
        self._has_reasoning = has_reasoning
        self._has_calls = has_calls
        self._functions = functions
        self._tags = {marked_tag(tag, marked): tag for tag in self.tags}
        self._is_open = False  # the header began with a tag, so it is one
        self._kind: Kind = "reasoning" if started and has_reasoning else "text"
        self._num_calls = 0
        self._said: set[Kind] = set()  # kinds that an earlier message has
        self._is_first = True  # nothing of the message was returned yet
        self._begin_answer(inside=started)

    @abstractmethod
    def _begin_answer(self, *, inside: bool) -> None:
        """Get ready to read a header, or the rest of a message if the prompt ends `inside` one."""

    def _answer(self) -> Iterator[None]:
        """Read all messages."""
        yield from self._pieces()
        self._end_message()

    def _begin_message(self, kind: Kind) -> None:
        self._kind = kind
        self._is_first = True

    def _end_message(self) -> None:
        if not self._is_first:
            self._said.add(self._kind)
        self._is_first = True

    def _add_text(self, kind: Kind, text: str) -> None:
        """Return a piece of text or reasoning, on a new line after an earlier message."""
        if self._is_first and kind in self._said:
            text = f"\n{text}"
        self._is_first = False
        make = ReasoningDelta if kind == "reasoning" else TextDelta
        self._parts.append(make(text))

    def _may_be_header(self, text: str) -> bool:
        """Whether a text that follows no tag may be a header's beginning, such as " to=user"."""
        if self.untagged_header.fullmatch(text):
            return True
        words = " ".join(f"{text}.".split())[:-1]  # a space at the end stays
        return any(header.startswith(words) for header in ("assistant to=", "to="))

    @classmethod
    def answer_rules(
        cls, literal: Callable[[str], str], tag_ids: Mapping[str, int], *, inside: bool
    ) -> str:
        """Return rules in llguidance's Lark, in which `start` is `answer` after reasoning.

        Args:
            literal: returns a tag as it stands in a grammar.
            tag_ids: ids of the tags that are tokens.
            inside: whether the prompt ends inside the reasoning.
        """
        end = literal(cls.end)
        closed = (
            f"closed: THOUGHT {end}" if cls.end in tag_ids else f"closed[suffix={end}]: THOUGHT"
        )
        next_message = f'{literal(cls.start)} "assistant"'
        begin = f"closed {next_message} " if inside else ""
        return (
            f"start: {begin}thought* answer\n"
            f"thought: {cls._thought_header(literal)} {literal(cls.message)} "
            f"closed {next_message}\n"
            f"{closed}\nTHOUGHT: /(?s:.*)/\n"
        )

    @classmethod
    @abstractmethod
    def _thought_header(cls, literal: Callable[[str], str]) -> str:
        """Return the header of a message of reasoning, in a grammar."""

    @classmethod
    @abstractmethod
    def text_opening(cls, literal: Callable[[str], str]) -> str:
        """Return what stands before the text of an answer, in a grammar."""
