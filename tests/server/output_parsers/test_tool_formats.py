"""Tool calls in the formats of many families, however the text is cut."""

import json

import pytest

from nanovllm.apps.server.output_parsers import tool_formats
from nanovllm.apps.server.output_parsers.parts import TextDelta, ToolCallArguments, ToolCallStart
from nanovllm.apps.server.output_parsers.tool_formats import find_tool_format
from nanovllm.options.sampling_params import TOKEN_MARK
from tests.server.output_parsers.helpers import Answer, check, make_parser, parse

F, G = '{"name": "f", "arguments": {"a": [1, "]"]}}', '{"name": "g", "arguments": {}}'
CALLS: Answer = [("f", '{"a": [1, "]"]}'), ("g", "{}")]

CASES: dict[str, list[tuple[str, Answer | None]]] = {
    "hermes": [
        (
            'Let me look.\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {"x" : "}</tool_call>\\""}}</tool_call>\nDone. ',
            ["Let me look.", ("f", "{}"), ("g", '{"x" : "}</tool_call>\\""}'), "Done. "],
        ),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
        (
            '<tool_call>{"id": [1], "name": "f", "parameters": {"a": 1}, "x": "}"}</tool_call>',
            [("f", '{"a": 1}')],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        (
            '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}, "id": 1}',
            [("f", "{}")],
        ),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}</tool_call>',
            [("f", '{"a": "\\n"}')],
        ),
        ('<tool_call>{"name": "f", "arguments": 12}</tool_call>', [("f", "12")]),
        (f"<tool_call>\n{F}\n{G}\n</tool_call>", CALLS),
        (f"<tool_call>{F[:-1]}</tool_call>tail", [CALLS[0], "tail"]),
        (" <tool_call> no </tool_call>", None),
        ('<tool_call>{"name": "f", "argum', None),
        ('<tool_call>{"name": 1, "arguments": {}}', None),
        ('<tool_call>{"name": "", "arguments": {}}', None),
        ('<tool_call>{"name": "f", "arguments": nope}', None),
        (f"<tool_call><tool_call>{F}</tool_call>", CALLS[:1]),
        (f"<tool_call>{F}\n<tool_call>\n", CALLS[:1]),
        ("Hm. <tool_call>", None),
        ("<tool_call> <tool_call> no", None),
        (f"<tool_call>{F}, {G}</tool_call>", CALLS),
        (f"<tool_call>{F};\n[{G}]</tool_call>", CALLS),
        (f"<tool_call>[{F} {G},]</tool_call>", CALLS),
        (f"<tool_call>{F}}}\n</tool_call>\n</tool_call> tail, {{", [CALLS[0], "tail, {"]),
    ],
    "llama3_json": [
        (
            '<|python_tag|>{"type": "function", "name": "f", "arguments": {}}; '
            '{"name": "g", "parameters": {"a": "é"}}',
            [("f", "{}"), ("g", '{"a": "é"}')],
        ),
        (
            'I call it:\n{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}};',
            ["I call it:", ("f", "{}"), ("g", "{}"), ";"],
        ),
        (f"[{F}, {G}]", CALLS),
        (f"I call it:\n<|python_tag|>[{F}], and", ["I call it:", CALLS[0], ", and"]),
        ('[{"name": "Ann", "age": 3}, {"name": "Ben"}]', None),
        ("\n[1] A book", None),
        ("[]", None),
        (
            '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}; '
            '{"function": {"parameters": {}, "name": "g"}}',
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        ('{"function": {"name": "f"}}', None),
        ('{"function": "f", "parameters": {}}', None),
        ('{"name": "Ann"}', None),
        ('See {"name": "f", "parameters": {}}', None),
        ("<|python_tag|>print(1)", None),
        ("\n{", None),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{F}, {G}]", CALLS),
        (
            'Hm. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}',
            ["Hm.", ("f", '{"a": 1}'), ("g", '{"b": 2}')],
        ),
        (
            '[TOOL_CALLS][TOOL_CALLS]f[ARGS][ARGS]{"a": 1}[TOOL_CALLS] g [ARGS] {}',
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (f"[TOOL_CALLS] [TOOL_CALLS][{F}]\n[TOOL_CALLS][{G}]", CALLS),
        ("[TOOL_CALLS]f[ARGS]", [("f", "{}")]),
        ("[TOOL_CALLS]f[ARGS] no", None),
        ("[TOOL_CALLS] [1, 2]", None),
        ("[TOOL_CALLS]f(1)", None),
        ("a [TOOL_CAL", None),
    ],
    "granite": [
        (f"Let me see.\n<|tool_call|><tool_call>[{F}]", ["Let me see.", CALLS[0]]),
        (f"<tool_call>[{F}]</tool_call>", CALLS[:1]),
        ("<|tool_call|> no", None),
    ],
    "phi4_mini_json": [
        (f"<|tool_call|>{F}<|/tool_call|><|tool_call|>{G}<|/tool_call|>", CALLS),
        ("from functools import cache\nfunctools[1]", None),
    ],
    "hunyuan_a13b": [
        ("<tool_call>g\n{}</tool_call>", CALLS[1:]),
        (f"<tool_calls><tool_call>{F}</tool_call></tool_calls>", CALLS[:1]),
        ("<tool_calls> none", None),
    ],
    "seed_oss": [
        (
            "<seed:tool_call><function=f><parameter=a>Rome\nItaly</parameter></function>",
            [("f", '{"a": "Rome\\nItaly"}')],
        ),
        (f"<seed:tool_call>{F}</seed:tool_call>", CALLS[:1]),
    ],
    "pythonic": [
        (
            " [f(a='x', b=[1, None], c={'d': True}), g()]",
            [("f", '{"a": "x", "b": [1, null], "c": {"d": true}}'), ("g", "{}")],
        ),
        (f"[{F}, {G}]", CALLS),
        ("<|python_tag|>[g()]", CALLS[1:]),
        ("[1, 2]", None),
        ("[a link](http://a)", None),
        ('[{"name": "Ann", "age": 3}]', None),
        ("See [g()]", None),
    ],
    "olmo3": [
        (
            "<function_calls>\nf(a='it's')\nf(a='print('x')\nprint('y')')\ng()\n</function_calls>",
            [("f", '{"a": "it\'s"}'), ("f", "{\"a\": \"print('x')\\nprint('y')\"}"), ("g", "{}")],
        ),
        (f"So:<function_calls>\n{F}\n{G}\n</function_calls>", ["So:", *CALLS]),
        ("<function_calls> none", None),
    ],
    "minicpm3": [
        (
            "<|tool_call_start|>\n```python\nf(a='x',b=True)\ng()\n```\n<|tool_call_end|>\nSo.",
            [("f", '{"a": "x", "b": true}'), ("g", "{}"), "So."],
        ),
        ("<|tool_call_start|>\n```python\n1 + 2\n```", None),
    ],
    "glm45": [
        (
            "<tool_call>f<arg_key>a</arg_key><arg_value></tool_call></arg_value><arg_key>b"
            "</arg_key><arg_value>1\n<arg_key>c</arg_key><arg_value></arg_value></tool_call>"
            f"<tool_call>{G}</tool_call>",
            [("f", '{"a": "</tool_call>", "b": "1", "c": ""}'), ("g", "{}")],
        ),
        ('<tool_call>f\n{"a": 1}</tool_call>', [("f", '{"a": 1}')]),
        ("<tool_call> is a tag", None),
        ("<tool_call>f", None),
    ],
    "minimax_m2": [
        (f"<minimax:tool_call>\n{F}\n</minimax:tool_call> Done.", [CALLS[0], "Done."]),
        ("<minimax:tool_call> none", None),
    ],
    "deepseek_v3": [
        ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": [1, "]"]}<｜tool▁call▁end｜>', CALLS[:1]),
        ("<｜tool▁calls▁begin｜> none", None),
        (
            '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [("f", '{"a": "x}'), ("g", "{}")],
        ),
    ],
    "kimi_k2": [("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0 x", None)],
}
BROKEN: list[tuple[str, str, Answer]] = [
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": "x}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>Done.",
        [("f", '{"a": "x}'), ("g", "{}"), "Done."],
    ),
    (
        "kimi_k2",
        "<|tool_call_begin|>f<|tool_call_argument_begin|>{"
        '"a": [1, {}<|tool_call_end|><|tool_call_begin|>g<|tool_call_argument_begin|>{"a": "x}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [("f", '{"a": [1, {}'), ("g", '{"a": "x}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> x}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"a": "x}}</tool_call>',
        [("f", '{"a": "</tool_call> x}}'), ("g", '{"a": "x}}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>{\\"b\\""}}'
        "</tool_call>",
        [("f", '{"a": "</tool_call><tool_call>{\\"b\\""}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')]),
    (
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {"a": 1,<tool_call>x',
        [("f", '{"a": 1,'), "<tool_call>x"],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": [1, [2], [TOOL_CALLS]g[ARGS]{}',
        [("f", '{"a": [1, [2], '), ("g", "{}")],
    ),
]
"""Calls whose JSON is not ended where the call is. One call ends and the next begins all the same:
symptom: the string of the first swallows the second."""
ALL = [(form, text, answer) for form, cases in CASES.items() for text, answer in cases]


@pytest.mark.parametrize(("form", "text", "answer"), [*ALL, *BROKEN])
def test_formats(form: str, text: str, answer: Answer | None) -> None:
    """None stands for text that is not a call and comes out unchanged."""
    expected = [text] if answer is None else answer
    for size in (1, 2, 3, 7, len(text)):
        assert parse(form, [text[i : i + size] for i in range(0, len(text), size)]) == expected


@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        (form, text, answer)
        for form, text, answer in ALL
        # In these a bracket alone may begin a call, and it may be text.
        if answer and ("<|python_tag|>" in text or form not in ("llama3_json", "pythonic"))
    ],
)
def test_nothing_of_a_call_that_is_cut_off_is_text(form: str, text: str, answer: Answer) -> None:
    whole = "".join(item for item in answer if isinstance(item, str))
    for end in range(len(text)):
        found = parse(form, [text[:end]], cut=True)
        said = "".join(item for item in found if isinstance(item, str))
        assert whole.startswith(said.rstrip()), text[:end]


def test_text_that_is_cut_off_stays() -> None:
    for text in ('{"name": "An', "a < b", "a\n", '\n{"name": "Ann"'):
        assert parse("llama3_json", [text], cut=True) == [text]
    assert parse("hermes", ["a <b>", "\n<tool"], cut=True) == ["a <b>"]


def test_a_token_ends_the_call_whatever_the_string_is() -> None:
    _, _, begin, end, separator = (TOKEN_MARK + tag for tag in tool_formats.KIMI.tags)
    text = f'{begin}f{separator}{{"a": "<|tool_call_end|>{end}Hm. {begin}g{separator}{{}}{end}'
    answer = parse("kimi_k2", list(text), marked=None)
    assert answer == [("f", '{"a": "<|tool_call_end|>'), "Hm.", ("g", "{}")]


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
def test_a_call_that_is_written_again_after_its_end(rest: str, answer: str) -> None:
    """Symptom: LFM2's answer has the call's source as its text."""
    expected: Answer = [("f", '{"a": "x"}'), *([answer] if answer else [])]
    check("lfm2", f"<|tool_call_start|>[f(a='x')]<|tool_call_end|>{rest}", expected)


@pytest.mark.parametrize("indent", [None, 2])
def test_arguments_are_the_source_text(indent: int | None) -> None:
    value = {"a": [1.5e300, {"é\n\u2028": '}]\\"</tool_call>🌧'}, None, True], "": {}}
    for is_ascii in (False, True):
        source = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
        for members in (
            f'"name": "f", "arguments": {source}',
            f'"arguments": {source}, "name": "f"',
        ):
            check("hermes", f"<tool_call>\n{{{members}}}\n</tool_call>", [("f", source)])
            check("llama3_json", f"{{{members}}}", [("f", source)])


def test_pieces_arrive_as_soon_as_they_are_certain() -> None:
    parser = make_parser("hermes")
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


def test_call_ids() -> None:
    """Mistral's chat templates refuse ids of another length than 9."""
    (start, _) = make_parser("mistral").feed("[TOOL_CALLS]f{")
    assert isinstance(start, ToolCallStart)
    assert len(start.call_id) == 9
    assert start.call_id.isalnum()
    (start, _) = make_parser("mistral").feed("[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{")
    assert isinstance(start, ToolCallStart)
    assert start.call_id == "abcdef123"
    call = "<|tool_call_begin|>functions.a.b:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    first, _, second, _ = make_parser("kimi_k2").feed(f"{call}{call}")
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
