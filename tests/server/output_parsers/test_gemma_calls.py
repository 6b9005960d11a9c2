"""Gemma 4's tool calls become JSON, however their text is cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.apps.server.output_parsers.literal_calls import Gemma4Parser
from nanovllm.apps.server.output_parsers.parameter_types import ParameterTypes, TypedFunction
from nanovllm.apps.server.output_parsers.parts import TextDelta, ToolCallStart
from nanovllm.apps.server.output_parsers.tool_calls import ToolCallParser
from nanovllm.options.sampling_params import TOKEN_MARK
from tests.every_case import examples
from tests.server.output_parsers.helpers import Answer, check_calls, cut, joined, json_values

CLOSING, QUOTE = Gemma4Parser.closing, Gemma4Parser.quote_tag
TAGS = (Gemma4Parser.tag, CLOSING, QUOTE)


def parse(text: str, sizes: list[int] | None = None, *, is_cut: bool = False) -> Answer:
    """Return the answer that comes in pieces: in one, or of these sizes."""
    return finished(Gemma4Parser(), cut(text, sizes or []), is_cut)


def parse_tokens(tokens: list[str], *, is_cut: bool = False, by_characters: bool = False) -> Answer:
    """Return the answer of tokens: those that are tags are special tokens."""
    marked = [TOKEN_MARK + token if token in TAGS else token for token in tokens]
    pieces = list("".join(marked)) if by_characters else marked
    return finished(Gemma4Parser(TAGS), pieces, is_cut)


def finished(parser: ToolCallParser, pieces: list[str], is_cut: bool) -> Answer:
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined(parts + parser.finish(cut=is_cut))


def written(value: Any, *, quoted_keys: bool = False) -> str:
    """Return a value as the chat template writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        quote = QUOTE if quoted_keys else ""
        members = (f"{quote}{key}{quote}:{written(item)}" for key, item in value.items())
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return json.dumps(value)


def call(arguments: str, name: str = "f") -> str:
    return f"<|tool_call>call:{name}{arguments}<tool_call|>"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("{}"), [("f", "{}")]),
        (
            f"Wait. {call('{n:1}')}{call('{n:-2.5e3,m:[]}', 'mcp:a.b-c')} Done.",
            ["Wait.", ("f", '{"n": 1}'), ("mcp:a.b-c", '{"n": -2.5e3, "m": []}'), "Done."],
        ),
        (
            call(written({"a": 'x "y" \\ \n é🌧 }]', "b": {"c": [True, None, {}]}})),
            [("f", '{"a": "x \\"y\\" \\\\ \\n é🌧 }]", "b": {"c": [true, null, {}]}}')],
        ),
        # What the model also writes.
        (call('{ "a" : "b\\n\\"", c: ["d"] }'), [("f", '{"a": "b\\n\\"", "c": ["d"]}')]),
        (call('{a:"x\\q"}'), [("f", '{"a": "x\\\\q"}')]),
        (
            call(f"{{q:in Rome{QUOTE},b:yes,c:None,d:01}}"),
            [("f", '{"q": "in Rome", "b": "yes", "c": null, "d": "01"}')],
        ),
        (call(f"{{a:{QUOTE}x = {QUOTE}y{QUOTE} + z{QUOTE}}}"), [("f", '{"a": "x = \\"y\\" + z"}')]),
        (call("{a:[1,{b:2],}"), [("f", '{"a": [1, {"b": 2}]}')]),
        (call("{a:[{b:1"), [("f", '{"a": [{"b": 1}]}')]),
        ("<|tool_call>call:f{a:[1, yes", [("f", '{"a": [1, "yes"]}')]),
        (f"<|tool_call>call:f{{a:{QUOTE}Ro<|", [("f", '{"a": "Ro<|"}')]),
        ("<|tool_call>:f{a:1}<tool_call|>", [("f", '{"a": 1}')]),
        ("<|tool_call><|tool_call>call:mcp:f{}<tool_call|>\n<tool_call|>", [("mcp:f", "{}")]),
        (
            call("{a:'Rome, it's',b:['x'],c:''}", " f"),
            [("f", '{"a": "Rome, it\'s", "b": ["x"], "c": ""}')],
        ),
        ('<|tool_call>{"name":"f","arguments":{"a":1}}<tool_call|>', [("f", '{"a":1}')]),
        (call("{a,b:}"), [("f", '{"a": "", "b": ""}')]),
        (call("{a:{b:1} ; ,c:2}"), [("f", '{"a": {"b": 1}, "c": 2}')]),
        # None at all.
        (call("(a=1)"), [call("(a=1)")]),
        (call("", ""), [call("", "")]),
        ("a <|tool", ["a <|tool"]),
    ],
)
def test_calls(text: str, answer: Answer) -> None:
    check_calls(parse, text, answer)


@pytest.mark.parametrize(
    ("end", "arguments"),
    [
        (f"{{a:{QUOTE}Ro", '{"a": "Ro'),
        (f"{{a:{QUOTE}Ro<|", '{"a": "Ro'),
        (f"{{a:{QUOTE}Ro{QUOTE[:-1]}", '{"a": "Ro'),
        ("{a:tru", '{"a": '),
        ("{a:1,", '{"a": 1'),
        ("{", "{"),
        ("", None),
    ],
)
def test_a_call_that_is_cut_off(end: str, arguments: str | None) -> None:
    text = f"Hm. <|tool_call>call:f{end}"
    expected: Answer = ["Hm."] if arguments is None else ["Hm.", ("f", arguments)]
    assert parse(text, is_cut=True) == parse(text, [1] * len(text), is_cut=True) == expected


def test_text_that_reads_like_tags_is_text() -> None:
    """Symptom: a string that holds <|"|> ends there."""
    typed = [piece for tag in TAGS for piece in (tag[:3], tag[3:])]
    said = "".join(typed)
    tokens = [
        *typed,
        TAGS[0],
        "call:f{a:",
        QUOTE,
        *typed,
        QUOTE,
        ",b:[",
        QUOTE,
        *typed,
        QUOTE,
        "]}",
    ]
    expected = [said, ("f", json.dumps({"a": said, "b": [said]}))]
    for by_characters in (False, True):
        assert parse_tokens([*tokens, CLOSING], by_characters=by_characters) == expected


def test_tokens_with_nothing_between_them_say_nothing() -> None:
    start, end = TAGS[:2]
    assert parse_tokens([start, end, "\nHi"]) == ["Hi"]
    assert parse_tokens(["Hi ", start, start, " ", end, start, "call:f{}", end]) == [
        "Hi",
        ("f", "{}"),
    ]


@pytest.mark.parametrize(
    ("schema", "word", "value"),
    [
        ({"type": "string"}, "01234", "01234"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "integer"}, "1234", 1234),
        (None, "1234", 1234),
    ],
)
def test_a_bare_word_where_the_schema_wants_a_string(schema: Any, word: str, value: Any) -> None:
    properties = {} if schema is None else {"a": schema}
    function = TypedFunction("f", {}, ParameterTypes({"properties": properties}))
    parser = Gemma4Parser(functions=[function])
    ((_, arguments),) = finished(parser, [call(f"{{b:1,a:{word},c:[1]}}")], is_cut=False)
    assert json.loads(arguments) == {"b": 1, "a": value, "c": [1]}


def test_a_string_without_an_end_ends_with_the_call() -> None:
    tokens = [TAGS[0], "call:f{a:[", QUOTE, "Rome", CLOSING, TAGS[0], "call:g{}", CLOSING]
    assert parse_tokens(tokens) == [("f", '{"a": ["Rome"]}'), ("g", "{}")]


KEYS = st.text(st.sampled_from("ab_-1é"), min_size=1, max_size=5)
TEXTS = st.text(st.sampled_from("a{}[],:\"'\\ \né🌧<|>"), max_size=8).filter(
    lambda t: QUOTE not in t
)
VALUES = json_values(TEXTS, KEYS)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.dictionaries(KEYS, VALUES, max_size=3),
    st.booleans(),
    st.lists(st.integers(1, 9), max_size=40),
)
def test_arguments_are_what_the_template_writes(
    arguments: dict[str, Any], quoted_keys: bool, sizes: list[int]
) -> None:
    text = call(written(arguments, quoted_keys=quoted_keys))
    ((name, found),) = parse(text, sizes)
    assert (name, json.loads(found)) == ("f", arguments)
    assert found == json.dumps(arguments, ensure_ascii=False)


FRAGMENTS = [
    *TAGS,
    "call:",
    "f",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\\",
    " ",
    "é",
    "1",
    "<|",
    "true",
]


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=30),
    st.lists(st.integers(1, 9), max_size=40),
    st.booleans(),
)
def test_any_cut_gives_the_same(tokens: list[str], sizes: list[int], is_cut: bool) -> None:
    tokens = [Gemma4Parser.tag, "call:f{a:", *tokens]
    text = "".join(tokens)
    whole = parse(text, is_cut=is_cut)
    assert parse(text, sizes, is_cut=is_cut) == whole
    assert parse(text, [1] * len(text), is_cut=is_cut) == whole
    marked = parse_tokens(tokens, is_cut=is_cut)
    assert parse_tokens(tokens, is_cut=is_cut, by_characters=True) == marked


def test_deep_and_long_arguments_take_no_time() -> None:
    ((_, deep),) = parse(call("{a:" + "[" * 50_000 + "1"))
    assert deep == '{"a": ' + "[" * 50_000 + "1" + "]" * 50_000 + "}"
    many = {"a": ["b"] * 20_000}
    ((_, long),) = parse(call(written(many)))
    assert json.loads(long) == many


def test_arguments_arrive_as_soon_as_they_are_certain() -> None:
    parser = Gemma4Parser()
    assert parser.feed("Hm <|tool_call>call:f") == [TextDelta("Hm")]
    start, *_ = parser.feed("{a")
    assert isinstance(start, ToolCallStart)
    pieces = [parser.feed(piece) for piece in (f":{QUOTE}Ro", "me", f"{QUOTE},b:1", "2}")]
    texts = ["".join(part.text for part in parts) for parts in pieces]  # type: ignore[union-attr]
    assert texts == ['"a": "Ro', "me", '", "b": ', "12}"]
