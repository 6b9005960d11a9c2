"""Formats whose messages go to recipients or channels: gpt-oss's and Muse Glimmer's.

Their reasoning, text and calls are read by one parser each.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from nanovllm.server.answers import harmony, muse
from nanovllm.server.answers.call_arguments import Function
from nanovllm.server.answers.parts import PartsReader
from nanovllm.server.answers.reasoning import ReasoningFormat
from nanovllm.server.answers.tool_formats import Harmony, MuseGlimmer, ToolFormat


class Channels(Protocol):
    """A format whose messages go to recipients or channels, such as the module `harmony`."""

    @property
    def REASONING(self) -> ReasoningFormat: ...
    @property
    def TAGS(self) -> tuple[str, ...]: ...
    def make_parser(
        self,
        *,
        has_reasoning: bool,
        has_calls: bool,
        started: bool,
        marked: Collection[str],
        functions: Sequence[Function],
    ) -> PartsReader: ...
    def answer_rules(
        self, literal: Callable[[str], str], tag_ids: Mapping[str, int], *, inside: bool
    ) -> str: ...
    def text_opening(self, literal: Callable[[str], str]) -> str: ...


_FORMATS: tuple[tuple[Channels, type[ToolFormat]], ...] = (
    (harmony, Harmony),
    (muse, MuseGlimmer),
)


def find_channels(reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> Channels | None:
    """Return the format of channels to which a format of reasoning or of calls belongs."""
    for channels, kind in _FORMATS:
        if reasoning is channels.REASONING or isinstance(tools, kind):
            return channels
    return None
