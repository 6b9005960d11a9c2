"""An answer is split into reasoning, text and calls, however its text is cut."""

import pytest

from nanovllm.apps.server.output_parsers.answer_parser import AnswerParser
from nanovllm.apps.server.output_parsers.parts import ReasoningDelta, TextDelta
from nanovllm.apps.server.output_parsers.reasoning import REASONING_FORMATS, ReasoningParser
from nanovllm.apps.server.protocol import Tool
from nanovllm.options.sampling_params import TOKEN_MARK
from tests.server.output_parsers.helpers import Split, make_parser, split

FUNCTIONS = [Tool.model_construct(name=name, parameters=None) for name in ("f", "g")]


def make(tools: str, reasoning: str, *, started: bool, marked: tuple[str, ...]) -> AnswerParser:
    return AnswerParser(
        ReasoningParser(REASONING_FORMATS[reasoning], started=started, marked=marked),
        make_parser(tools, FUNCTIONS, marked=marked),
        several=True,
    )


def parse(
    text: str,
    size: int = 1,
    *,
    tools: str = "hermes",
    reasoning: str = "qwen3",
    started: bool = True,
    cut: bool = False,
    marked: tuple[str, ...] = (),
) -> Split:
    """Return the parts of an answer that comes `size` characters at a time."""
    for tag in marked:
        text = text.replace(tag, TOKEN_MARK + tag)
    parser = make(tools, reasoning, started=started, marked=marked)
    parts = []
    for start in range(0, len(text), size):
        parts += parser.feed(text[start : start + size])
    parts += parser.finish(cut=cut)
    return split(parts)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
F = ("f", '{"a": 1}')
G = ("g", "{}")


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"I look.\n\n{CALL}", Split("I look.", "", [F])),
        (f"I look.\n{CALL}\n{OTHER_CALL}", Split("I look.", "", [F, G])),
        (CALL, Split("", "", [F])),
        (f"I look.{CALL}\nDone.", Split("I look.", "Done.", [F])),
        ("I look. <tool_call> is a tag", Split("I look. <tool_call> is a tag", "", [])),
        (f"<tool_call> a {CALL}", Split("<tool_call> a", "", [F])),
        # Reasoning that is closed keeps its calls, and those behind it are calls.
        (f"as {CALL} maybe</think>\n\nHi", Split(f"as {CALL} maybe", "Hi", [])),
        (f"as {CALL}\nmaybe</think>", Split(f"as {CALL}\nmaybe", "", [])),
        (f"I look. {CALL}\n{OTHER_CALL}\n</think>\n", Split("I look.", "", [F, G])),
        (f"as {CALL}</think>\n\n{OTHER_CALL}", Split(f"as {CALL}", "", [G])),
    ],
)
def test_a_call_ends_reasoning_that_nothing_closes(text: str, found: Split, size: int) -> None:
    """Symptom: no call, finish_reason "stop", and all of the answer is reasoning."""
    assert parse(text, size) == found
    assert parse(f"<think>\n{text}", size, started=False) == found


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("tools", "reasoning", "text", "tags"),
    [
        (
            "qwen3_coder",
            "qwen3",
            "<think>\nI look.\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
            "</function>\n</tool_call>",
            (),
        ),
        (
            "mistral",
            "mistral",
            '[THINK]I look.[TOOL_CALLS]f[ARGS]{"a": "1"}',
            ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
        ),
        (
            "gemma4",
            "gemma4",
            '<|channel>thought\nI look.<|tool_call>call:f{a:<|"|>1<|"|>}<tool_call|>',
            ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        ),
        (
            "lfm2",
            "qwen3",
            "<think>I look.<|tool_call_start|>[f(a='1')]<|tool_call_end|>",
            ("<|tool_call_start|>", "<|tool_call_end|>"),
        ),
        ("llama3_json", "qwen3", '<think>I look.\n{"name": "f", "parameters": {"a": "1"}}', ()),
    ],
)
def test_in_each_format(
    tools: str, reasoning: str, text: str, tags: tuple[str, ...], size: int
) -> None:
    found = Split("I look.", "", [("f", '{"a": "1"}')])
    for marked in {(), tags}:
        given = {"tools": tools, "reasoning": reasoning, "marked": marked}
        assert parse(text, size, started=False, **given) == found  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("<tool_c", Split("I look.", "", [])),
        ('<tool_call>\n{"name": "f"', Split("I look.", "", [])),
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": 1',
            Split("I look.", "", [("f", '{"a": 1')]),
        ),
        (f"{CALL}\n</think>", Split(f"I look. {CALL}", "", [])),
        (f"{CALL}\n<tool_c", Split("I look.", "", [F])),
        (f"{CALL}\nSo </thi", Split(f"I look. {CALL}\nSo ", "", [])),
    ],
)
def test_an_answer_that_is_cut_off(end: str, found: Split, size: int) -> None:
    assert parse(f"I look. {end}", size, cut=True) == found


def test_a_later_thought_may_hold_a_call() -> None:
    thought = "<|channel>thought\nr"
    call = "<|tool_call>call:f{}<tool_call|>"
    for size in (1, 3, 1000):
        text = f"{thought}<channel|>Hm. {call}{thought}{call}"
        found = parse(text, size, tools="gemma4", reasoning="gemma4", started=False)
        assert found == Split("rr", "Hm.", [("f", "{}"), ("f", "{}")])


def test_reasoning_arrives_as_soon_as_it_can_be_no_call() -> None:
    parser = make("hermes", "qwen3", started=True, marked=())
    assert parser.feed("I look") == [ReasoningDelta("I look")]
    assert parser.feed(" <tool_") == []
    assert parser.feed("box>") == [ReasoningDelta(" <tool_box>")]
    assert parser.feed(CALL) == parser.feed(" maybe") == []
    assert parser.feed("</think>Hi") == [ReasoningDelta(f"{CALL} maybe"), TextDelta("Hi")]
    assert parser.finish() == []
