"""Tool calls in the formats of many families, however the text is cut."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.apps.server.output_parsers import tool_formats
from nanovllm.apps.server.output_parsers.json_calls import (
    CohereParser,
    DeepSeekParser,
    GraniteParser,
    HermesParser,
    HunYuanParser,
    KimiParser,
    LlamaParser,
    MistralParser,
    NemotronParser,
    Phi4Parser,
)
from nanovllm.apps.server.output_parsers.literal_calls import FunctionGemmaParser
from nanovllm.apps.server.output_parsers.parts import TextDelta, ToolCallArguments, ToolCallStart
from nanovllm.apps.server.output_parsers.pythonic_calls import (
    LlamaPythonicParser,
    MiniCpmParser,
    OlmoParser,
    PythonicParser,
)
from nanovllm.apps.server.output_parsers.tagged_calls import GlmParser, InvokeParser, SeedParser
from nanovllm.apps.server.output_parsers.template_marks import find_tool_format
from nanovllm.apps.server.output_parsers.tool_calls import ToolCallParser
from nanovllm.options.sampling_params import TOKEN_MARK
from tests.every_case import examples
from tests.server.output_parsers.helpers import Answer, cut, joined, parse

F, G = '{"name": "f", "arguments": {"a": [1, "]"]}}', '{"name": "g", "arguments": {}}'
CALLS: Answer = [("f", '{"a": [1, "]"]}'), ("g", "{}")]

CASES: list[tuple[type[ToolCallParser], str, Answer | None]] = [
    (
        HermesParser,
        '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}</tool_call>\\""}]}}\n'
        "</tool_call>",
        [("f", '{"a": [1, {"b": "}</tool_call>\\""}]}')],
    ),
    (
        HermesParser,
        'Let me look.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"x" : 1}}</tool_call>\nDone. ',
        ["Let me look.", ("f", "{}"), ("g", '{"x" : 1}'), "Done. "],
    ),
    (HermesParser, '<tool_call>{"arguments": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
    (
        HermesParser,
        '<tool_call>{"id": [1], "name": "f", "parameters": {"a": 1}, "x": "}"}</tool_call>',
        [("f", '{"a": 1}')],
    ),
    (HermesParser, '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    (
        HermesParser,
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}, "id": 1}',
        [("f", "{}")],
    ),
    (HermesParser, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}</tool_call>',
        [("f", '{"a": "\\n"}')],
    ),
    (HermesParser, '<tool_call>{"name": "f", "arguments": 12}</tool_call>', [("f", "12")]),
    (
        HermesParser,
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>',
        [("f", "{}"), ("g", "{}")],
    ),
    (
        HermesParser,
        '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n</tool_call>',
        [("f", "{}"), ("g", "{}")],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>tail',
        [("f", '{"a": 1}'), "tail"],
    ),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')]),
    (HermesParser, " <tool_call> no </tool_call>", [" <tool_call> no </tool_call>"]),
    (HermesParser, '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    (HermesParser, '<tool_call>{"name": 1, "arguments": {}}', None),
    (HermesParser, '<tool_call>{"name": "", "arguments": {}}', None),
    (HermesParser, '<tool_call>{"name": "f", "arguments": nope}', None),
    (
        HermesParser,
        '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [("f", "{}")],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>\n',
        [("f", "{}")],
    ),
    (HermesParser, "Hm. <tool_call>", None),
    (HermesParser, "<tool_call> <tool_call> no", ["<tool_call> <tool_call> no"]),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}</tool_call>',
        [("f", "{}"), ("g", "{}")],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {}};\n[{"name": "g", "arguments": {}}]</tool_call>',
        [("f", "{}"), ("g", "{}")],
    ),
    (
        HermesParser,
        '<tool_call>[{"name": "f", "arguments": {}} {"name": "g", "arguments": {}},]</tool_call>',
        [("f", "{}"), ("g", "{}")],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>\n</tool_call> tail, {',
        [("f", "{}"), "tail, {"],
    ),
    (LlamaParser, '{"name": "f", "parameters": {"a": "é"}}', [("f", '{"a": "é"}')]),
    (
        LlamaParser,
        '<|python_tag|>{"type": "function", "name": "f", "arguments": {}}; '
        '{"name": "g", "parameters": {}}',
        [("f", "{}"), ("g", "{}")],
    ),
    (
        LlamaParser,
        'I call it:\n{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}};',
        ["I call it:", ("f", "{}"), ("g", "{}"), ";"],
    ),
    (
        LlamaParser,
        '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        LlamaParser,
        'I call it:\n<|python_tag|>[{"name": "f", "parameters": {}}], and',
        ["I call it:", ("f", "{}"), ", and"],
    ),
    (LlamaParser, '[{"name": "Ann", "age": 3}, {"name": "Ben"}]', None),
    (LlamaParser, "\n[1] A book", None),
    (LlamaParser, "[]", None),
    (
        LlamaParser,
        '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}; '
        '{"function": {"parameters": {}, "name": "g"}}',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (LlamaParser, '{"function": {"name": "f"}}', None),
    (LlamaParser, '{"function": "f", "parameters": {}}', None),
    (LlamaParser, '{"name": "Ann", "age": 3}', None),
    (LlamaParser, '{"name": "Ann"}', None),
    (LlamaParser, 'See {"name": "f", "parameters": {}}', None),
    (LlamaParser, "<|python_tag|>print(1)", None),
    (LlamaParser, "\n{", None),
    (
        MistralParser,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        [("f", '{"a": "]"}'), ("g", "{}")],
    ),
    (
        MistralParser,
        'Hm. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}',
        ["Hm.", ("f", '{"a": 1}'), ("g", '{"b": 2}')],
    ),
    (MistralParser, '[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
    (
        MistralParser,
        '[TOOL_CALLS][TOOL_CALLS]f[ARGS][ARGS]{"a": 1}[TOOL_CALLS] g [ARGS] {}',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        MistralParser,
        '[TOOL_CALLS] [TOOL_CALLS][{"name": "f", "arguments": {}}]\n'
        '[TOOL_CALLS][{"name": "g", "arguments": {}}]',
        [("f", "{}"), ("g", "{}")],
    ),
    (MistralParser, "[TOOL_CALLS]f[ARGS]", [("f", "{}")]),
    (MistralParser, "[TOOL_CALLS]f[ARGS] no", None),
    (MistralParser, "[TOOL_CALLS] [1, 2]", None),
    (MistralParser, "[TOOL_CALLS]f(1)", None),
    (MistralParser, "a [TOOL_CAL", None),
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
    (
        GlmParser,
        "So:\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>it's\n</arg_value>\n</tool_call>"
        "<tool_call>g</tool_call>",
        ["So:", ("f", '{"a": "it\'s\\n"}'), ("g", "{}")],
    ),
    (
        GlmParser,
        "<tool_call>f<arg_key>a</arg_key><arg_value></tool_call></arg_value><arg_key>b</arg_key>"
        f"<arg_value>1\n<arg_key>c</arg_key><arg_value></arg_value></tool_call><tool_call>{G}</tool_call>",
        [("f", '{"a": "</tool_call>", "b": "1", "c": ""}'), ("g", "{}")],
    ),
    (GlmParser, '<tool_call>f\n{"a": 1}</tool_call>', [("f", '{"a": 1}')]),
    (GlmParser, "<tool_call> is a tag", None),
    (GlmParser, "<tool_call>f", None),
    (
        InvokeParser,
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x\n</parameter>\n</invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        [("f", '{"a": "x\\n"}'), ("g", "{}")],
    ),
    (InvokeParser, f"<minimax:tool_call>\n{F}\n</minimax:tool_call> Done.", [CALLS[0], "Done."]),
    (InvokeParser, "<minimax:tool_call> none", None),
    (NemotronParser, f"So. <TOOLCALL>[{F}, {G}]</TOOLCALL>", ["So.", *CALLS]),
    (
        CohereParser,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": '
        '{"a": [1, "]"]}},\n    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n'
        "]<|END_ACTION|>",
        CALLS,
    ),
    (
        DeepSeekParser,
        "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": [1, "]"]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ["So.", *CALLS],
    ),
    (
        DeepSeekParser,
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": [1, "]"]}<｜tool▁call▁end｜>',
        CALLS[:1],
    ),
    (DeepSeekParser, "<｜tool▁calls▁begin｜> none", None),
    (
        KimiParser,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": [1, "]"]}<|tool_call_end|><|tool_call_begin|>g<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        CALLS,
    ),
    (KimiParser, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0 x", None),
    (
        MiniCpmParser,
        "<|tool_call_start|>\n```python\nf(a='x',b=True)\ng()\n```\n<|tool_call_end|>\nSo.",
        [("f", '{"a": "x", "b": true}'), ("g", "{}"), "So."],
    ),
    (MiniCpmParser, "<|tool_call_start|>\n```python\n1 + 2\n```", None),
]
BROKEN: list[tuple[type[ToolCallParser], str, Answer]] = [
    (
        KimiParser,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": "x}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>Done.",
        [("f", '{"a": "x}'), ("g", "{}"), "Done."],
    ),
    (
        KimiParser,
        "<|tool_call_begin|>f<|tool_call_argument_begin|>{"
        '"a": [1, {}<|tool_call_end|><|tool_call_begin|>g<|tool_call_argument_begin|>{"a": "x}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [("f", '{"a": [1, {}'), ("g", '{"a": "x}')],
    ),
    (
        DeepSeekParser,
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("f", '{"a": "x}'), ("g", "{}")],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> x}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"a": "x}}</tool_call>',
        [("f", '{"a": "</tool_call> x}}'), ("g", '{"a": "x}}')],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>{\\"b\\""}}'
        "</tool_call>",
        [("f", '{"a": "</tool_call><tool_call>{\\"b\\""}')],
    ),
]
"""Calls whose JSON is not ended where the call is. One call ends and the next begins all the same:
symptom: the string of the first swallows the second."""


@pytest.mark.parametrize(("kind", "text", "answer"), BROKEN)
def test_json_that_is_not_ended_ends_with_its_call(
    kind: type[ToolCallParser], text: str, answer: Answer
) -> None:
    for size in (1, 2, 7, len(text)):
        assert parse(kind, cut(text, [size] * (len(text) // size))) == answer


def test_a_token_ends_the_call_whatever_the_string_is() -> None:
    parser = KimiParser((*KimiParser.call_tags, KimiParser.separator))
    begin, end = (TOKEN_MARK + tag for tag in KimiParser.call_tags)
    separator = TOKEN_MARK + KimiParser.separator
    text = f'{begin}f{separator}{{"a": "<|tool_call_end|>{end}Hm. {begin}g{separator}{{}}{end}'
    parts = [part for character in text for part in parser.feed(character)]
    answer = joined(parts + parser.finish(cut=False))
    assert answer == [("f", '{"a": "<|tool_call_end|>'), "Hm.", ("g", "{}")]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("rest", "answer"),
    [
        ("[f(a='x')]", ""),
        ("\n[f(a='x')]<|tool_call_end|>\nDone.", "Done."),
        ("[f(a='x')][f(a='x')] Done.", "Done."),
        ("[f(a='x', b=1)]", "[f(a='x', b=1)]"),
        ("[f(a=", "[f(a="),
    ],
)
def test_a_call_that_is_written_again_after_its_end(rest: str, answer: str, size: int) -> None:
    """Symptom: LFM2's answer has the call's source as its text."""
    text = f"<|tool_call_start|>[f(a='x')]<|tool_call_end|>{rest}"
    expected: Answer = [("f", '{"a": "x"}'), *([answer] if answer else [])]
    assert parse(PythonicParser, cut(text, [size] * (len(text) // size))) == expected


WITHOUT_TAGS = (LlamaParser, LlamaPythonicParser)
"""Formats in which a call may begin with a bracket alone, which may be text."""


@pytest.mark.parametrize(("kind", "text", "answer"), CASES)
def test_formats(kind: type[ToolCallParser], text: str, answer: Answer | None) -> None:
    """None stands for text that is not a call and comes out unchanged."""
    expected = [text] if answer is None else answer
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert parse(kind, pieces) == expected


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        (kind, text, answer)
        for kind, text, answer in CASES
        if answer
        and any(isinstance(item, tuple) for item in answer)
        and (kind.tag in text or kind not in WITHOUT_TAGS)
    ],
)
def test_nothing_of_a_call_that_is_cut_off_is_text(
    kind: type[ToolCallParser], text: str, answer: Answer
) -> None:
    whole = "".join(item for item in answer if isinstance(item, str))
    for end in range(len(text)):
        for pieces in ([text[:end]], list(text[:end])):
            found = parse(kind, pieces, cut=True)
            said = "".join(item for item in found if isinstance(item, str))
            assert whole.startswith(said.rstrip()), text[:end]


def test_text_that_is_cut_off_stays() -> None:
    for text in ('{"name": "An', "a < b", "a\n", '\n{"name": "Ann"'):
        assert parse(LlamaParser, [text], cut=True) == [text]
    assert parse(HermesParser, ["a <b>", "\n<tool"], cut=True) == ["a <b>"]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]x"),
    *('{"name": "f", "arguments": {', '{"name": "g", "parameters": "', '"name": "h"', "}", '"'),
    *("{", "[", "]", ",", ":", ";", "\\", "\n", " ", "null", "1", "a", "é", "<", "<tool", "[TOOL"),
    *(
        "<|tool_call|>",
        "<|/tool_call|>",
        "<tool_calls>",
        "functools[",
        "</tool_calls>",
        "<seed:tool_call>",
        "<function=f>",
        "<parameter=a>",
        "</function>",
        "```json",
        "<start_function_call>",
        "call:f{",
        "<escape>",
        "<end_function_call>",
        "<function_calls>",
        "f(a=",
        "g()",
        ")",
        "'",
        "x",
        "<arg_key>a</arg_key>",
        "<arg_value>",
        "</arg_value>",
        '<invoke name="f">',
        '<parameter name="a">',
        "</invoke>",
        "<TOOLCALL>",
        "<|START_ACTION|>",
        '{"tool_name": "f", "parameters": {',
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "f<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.f:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_start|>```python\n",
    ),
]


@settings(max_examples=examples(500), deadline=None)
@given(
    st.sampled_from(sorted({case[0] for case in CASES}, key=lambda kind: kind.__name__)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join),
    st.lists(st.integers(1, 9), max_size=40),
    st.booleans(),
)
def test_any_cut_gives_the_same(
    kind: type[ToolCallParser], text: str, sizes: list[int], is_cut: bool
) -> None:
    whole = parse(kind, [text], cut=is_cut)
    assert parse(kind, cut(text, sizes), cut=is_cut) == whole
    assert parse(kind, list(text), cut=is_cut) == whole


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from([HermesParser, LlamaParser, MistralParser]),
    st.lists(st.sampled_from([f for f in FRAGMENTS if f not in "{"]), max_size=30).map("".join),
)
def test_nothing_is_lost(kind: type[ToolCallParser], text: str) -> None:
    """Text that no call begins in comes out as it went in."""
    answer = parse(kind, [text])
    if not any(isinstance(item, tuple) for item in answer):
        assert "".join(map(str, answer)) == text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.dictionaries(st.text(), JSON_VALUES, max_size=4),
    st.sampled_from([None, 2]),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 9), max_size=40),
)
def test_arguments_are_the_source_text(
    arguments: object, indent: int | None, is_ascii: bool, name_first: bool, sizes: list[int]
) -> None:
    source = json.dumps(arguments, indent=indent, ensure_ascii=is_ascii)
    for kind, form in (
        (HermesParser, "<tool_call>\n{%s}\n</tool_call>"),
        (LlamaParser, "{%s}"),
        (MistralParser, "[TOOL_CALLS] [{%s}]"),
    ):
        members = ['"name": "f"', f'"arguments": {source}']
        text = form % ", ".join(members if name_first else members[::-1])
        assert parse(kind, cut(text, sizes)) == [("f", source)]


def test_pieces_arrive_as_soon_as_they_are_certain() -> None:
    parser = HermesParser()
    assert parser.feed("Let me") == [TextDelta("Let me")]
    assert parser.feed(" see <to") == [TextDelta(" see")]
    assert parser.feed("ol_box>") == [TextDelta(" <tool_box>")]
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    start, piece = parser.feed('{"a": "b')
    assert isinstance(start, ToolCallStart)
    assert start.name == "f"
    assert piece == ToolCallArguments(0, '{"a": "b')
    assert parser.feed(' c"') == [ToolCallArguments(0, ' c"')]
    assert parser.feed("}}\n</tool") == [ToolCallArguments(0, "}")]
    assert parser.feed("_call>") == parser.finish(cut=False) == []


def test_types_of_seed_oss_come_from_the_schema() -> None:
    parameters = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    parser = SeedParser((), [SimpleNamespace(name="f", parameters=parameters)])
    text = "<seed:tool_call><function=f><parameter=a>5</parameter><parameter=b>5</parameter>"
    parts = parser.feed(f"{text}</function></seed:tool_call>") + parser.finish(cut=False)
    assert joined(parts) == [("f", '{"a": 5, "b": "5"}')]


def test_call_ids() -> None:
    """Mistral's chat templates refuse ids of another length than 9."""
    (start, _) = MistralParser().feed("[TOOL_CALLS]f{")
    assert isinstance(start, ToolCallStart)
    assert len(start.call_id) == 9
    assert start.call_id.isalnum()
    (start, _) = MistralParser().feed("[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{")
    assert isinstance(start, ToolCallStart)
    assert start.call_id == "abcdef123"
    call = "<|tool_call_begin|>functions.a.b:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    first, _, second, _ = KimiParser().feed(f"{call}{call}")
    assert isinstance(first, ToolCallStart)
    assert isinstance(second, ToolCallStart)
    assert first.name == second.name == "a.b"
    assert first.call_id == "functions.a.b:7" != second.call_id  # two of a client must differ


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>", "HERMES"),
        ("{% if tools %}<tool_call><function=", "TAGGED"),
        ("{% if tools %}<tool_call><arg_key>", "GLM"),
        ("{% if tools %}<tool_call><tool_sep>", None),
        ("{% if tools %}List of tools: [", "PYTHONIC"),
        ("{% if tools %}<|tool_list_start|>[", "PYTHONIC"),
        ("{% if tools %}<|tool_call_start|>{{ '[' + calls[func_name + '('", "PYTHONIC"),
        ("{% if tools %}<|python_tag|>", "LLAMA"),
        ('<|start_header_id|>{% if tools %}{"name": x, "parameters": y}', "LLAMA"),
        ("{% if tools %}[TOOL_CALLS] [", "MISTRAL"),
        ("{% if tools %}[TOOL_CALLS]x[ARGS]", "MISTRAL_ARGS"),
        ("{% if tools %}<|tool_call>call:", "GEMMA4"),
        ("<|channel|>analysis<|message|>", "HARMONY"),
        ("{{ messages }}", "HERMES"),
        (None, "HERMES"),
    ],
)
def test_the_template_shows_the_format(template: str | None, name: str | None) -> None:
    found = find_tool_format(template)
    assert found is (None if name is None else getattr(tool_formats, name))
