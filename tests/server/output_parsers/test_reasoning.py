"""Reasoning is split from an answer, however its text is cut."""

import pytest

from nanovllm.apps.server.output_parsers.answer_format import find_answer_format
from nanovllm.apps.server.output_parsers.parts import ReasoningDelta, TextDelta
from nanovllm.apps.server.output_parsers.reasoning import (
    COHERE,
    ERNIE,
    GEMMA4,
    HARMONY,
    HUNYUAN,
    MINICPM3,
    MISTRAL,
    THINK,
    ReasoningFormat,
    ReasoningParser,
    find_reasoning_format,
)
from nanovllm.options.sampling_params import TOKEN_MARK


def split(text: str, size: int, *, started: bool, cut: bool = False) -> tuple[str, str]:
    """Return the reasoning and the text of an answer that comes `size` characters at a time."""
    return parsed(ReasoningParser(THINK, started=started), text, size, cut=cut)


def parsed(parser: ReasoningParser, text: str, size: int, *, cut: bool = False) -> tuple[str, str]:
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
        (False, "<think>\n<think>\na</think>Hello", "a", "Hello"),
        (False, "<think>a < b </thin", "a < b </thin", ""),
        (False, "Hello <think>a</think>", "", "Hello <think>a</think>"),
        (False, "<thin", "", "<thin"),
        (False, "</thin", "", "</thin"),
        (False, "</think>\n\nHello </think>", "", "Hello </think>"),
        (False, "\n</think></think>\n<think>a</think>\n</think>Hello", "a", "Hello"),
        (True, "a</think>\n\n</think>\nHello", "a", "Hello"),
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
        (False, "</thin", "", ""),
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


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    ("started", "text", "reasoning", "answer"),
    [
        (False, "<|channel>thought\na\n<channel|>b", "a", "b"),
        (False, "<|channel>thought\n<channel|>b", "", "b"),
        (True, "a<channel|>b", "a", "b"),
        (True, "<|channel>thought\na<channel|>b", "a", "b"),
        # What models forget, repeat, or write behind the text.
        (False, "<|channel>a<channel|>b", "a", "b"),
        (False, "<|channel>thoughtful<channel|>b", "thoughtful", "b"),
        (False, "<|channel>other\na<channel|>b", "other\na", "b"),
        (False, "<|channel><|channel>thought\na<channel|>b", "a", "b"),
        (False, "<|channel>thought\n<|channel>thought\na<channel|>b", "a", "b"),
        (False, "<|channel>thought\na\n<|channel>thought\nb<channel|>c", "a\nb", "c"),
        (False, "<|channel>thought\na<channel|><channel|>b<channel|>", "a", "b"),
        (False, "<channel|>b", "", "b"),
        (False, "thought\na\n<channel|>b", "a", "b"),
        (False, "thoughts\n", "", "thoughts\n"),
        (False, "b <|channel>thought\n<channel|>c", "", "b c"),
        (False, "b<|channel>thought\na<channel|>c", "a", "bc"),
        (False, "b<|channel>thought", "", "b"),
        (False, "b <| c", "", "b <| c"),
    ],
)
def test_a_label_behind_the_tag(
    started: bool, text: str, reasoning: str, answer: str, size: int
) -> None:
    parser = ReasoningParser(GEMMA4, started=started)
    assert parsed(parser, text, size) == (reasoning, answer)


@pytest.mark.parametrize("size", [1, 1000])
def test_text_that_reads_like_tags_is_text(size: int) -> None:
    text = f"{TOKEN_MARK}[THINK]a [/THINK] b{TOKEN_MARK}[/THINK][THINK]c"
    parser = ReasoningParser(MISTRAL, started=False, marked=MISTRAL[:2])
    assert parsed(parser, text, size) == ("a [/THINK] b", "[THINK]c")
    parser = ReasoningParser(MISTRAL, started=False, marked=MISTRAL[:2])
    assert parsed(parser, "[THINK]a[/THINK]", size) == ("", "[THINK]a[/THINK]")


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("<think></think>", THINK),
        ("[THINK][/THINK]", MISTRAL),
        ("<|channel>thought<channel|>", GEMMA4),
        ("<|channel|>analysis<|message|>", HARMONY),
        ("<|channel>", None),
        ("<think></think><response>{{ content }}</response>", ERNIE),
        ("<think></think><minimax:tool_call><response>{{ result }}</response>", THINK),
        ("<|START_RESPONSE|>{{ content }}<|END_RESPONSE|>", COHERE),
        ("<|thought_start|><|thought_end|>", MINICPM3),
        (None, None),
    ],
)
def test_the_template_shows_the_format(template: str | None, tags: ReasoningFormat | None) -> None:
    assert find_reasoning_format(template) == tags


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\na\n</think>\n<answer>\nHello\n\nyou\n</answer>", "a", "Hello\n\nyou"),
        ("<answer>\nHello</answer><tool_calls>", "", "Hello<tool_calls>"),
        ("<think>a</think>Hello</answer>", "a", "Hello</answer>"),
        ("<think>a</think><answer>Hello\n", "a", "Hello\n"),
        ("<think>a</think><answ", "a", "<answ"),
        ("Hello <answer>", "", "Hello <answer>"),
        ("<think>a", "a", ""),
    ],
)
def test_hunyuan_has_tags_around_its_answer(
    size: int, text: str, reasoning: str, answer: str
) -> None:
    assert parsed(ReasoningParser(HUNYUAN, started=False), text, size) == (reasoning, answer)
    whole = f"{text} and more"
    for end in range(len(text)):  # nothing of a tag that is cut off is text
        for step in (1, 1000):
            parser = ReasoningParser(HUNYUAN, started=False)
            _, said = parsed(parser, whole[:end], step, cut=True)
            assert answer.startswith(said.rstrip("\n")), whole[:end]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_cohere_has_tags_around_its_answer(size: int) -> None:
    text = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hello\nyou<|END_RESPONSE|>"
    for cut in (False, True):
        parser = ReasoningParser(COHERE, started=False)
        assert parsed(parser, text, size, cut=cut) == ("Hm.", "Hello\nyou")
        parser = ReasoningParser(COHERE, started=False, answer_started=True)  # by the prompt
        assert parsed(parser, "\nHello<|END_RESPONSE|>", size, cut=cut) == ("", "Hello")
    found = find_answer_format("<|START_RESPONSE|><|END_RESPONSE|>", "auto", "auto")
    assert found.starts_in_answer("<|CHATBOT_TOKEN|><|START_RESPONSE|>")
    assert not found.starts_in_answer("<|START_RESPONSE|>Hello<|END_RESPONSE|>")
    parser = ReasoningParser(ERNIE, started=True)
    text = "Hm.\n</think>\n\n<response>\nHello\n</response>\n"
    assert parsed(parser, text, size) == ("Hm.", "Hello")


def test_hunyuan_is_told_by_its_answer() -> None:
    template = "</think>{% if '<answer>' in c %}{{ c.split('</answer>') }}{% endif %}"
    assert find_reasoning_format(template) == HUNYUAN
