"""Tool calls of Granite, Phi-4-mini, HunYuan, Seed-OSS, FunctionGemma, Llama 3.2 and Olmo 3."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.server.answers.json_calls import GraniteParser, HunYuanParser, Phi4Parser
from nanovllm.server.answers.literal_calls import FunctionGemmaParser
from nanovllm.server.answers.pythonic_calls import LlamaPythonicParser, OlmoParser
from nanovllm.server.answers.tagged_calls import SeedParser
from nanovllm.server.answers.tool_calls import ToolCallParser
from tests.server.answers.test_tool_formats import Answer, cut, joined, parse

F, G = '{"name": "f", "arguments": {"a": [1, "]"]}}', '{"name": "g", "arguments": {}}'
CALLS: Answer = [("f", '{"a": [1, "]"]}'), ("g", "{}")]

CASES: list[tuple[type[ToolCallParser], str, Answer | None]] = [
    (GraniteParser, f"<|tool_call|>[{F}, {G}]", CALLS),
    (GraniteParser, f"Let me see.\n<|tool_call|><tool_call>[{F}]", ["Let me see.", CALLS[0]]),
    (GraniteParser, f"<tool_call>[{F}]</tool_call>", CALLS[:1]),
    (GraniteParser, "<|tool_call|> no", None),
    (Phi4Parser, f"functools[{F}, {G}]", CALLS),
    (Phi4Parser, f"<|tool_call|>[{F}]<|/tool_call|>", CALLS[:1]),
    (Phi4Parser, f"<|tool_call|>{F}<|/tool_call|><|tool_call|>{G}<|/tool_call|>", CALLS),
    (Phi4Parser, "from functools import cache\nfunctools[1]", None),
    (HunYuanParser, f"<tool_calls>[{F}, {G}]</tool_calls>", CALLS),
    (
        HunYuanParser,
        '<tool_calls>\n<tool_call>f\n```json\n{"a": [1, "]"]}\n```</tool_call>\n'
        "<tool_call>g\n```json\n{}\n```</tool_call>\n</tool_calls>So.",
        [*CALLS, "So."],
    ),
    (HunYuanParser, "<tool_call>g\n{}</tool_call>", CALLS[1:]),
    (HunYuanParser, f"<tool_calls><tool_call>{F}</tool_call></tool_calls>", CALLS[:1]),
    (HunYuanParser, "<tool_calls> none", None),
    (
        SeedParser,
        "<seed:tool_call>\n<function=f>\n<parameter=a>Rome\nItaly</parameter>\n</function>\n"
        "</seed:tool_call>",
        [("f", '{"a": "Rome\\nItaly"}')],
    ),
    (SeedParser, f"<seed:tool_call>{F}</seed:tool_call>", CALLS[:1]),
    (
        FunctionGemmaParser,
        "<start_function_call>call:f{a:<escape>x, {y}<escape>,b:[1,true]}<end_function_call>"
        "<start_function_call>call:g{}<end_function_call>",
        [("f", '{"a": "x, {y}", "b": [1, true]}'), ("g", "{}")],
    ),
    (
        LlamaPythonicParser,
        " [f(a='x', b=[1, None], c={'d': True}), g()]",
        [("f", '{"a": "x", "b": [1, null], "c": {"d": true}}'), ("g", "{}")],
    ),
    (LlamaPythonicParser, f"[{F}, {G}]", CALLS),
    (
        OlmoParser,
        "<function_calls>\nf(a='it's')\nf(a='print('x')\nprint('y')')\ng()\n</function_calls>",
        [("f", '{"a": "it\'s"}'), ("f", "{\"a\": \"print('x')\\nprint('y')\"}"), ("g", "{}")],
    ),
    (LlamaPythonicParser, "<|python_tag|>[g()]", CALLS[1:]),
    (LlamaPythonicParser, "[1, 2]", None),
    (LlamaPythonicParser, "[a link](http://a)", None),
    (LlamaPythonicParser, '[{"name": "Ann", "age": 3}]', None),
    (LlamaPythonicParser, "See [g()]", None),
    (
        OlmoParser,
        "<function_calls>\nf(a='x', b=null)\ng()\n</function_calls>",
        [("f", '{"a": "x", "b": null}'), ("g", "{}")],
    ),
    (OlmoParser, f"So:<function_calls>\n{F}\n{G}\n</function_calls>", ["So:", *CALLS]),
    (OlmoParser, "<function_calls> none", None),
]


@pytest.mark.parametrize(("kind", "text", "answer"), CASES)
def test_formats(kind: type[ToolCallParser], text: str, answer: Answer | None) -> None:
    """None stands for text that is no call and comes out unchanged."""
    expected = [text] if answer is None else answer
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert parse(kind, pieces) == expected


@pytest.mark.parametrize(("kind", "text", "answer"), [case for case in CASES if case[2]])
def test_nothing_of_a_call_that_is_cut_off_is_text(
    kind: type[ToolCallParser], text: str, answer: Answer
) -> None:
    if kind is LlamaPythonicParser and not text.startswith(kind.tag):
        return  # it has no tag: a bracket may be text
    whole = "".join(item for item in answer if isinstance(item, str))
    for end in range(len(text)):
        for pieces in ([text[:end]], list(text[:end])):
            said = "".join(item for item in parse(kind, pieces, cut=True) if isinstance(item, str))
            assert whole.startswith(said.rstrip()), text[:end]


def test_types_of_seed_oss_come_from_the_schema() -> None:
    parameters = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    parser = SeedParser((), [SimpleNamespace(name="f", parameters=parameters)])
    text = "<seed:tool_call><function=f><parameter=a>5</parameter><parameter=b>5</parameter>"
    parts = parser.feed(f"{text}</function></seed:tool_call>") + parser.finish(cut=False)
    assert joined(parts) == [("f", '{"a": 5, "b": "5"}')]


FRAGMENTS = [
    *(
        "<|tool_call|>",
        "<|/tool_call|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_calls>",
        "functools[",
    ),
    *(
        "</tool_calls>",
        "<seed:tool_call>",
        "<function=f>",
        "<parameter=a>",
        "</function>",
        "```json",
    ),
    *(
        "<start_function_call>",
        "call:f{",
        "<escape>",
        "<end_function_call>",
        "<function_calls>",
        "[",
    ),
    *(
        '{"name": "f", "arguments": {',
        "f(a=",
        "g()",
        "}",
        "]",
        ")",
        ",",
        '"',
        "'",
        "\n",
        " ",
        "1",
        "x",
    ),
]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted({case[0] for case in CASES}, key=lambda kind: kind.__name__)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join),
    st.lists(st.integers(1, 9), max_size=40),
    st.booleans(),
)
def test_any_cut_gives_the_same(
    kind: type[ToolCallParser], text: str, sizes: list[int], is_cut: bool
) -> None:
    whole = parse(kind, [text], cut=is_cut)
    assert parse(kind, cut(text, sizes), cut=is_cut) == whole
    assert parse(kind, list(text), cut=is_cut) == whole
