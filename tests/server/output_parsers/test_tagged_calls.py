"""Calls of Qwen 3.5 become JSON by the types of their function, however the text is cut."""

import json
from typing import Any

import pytest

from nanovllm.apps.server.output_parsers.parts import ToolCallArguments, ToolCallStart
from nanovllm.apps.server.output_parsers.tagged_calls import as_json
from nanovllm.apps.server.protocol import Tool
from tests.server.output_parsers.helpers import Answer, check, make_parser, parse

SCHEMA: dict[str, Any] = {
    "$defs": {
        "City": {"type": "object", "properties": {"name": {"type": "string"}}},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}, {"type": "null"}]},
    },
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "l": {"items": {"type": "integer"}},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "any": {"type": ["string", "integer"]},
        "city": {"$ref": "#/$defs/City"},
        "loop": {"$ref": "#/$defs/Loop"},
        "one": {"enum": [1, 2, "x"]},
        "odd": True,
        "far": {"$ref": "elsewhere#/x"},
    },
}
FUNCTIONS = [
    Tool.model_construct(name="f", parameters=SCHEMA),
    Tool.model_construct(name="g", parameters=None),
]


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def call(*parameters: str, name: str = "f") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call(name="g"), [("g", "{}")]),
        (
            f"Let me see.\n\n{call(parameter('s', 'Rome'), parameter('i', '3'))}\n{call(name='g')}",
            ["Let me see.", ("f", '{"s": "Rome", "i": 3}'), ("g", "{}")],
        ),
        (
            call(parameter("s", 'a\n\n"b" \\ <b>é🌧</b>\n')),
            [("f", '{"s": "a\\n\\n\\"b\\" \\\\ <b>é🌧</b>\\n"}')],
        ),
        (call("<parameter=s>x</parameter>"), [("f", '{"s": "x"}')]),
        (call(parameter("s", "5"), parameter("x", "5")), [("f", '{"s": "5", "x": "5"}')]),
        (call(parameter("i", "5"), name="h"), [("h", '{"i": "5"}')]),
        (
            call(parameter("s", "close with </parameter> or </function>")),
            [("f", '{"s": "close with </parameter> or </function>"}')],
        ),
        # What the model forgets, or adds.
        ("<function=f>\n<parameter=s>\nx\n</parameter>\n</function>", [("f", '{"s": "x"}')]),
        (f"Hm.{call(parameter('s', 'x'))[11:]}", ["Hm.", ("f", '{"s": "x"}')]),
        (
            "<tool_call><function=f><parameter=s>\nx\n<parameter=i>\n2\n</function></tool_call>",
            [("f", '{"s": "x", "i": 2}')],
        ),
        ("<tool_call><function=f><parameter=s>\nx</parameter></tool_call>", [("f", '{"s": "x"}')]),
        ("<tool_call>\n<function=f>\n<parameter=s>\nx\n", [("f", '{"s": "x"}')]),
        ("<tool_call>\n<function=f>\n<parameter=i>\n2", [("f", '{"i": 2}')]),
        ("<tool_call><function=f>so: <parameter=i>2</parameter></function>", [("f", '{"i": 2}')]),
        ("<tool_call><function=f><parameter=\n<parameter=i>2</parameter>", [("f", '{"i": 2}')]),
        ("<tool_call><function=f></function><function=g></function>", [("f", "{}"), ("g", "{}")]),
        (f"<tool_call><function=f>{call(name='g')}", [("f", "{}"), ("g", "{}")]),
        (
            "<tool_call><function=f><parameter=s>x</parameter><tool_call><function=g></function>",
            [("f", '{"s": "x"}'), ("g", "{}")],
        ),
        (
            "<function=f><parameter=s>\nx\n</parameter>\n<function=g>\n</function>",
            [("f", '{"s": "x"}'), ("g", "{}")],
        ),
        ("<function=f>oh<function=g></function>", [("f", "{}"), ("g", "{}")]),
        ("""<function="f"><parameter='s'>x</parameter></function>""", [("f", '{"s": "x"}')]),
        (
            '<tool_call>\n<function=f>\n{"i": 3}\n</function>\n</tool_call> So.',
            [("f", '{"i": 3}'), "So."],
        ),
        ('<tool_call>{"name": "f", "arguments": {"i": "3"}}</tool_call>', [("f", '{"i": "3"}')]),
        # None at all.
        ("<tool_call> no </tool_call>", ["<tool_call> no </tool_call>"]),
        ("<tool_call><function=>", ["<tool_call><function=>"]),
        ("<function=a\nb>", ["<function=a\nb>"]),
        ("a <func", ["a <func"]),
    ],
)
def test_calls(text: str, answer: Answer) -> None:
    check("qwen3_coder", text, answer, functions=FUNCTIONS)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("i", "-7", "-7"),
        ("i", " 7 ", "7"),
        ("i", '"7"', "7"),
        ("i", "7.5", '"7.5"'),
        ("i", "07", '"07"'),
        ("i", "1٣", '"1٣"'),
        ("i", "seven", '"seven"'),
        ("i", "9" * 5000, "9" * 5000),
        ("n", "7", "7"),
        ("n", "1.5e-3", "1.5e-3"),
        ("n", "NaN", '"NaN"'),
        ("b", "True", "true"),
        ("b", "false", "false"),
        ("b", "1", '"1"'),
        ("o", '{"a": [1, "x"]}', '{"a": [1, "x"]}'),
        ("o", '{"a": NaN}', '"{\\"a\\": NaN}"'),
        ("o", "{'a': None, 'b': ('x', True)}", '{"a": null, "b": ["x", true]}'),
        ("o", "{'a': nothing}", "\"{'a': nothing}\""),
        ("o", "['a']", "\"['a']\""),
        ("o", "{'a': 1e999}", "\"{'a': 1e999}\""),
        ("o", "{'a': '\\ud800'}", json.dumps("{'a': '\\ud800'}")),
        ("l", "['x', True, '\\d']", '["x", true, "\\\\d"]'),
        ("l", "(1, 2)", "[1, 2]"),
        ("l", "[" + "-" * 60_000 + "1]", json.dumps("[" + "-" * 60_000 + "1]")),
        ("i", "7.0", "7"),
        ("o", "[1]", '"[1]"'),
        ("o", "[" * 100_000, json.dumps("[" * 100_000)),
        ("l", "[1,\n 2]", "[1,\n 2]"),
        ("maybe", "None", "null"),
        ("maybe", "3", "3"),
        ("any", "3", "3"),
        ("any", "three", '"three"'),
        ("any", '"3"', '"\\"3\\""'),
        ("city", '{"name": "Rome"}', '{"name": "Rome"}'),
        ("loop", "null", "null"),
        ("one", "2", "2"),
        ("one", "x", '"x"'),
        ("odd", "3", '"3"'),
        ("far", "3", '"3"'),
    ],
)
def test_types_follow_the_schema(key: str, value: str, expected: str) -> None:
    answer: Answer = [("f", f'{{"{key}": {expected}}}')]
    assert parse("qwen3_coder", [call(parameter(key, value))], functions=FUNCTIONS) == answer


@pytest.mark.parametrize(
    ("end", "arguments"),
    [
        ("\n<parameter=s>\nRo</par", '{"s": "Ro'),
        ("\n<parameter=s>\nRo\n</parameter>\n</func", '{"s": "Ro"'),
        ("\n<parameter=s>\nRo\n</parameter>\n</function>\n</tool", '{"s": "Ro"}'),
        ("\n<parameter=i>\n12", '{"i": '),
        ("\n<parameter=i", "{"),
        ("", "{"),
    ],
)
def test_a_call_that_is_cut_off(end: str, arguments: str) -> None:
    text = f"Hm. <tool_call>\n<function=f>{end}"
    check("qwen3_coder", text, ["Hm.", ("f", arguments)], cut=True, functions=FUNCTIONS)


@pytest.mark.parametrize("text", ["Hm. <tool_call>\n<funct", "Hm. <function=f", "Hm. <tool_c"])
def test_nothing_of_a_call_that_has_not_begun_is_text(text: str) -> None:
    check("qwen3_coder", text, ["Hm."], cut=True)


def test_long_values_take_no_time() -> None:
    text = "</parameter> x " * 5_000
    answer = [("f", json.dumps({"s": text}))]
    assert parse("qwen3_coder", [call(parameter("s", text))], functions=FUNCTIONS) == answer
    assert as_json("[" * 100_000, {"array"}) == json.dumps("[" * 100_000)


def test_strings_arrive_as_soon_as_they_are_certain() -> None:
    parser = make_parser("qwen3_coder", FUNCTIONS)
    start, opening = parser.feed("<tool_call>\n<function=f>\n<")
    assert isinstance(start, ToolCallStart)
    assert opening == ToolCallArguments(0, "{")
    pieces = ["parameter=s>\nRo", "me\n", "x</", "b></parameter>\n<parameter=i>\n1", "2\n"]
    texts = ["".join(part.text for part in parser.feed(piece)) for piece in pieces]  # type: ignore[union-attr]
    assert texts == ['"s": "Ro', "me", "\\nx", '</b>", "i": ', ""]
