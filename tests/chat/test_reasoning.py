"""Reasoning is split from an answer, however its text is cut."""

import pytest

from nanovllm.chat.parts import ReasoningDelta, TextDelta
from nanovllm.chat.reasoning import THINK, ReasoningParser


def split(text: str, size: int, *, started: bool, cut: bool = False) -> tuple[str, str]:
    """Return the reasoning and the text of an answer that comes `size` characters at a time."""
    parser = ReasoningParser(THINK, started=started)
    parts = []
    for start in range(0, len(text), size):
        parts += parser.feed(text[start : start + size])
    parts += parser.finish(cut=cut)
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
    answer = "".join(part.text for part in parts if isinstance(part, TextDelta))
    return reasoning, answer


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("started", "text", "reasoning", "answer"),
    [
        (False, "Hello", "", "Hello"),
        (False, " \n Hello\n", "", " \n Hello\n"),
        (False, "<think>\na\n\nb\n</think>\n\nHello\n", "a\n\nb", "Hello\n"),
        (False, "\n<think>a</think>Hello", "a", "Hello"),
        (False, "<think>\n\n</think>\n\nHello", "", "Hello"),
        (False, "<think>a < b </thin", "a < b </thin", ""),
        (False, "Hello <think>a</think>", "", "Hello <think>a</think>"),
        (False, "<thin", "", "<thin"),
        (False, "<thinner> a", "", "<thinner> a"),
        (True, "\na</think>\nHello</think>", "a", "Hello</think>"),
        (True, "<think>a</think>Hello", "a", "Hello"),
        (True, "<thinner> a", "<thinner> a", ""),
        (True, "", "", ""),
    ],
)
def test_reasoning_and_text(
    started: bool, text: str, reasoning: str, answer: str, size: int
) -> None:
    assert split(text, size, started=started) == (reasoning, answer)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("started", "text", "reasoning", "answer"),
    [
        (False, "\n<thin", "", "\n"),
        (False, "<think>a < b </thin", "a < b ", ""),
        (False, "<think>a</think>\n\nb <", "a", "b <"),
        (True, "<thin", "", ""),
        (True, "a <", "a ", ""),
        (False, "a <", "", "a <"),
        (False, " ", "", " "),
    ],
)
def test_a_tag_that_is_cut_off(
    started: bool, text: str, reasoning: str, answer: str, size: int
) -> None:
    assert split(text, size, started=started, cut=True) == (reasoning, answer)


def test_pieces_arrive_as_soon_as_they_are_certain() -> None:
    parser = ReasoningParser(THINK, started=True)
    assert parser.feed("a b") == [ReasoningDelta("a b")]
    assert parser.feed(" c <") == [ReasoningDelta(" c ")]
    assert parser.feed("/d") == [ReasoningDelta("</d")]
    assert parser.feed("</think>e") == [TextDelta("e")]
    assert parser.feed("</think") == [TextDelta("</think")]
