"""LFM2's calls, which are Python, become JSON, however the text is cut."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.apps.server.output_parsers.parts import ToolCallStart
from nanovllm.apps.server.output_parsers.pythonic_calls import (
    PythonicParser,
    as_json,
)
from nanovllm.options.sampling_params import TOKEN_MARK
from tests.every_case import examples
from tests.server.output_parsers.helpers import Answer, check_calls, cut, joined, json_values

CALLS_START, CALLS_END = PythonicParser.tag, PythonicParser.closing


def parse(text: str, sizes: list[int] | None = None, *, is_cut: bool = False) -> Answer:
    return finished(PythonicParser(), cut(text, sizes or []), is_cut)


def finished(parser: PythonicParser, pieces: list[str], is_cut: bool) -> Answer:
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined(parts + parser.finish(cut=is_cut))


def calls(text: str) -> str:
    return f"{CALLS_START}[{text}]{CALLS_END}"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (calls("f()"), [("f", "{}")]),
        (
            f"I look. {calls('f(a=1, b=-2.5), a.g-h(c=True,d=None)')} Done.",
            ["I look.", ("f", '{"a": 1, "b": -2.5}'), ("a.g-h", '{"c": true, "d": null}'), "Done."],
        ),
        (
            calls('f(a=\'x "y" é🌧, )]\', b="it\'s")'),
            [("f", '{"a": "x \\"y\\" é🌧, )]", "b": "it\'s"}')],
        ),
        (
            calls("f(a=[1, [2, 'b'], ()], b={'c': {}, 'd': (3,)})"),
            [("f", '{"a": [1, [2, "b"], []], "b": {"c": {}, "d": [3]}}')],
        ),
        (
            calls(r"f(a='\\ \' \n \x41 \u00e9 \q \ud800')"),
            [("f", r'{"a": "\\ ' + r"' \n A é \\q \\ud800" + '"}')],
        ),
        (
            calls("f(a={1, 'b'}, b={(1, 2), (3,)}, c={'d': {True}, 4: {}}, e=set())"),
            [("f", '{"a": [1, "b"], "b": [[1, 2], [3]], "c": {"d": [true], "4": {}}, "e": []}')],
        ),
        (calls("f(a=('b'), c=(1, ), d=((2), 3))"), [("f", '{"a": "b", "c": [1], "d": [2, 3]}')]),
        (
            calls("f(a='''it's \"b\"\n, )''', b=\"\"\"c\"\"\", d=r'\\d', e=b'f')"),
            [("f", '{"a": "it\'s \\"b\\"\\n, )", "b": "c", "d": "\\\\d", "e": "f"}')],
        ),
        # What the model also writes.
        (calls("f(a='print('x')', b=1)"), [("f", '{"a": "print(\'x\')", "b": 1}')]),
        (calls("f(a='g('b', 'c')'), g()"), [("f", "{\"a\": \"g('b', 'c')\"}"), ("g", "{}")]),
        (calls("f(a='say 'x', then', b=1)"), [("f", '{"a": "say \'x\', then", "b": 1}')]),
        (
            calls("f(a=['say 'x', then', 'y'], b={'it's': 'z'})"),
            [("f", '{"a": ["say \'x\', then", "y"], "b": {"it\'s": "z"}}')],
        ),
        (calls("f(a={'say 'x'', 'y'})"), [("f", '{"a": ["say \'x\'", "y"]}')]),
        (calls("f(a='p == 'x', b == 1')"), [("f", '{"a": "p == \'x\', b == 1"}')]),
        (calls("f(a=day(2020, 1), b=2)"), [("f", '{"a": "day(2020, 1)", "b": 2}')]),
        (calls("f(a={b: 1})"), [("f", '{"a": {"b": 1}}')]),
        (calls("f(a='sed -n '1p' x', b=2)"), [("f", '{"a": "sed -n \'1p\' x", "b": 2}')]),
        (calls("f(a='x\ny\tz')"), [("f", '{"a": "x\\ny\\tz"}')]),
        (
            calls("f(a=07, b=in Rome, c=true, d=.5, e=1_000)"),
            [
                ("f", '{"a": 7, "b": "in Rome", "c": true, "d": 0.5, "e": 1000}'),
            ],
        ),
        (calls("f( a = 1 , )"), [("f", '{"a": 1}')]),
        (calls("f(a=[1, 2)"), [("f", '{"a": [1, 2]}')]),
        (f"{CALLS_START}f(a=1){CALLS_END}", [("f", '{"a": 1}')]),
        (f"{CALLS_START}[f(a='x{CALLS_END}", [("f", '{"a": "x' + CALLS_END + '"}')]),
        (f"{CALLS_START}[f(a=[1{CALLS_END}", [("f", '{"a": [1]}')]),
        (f"{CALLS_START}[f(a='x'", [("f", '{"a": "x"}')]),
        (calls("f(), g(),\n"), [("f", "{}"), ("g", "{}")]),
        (calls("f(a=1, b)"), [("f", '{"a": 1, "b": ""}')]),
        (
            calls('{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}'),
            [
                ("f", '{"a": 1}'),
                ("g", "{}"),
            ],
        ),
        # None at all.
        (calls(""), [calls("")]),
        (calls("f('x')"), [calls("f('x')")]),
        (calls("1 + 2"), [calls("1 + 2")]),
        ("a <|tool_call", ["a <|tool_call"]),
    ],
)
def test_calls(text: str, answer: Answer) -> None:
    check_calls(parse, text, answer)


@pytest.mark.parametrize(
    ("end", "arguments"),
    [
        ("a='Ro", '{"a": "Ro'),
        ("a='Ro\\", '{"a": "Ro'),
        ("a=tru", '{"a": '),
        ("a=1,", '{"a": 1'),
        ("a={1, ", '{"a": [1'),
        ("a={'b', ", '{"a": '),
        ("a='b', c", '{"a": "b'),
        ("a='b', c=", '{"a": "b'),
        ("a='b', c= ", '{"a": "b'),
        ("a='b', c=1", '{"a": "b", "c": '),
        ("a={'b'", '{"a": '),
        ("a={'b': (1", '{"a": {"b": '),
        ("a='x')]<|tool", '{"a": "x"}'),
        ("a", None),
        ("", None),
    ],
)
def test_a_call_that_is_cut_off(end: str, arguments: str | None) -> None:
    text = f"Hm. {CALLS_START}[f({end}"
    expected: Answer = ["Hm."] if arguments is None else ["Hm.", ("f", arguments)]
    assert parse(text, is_cut=True) == parse(text, [1] * len(text), is_cut=True) == expected


def test_text_that_reads_like_tags_is_text() -> None:
    tokens = [f"{CALLS_START} ", TOKEN_MARK + CALLS_START, f"[f(a='{CALLS_END}", "')]"]
    text = "".join([*tokens, TOKEN_MARK, CALLS_END, "Done."])
    parser = PythonicParser((CALLS_START, CALLS_END))
    expected = [CALLS_START, ("f", json.dumps({"a": CALLS_END})), "Done."]
    assert finished(parser, list(text), False) == expected


def test_a_string_without_an_end_ends_with_the_calls() -> None:
    parser = PythonicParser((CALLS_START, CALLS_END))
    text = f"{TOKEN_MARK}{CALLS_START}[f(a=['x{TOKEN_MARK}{CALLS_END}Done."
    assert finished(parser, list(text), False) == [("f", '{"a": ["x"]}'), "Done."]


def test_declared_parameters_tell_nested_quotes_from_ends() -> None:
    schema = {"properties": {"code": {}, "n": {}}}
    text = calls("f(code='plot(x, 'red', label='Circle')\nshow()', n=2)")
    expected = [("f", json.dumps({"code": "plot(x, 'red', label='Circle')\nshow()", "n": 2}))]
    for sizes in ([], [1] * len(text)):
        parser = PythonicParser((), [SimpleNamespace(name="f", parameters=schema)])
        assert finished(parser, cut(text, sizes), False) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("1", "1"),
        ("-0.5e3", "-0.5e3"),
        ("+7", "7"),
        ("1.", "1.0"),
        ("1e999", "1e999"),
        ("٣", '"٣"'),
        ("0x1f", '"0x1f"'),
        ("_", '"_"'),
        ("nan", '"nan"'),
        ("9" * 70 + "_", json.dumps("9" * 70 + "_")),
    ],
)
def test_words_and_numbers(source: str, expected: str) -> None:
    assert as_json(source) == expected


KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
TEXTS = st.text(st.sampled_from("ab \n\t\\é🌧{}[]():<|>"), max_size=8)
VALUES = json_values(TEXTS, TEXTS)


@settings(max_examples=examples(150), deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=3), st.lists(st.integers(1, 9), max_size=40))
def test_arguments_are_pythons(arguments: dict[str, Any], sizes: list[int]) -> None:
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    ((name, found),) = parse(calls(f"f({given})"), sizes)
    assert (name, json.loads(found)) == ("f", arguments)
    assert found == json.dumps(arguments, ensure_ascii=False)


FRAGMENTS = [
    *(CALLS_START, CALLS_END, "f(", "a=", "'", '"', "[", "]", "{", "}", "(", ")", ",", ":", "="),
    *("\\", " ", "é", "1", "<|", "None", "\n", '{"name": "f", "arguments": {'),
]


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=30),
    st.lists(st.integers(1, 9), max_size=40),
    st.booleans(),
)
def test_any_cut_gives_the_same(fragments: list[str], sizes: list[int], is_cut: bool) -> None:
    text = f"{CALLS_START}[f(a=" + "".join(fragments)
    whole = parse(text, is_cut=is_cut)
    assert parse(text, sizes, is_cut=is_cut) == whole
    assert parse(text, [1] * len(text), is_cut=is_cut) == whole
    if not is_cut and isinstance(whole[0], tuple):
        json.loads(whole[0][1])


def test_deep_and_long_arguments_take_no_time() -> None:
    ((_, deep),) = parse(f"{CALLS_START}[f(a=" + "[" * 50_000 + "1")
    assert deep == '{"a": ' + "[" * 50_000 + "1" + "]" * 50_000 + "}"
    many = {"a": ["it's"] * 20_000}
    ((_, long),) = parse(calls(f"f(a={many['a']!r})"))
    assert json.loads(long) == many


def test_arguments_arrive_as_soon_as_they_are_certain() -> None:
    parser = PythonicParser()
    start, *_ = parser.feed(f"{CALLS_START}[f(a=")
    assert isinstance(start, ToolCallStart)
    pieces = [parser.feed(piece) for piece in ("'Ro", "me", "', b=1", "2)")]
    texts = ["".join(part.text for part in parts) for parts in pieces]  # type: ignore[union-attr]
    assert texts == [': "Ro', "me", '", "b": ', "12}"]
