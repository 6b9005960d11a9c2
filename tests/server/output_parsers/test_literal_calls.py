"""Gemma's and LFM2's calls, whose values are literals, become JSON, however the text is cut."""

import json
from typing import Any

import pytest

from nanovllm.apps.server.output_parsers.parts import TextDelta, ToolCallStart
from nanovllm.apps.server.output_parsers.tool_formats import GEMMA4, PYTHONIC
from nanovllm.apps.server.protocol import Tool
from nanovllm.options.sampling_params import TOKEN_MARK
from tests.server.output_parsers.helpers import (
    Answer,
    check,
    from_tokens,
    make_parser,
    marked_text,
    parse,
)

START, CLOSING, QUOTE = GEMMA4.tags
CALLS_START, CALLS_END = PYTHONIC.tags


def gemma(arguments: str, name: str = "f") -> str:
    return f"{START}call:{name}{arguments}{CLOSING}"


def python(text: str) -> str:
    return f"{CALLS_START}[{text}]{CALLS_END}"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            f"Wait. {gemma('{n:1}')}{gemma('{n:-2.5e3,m:[]}', 'mcp:a.b-c')} Done.",
            ["Wait.", ("f", '{"n": 1}'), ("mcp:a.b-c", '{"n": -2.5e3, "m": []}'), "Done."],
        ),
        (
            gemma(f'{{a:{QUOTE}x "y" \\ \n é🌧 }}]{QUOTE},b:{{c:[true,null,{{}}]}}}}'),
            [("f", '{"a": "x \\"y\\" \\\\ \\n é🌧 }]", "b": {"c": [true, null, {}]}}')],
        ),
        # What the model also writes.
        (gemma('{ "a" : "b\\n\\"", c: ["d"] }'), [("f", '{"a": "b\\n\\"", "c": ["d"]}')]),
        (gemma('{a:"x\\q"}'), [("f", '{"a": "x\\\\q"}')]),
        (
            gemma(f"{{q:in Rome{QUOTE},b:yes,c:None,d:01}}"),
            [("f", '{"q": "in Rome", "b": "yes", "c": null, "d": "01"}')],
        ),
        (gemma(f"{{a:{QUOTE}x {QUOTE}y{QUOTE} z{QUOTE}}}"), [("f", '{"a": "x \\"y\\" z"}')]),
        (gemma("{a:[1,{b:2],}"), [("f", '{"a": [1, {"b": 2}]}')]),
        (gemma("{a:[{b:1"), [("f", '{"a": [{"b": 1}]}')]),
        (f"{START}call:f{{a:[1, yes", [("f", '{"a": [1, "yes"]}')]),
        (f"{START}call:f{{a:{QUOTE}Ro<|", [("f", '{"a": "Ro<|"}')]),
        (f"{START}:f{{a:1}}{CLOSING}", [("f", '{"a": 1}')]),
        (f"{START}{START}call:mcp:f{{}}{CLOSING}\n{CLOSING}", [("mcp:f", "{}")]),
        (
            gemma("{a:'Rome, it's',b:['x'],c:''}", " f"),
            [("f", '{"a": "Rome, it\'s", "b": ["x"], "c": ""}')],
        ),
        (f'{START}{{"name":"f","arguments":{{"a":1}}}}{CLOSING}', [("f", '{"a":1}')]),
        (gemma("{a,b:}"), [("f", '{"a": "", "b": ""}')]),
        (gemma("{a:{b:1} ; ,c:2}"), [("f", '{"a": {"b": 1}, "c": 2}')]),
        # None at all.
        (gemma("(a=1)"), [gemma("(a=1)")]),
        (gemma("", ""), [gemma("", "")]),
        ("a <|tool", ["a <|tool"]),
    ],
)
def test_calls_of_gemma(text: str, answer: Answer) -> None:
    check("gemma4", text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            f"I look. {python('f(a=1, b=-2.5), a.g-h(c=True,d=None)')} Done.",
            ["I look.", ("f", '{"a": 1, "b": -2.5}'), ("a.g-h", '{"c": true, "d": null}'), "Done."],
        ),
        (
            python('f(a=\'x "y" é🌧, )]\', b="it\'s")'),
            [("f", '{"a": "x \\"y\\" é🌧, )]", "b": "it\'s"}')],
        ),
        (
            python("f(a=[1, [2, 'b'], ()], b={'c': {}, 'd': (3,)})"),
            [("f", '{"a": [1, [2, "b"], []], "b": {"c": {}, "d": [3]}}')],
        ),
        (
            python(r"f(a='\\ \' \n \x41 \u00e9 \q \ud800')"),
            [("f", r'{"a": "\\ ' + r"' \n A é \\q \\ud800" + '"}')],
        ),
        (
            python("f(a={1, 'b'}, b={(1, 2), (3,)}, c={'d': {True}, 4: {}}, e=set())"),
            [("f", '{"a": [1, "b"], "b": [[1, 2], [3]], "c": {"d": [true], "4": {}}, "e": []}')],
        ),
        (python("f(a=('b'), c=(1, ), d=((2), 3))"), [("f", '{"a": "b", "c": [1], "d": [2, 3]}')]),
        (
            python("f(a='''it's \"b\"\n, )''', b=\"\"\"c\"\"\", d=r'\\d', e=b'f')"),
            [("f", '{"a": "it\'s \\"b\\"\\n, )", "b": "c", "d": "\\\\d", "e": "f"}')],
        ),
        # What the model also writes.
        (python("f(a='print('x')', b=1)"), [("f", '{"a": "print(\'x\')", "b": 1}')]),
        (python("f(a='g('b', 'c')'), g()"), [("f", "{\"a\": \"g('b', 'c')\"}"), ("g", "{}")]),
        (
            python("f(a=['say 'x', then', 'y'], b={'it's': 'z'})"),
            [("f", '{"a": ["say \'x\', then", "y"], "b": {"it\'s": "z"}}')],
        ),
        (python("f(a={'say 'x'', 'y'})"), [("f", '{"a": ["say \'x\'", "y"]}')]),
        (python("f(a='p == 'x', b == 1')"), [("f", '{"a": "p == \'x\', b == 1"}')]),
        (python("f(a=day(2020, 1), b=2)"), [("f", '{"a": "day(2020, 1)", "b": 2}')]),
        (python("f(a={b: 1})"), [("f", '{"a": {"b": 1}}')]),
        (python("f(a='sed -n '1p' x', b=2)"), [("f", '{"a": "sed -n \'1p\' x", "b": 2}')]),
        (python("f(a='x\ny\tz')"), [("f", '{"a": "x\\ny\\tz"}')]),
        (
            python("f(a=07, b=in Rome, c=true, d=.5, e=1_000, g=+7, h=1., i=1e999, j=-0.5e3)"),
            [
                (
                    "f",
                    '{"a": 7, "b": "in Rome", "c": true, "d": 0.5, "e": 1000, "g": 7, "h": 1.0, '
                    '"i": 1e999, "j": -0.5e3}',
                )
            ],
        ),
        (
            python(f"f(a=٣, b=0x1f, c=_, d=nan, e={'9' * 70}_)"),
            [("f", f'{{"a": "٣", "b": "0x1f", "c": "_", "d": "nan", "e": "{"9" * 70}_"}}')],
        ),
        (python("f( a = 1 , )"), [("f", '{"a": 1}')]),
        (python("f(a=[1, 2)"), [("f", '{"a": [1, 2]}')]),
        (f"{CALLS_START}f(a=1){CALLS_END}", [("f", '{"a": 1}')]),
        (f"{CALLS_START}[f(a='x{CALLS_END}", [("f", '{"a": "x' + CALLS_END + '"}')]),
        (f"{CALLS_START}[f(a=[1{CALLS_END}", [("f", '{"a": [1]}')]),
        (f"{CALLS_START}[f(a='x'", [("f", '{"a": "x"}')]),
        (python("f(), g(),\n"), [("f", "{}"), ("g", "{}")]),
        (python("f(a=1, b)"), [("f", '{"a": 1, "b": ""}')]),
        (
            python('{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}'),
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        # None at all.
        (python(""), [python("")]),
        (python("f('x')"), [python("f('x')")]),
        (python("1 + 2"), [python("1 + 2")]),
        ("a <|tool_call", ["a <|tool_call"]),
    ],
)
def test_calls_of_lfm2(text: str, answer: Answer) -> None:
    check("lfm2", text, answer)


@pytest.mark.parametrize(
    ("form", "end", "arguments"),
    [
        ("gemma4", f"{{a:{QUOTE}Ro", '{"a": "Ro'),
        ("gemma4", f"{{a:{QUOTE}Ro<|", '{"a": "Ro'),
        ("gemma4", f"{{a:{QUOTE}Ro{QUOTE[:-1]}", '{"a": "Ro'),
        ("gemma4", "{a:tru", '{"a": '),
        ("gemma4", "{a:1,", '{"a": 1'),
        ("gemma4", "{", "{"),
        ("gemma4", "", None),
        ("lfm2", "a='Ro", '{"a": "Ro'),
        ("lfm2", "a='Ro\\", '{"a": "Ro'),
        ("lfm2", "a=tru", '{"a": '),
        ("lfm2", "a=1,", '{"a": 1'),
        ("lfm2", "a={1, ", '{"a": [1'),
        ("lfm2", "a={'b', ", '{"a": '),
        ("lfm2", "a='b', c", '{"a": "b'),
        ("lfm2", "a='b', c= ", '{"a": "b'),
        ("lfm2", "a='b', c=1", '{"a": "b", "c": '),
        ("lfm2", "a={'b': (1", '{"a": {"b": '),
        ("lfm2", "a='x')]<|tool", '{"a": "x"}'),
        ("lfm2", "a", None),
        ("lfm2", "", None),
    ],
)
def test_a_call_that_is_cut_off(form: str, end: str, arguments: str | None) -> None:
    begin = f"{START}call:f" if form == "gemma4" else f"{CALLS_START}[f("
    answer: Answer = ["Hm."] if arguments is None else ["Hm.", ("f", arguments)]
    check(form, f"Hm. {begin}{end}", answer, cut=True)


def test_text_that_reads_like_tags_is_text() -> None:
    """Symptom: a string that holds <|"|> ends there."""
    typed = [piece for tag in GEMMA4.tags for piece in (tag[:3], tag[3:])]
    said = "".join(typed)
    tokens = [*typed, START, "call:f{a:", QUOTE, *typed, QUOTE, ",b:[", QUOTE, *typed, QUOTE, "]}"]
    text = from_tokens([*tokens, CLOSING], GEMMA4.tags)
    check("gemma4", text, [said, ("f", json.dumps({"a": said, "b": [said]}))], marked=None)
    text = f"{CALLS_START} {TOKEN_MARK}{CALLS_START}[f(a='{CALLS_END}')]{TOKEN_MARK}{CALLS_END}So."
    check("lfm2", text, [CALLS_START, ("f", json.dumps({"a": CALLS_END})), "So."], marked=None)


def test_tokens_with_nothing_between_them_say_nothing() -> None:
    for text, answer in (
        (f"{START}{CLOSING}\nHi", ["Hi"]),
        (f"Hi {START}{START} {CLOSING}{START}call:f{{}}{CLOSING}", ["Hi", ("f", "{}")]),
    ):
        check("gemma4", marked_text(text, GEMMA4.tags), answer, marked=None)


def test_a_string_without_an_end_ends_with_the_call() -> None:
    text = f"{START}call:f{{a:[{QUOTE}Rome{CLOSING}{START}call:g{{}}{CLOSING}"
    answer: Answer = [("f", '{"a": ["Rome"]}'), ("g", "{}")]
    check("gemma4", marked_text(text, GEMMA4.tags), answer, marked=None)
    text = f"{CALLS_START}[f(a=['x{CALLS_END}Done."
    check("lfm2", marked_text(text, PYTHONIC.tags), [("f", '{"a": ["x"]}'), "Done."], marked=None)


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
    functions = [Tool.model_construct(name="f", parameters={"properties": properties})]
    answer = [("f", json.dumps({"b": 1, "a": value, "c": [1]}))]
    check("gemma4", gemma(f"{{b:1,a:{word},c:[1]}}"), answer, functions=functions)


def test_declared_parameters_tell_nested_quotes_from_ends() -> None:
    functions = [Tool.model_construct(name="f", parameters={"properties": {"code": {}, "n": {}}})]
    text = python("f(code='plot(x, 'red', label='Circle')\nshow()', n=2)")
    code = "plot(x, 'red', label='Circle')\nshow()"
    check("lfm2", text, [("f", json.dumps({"code": code, "n": 2}))], functions=functions)


def test_deep_and_long_arguments() -> None:
    for form, begin in (("lfm2", f"{CALLS_START}[f(a="), ("gemma4", f"{START}call:f{{a:")):
        ((_, deep),) = parse(form, [f"{begin}{'[' * 5000}1"])
        assert deep == '{"a": ' + "[" * 5000 + "1" + "]" * 5000 + "}"
        many = ["it's"] * 2000
        ((_, long),) = parse(form, [f"{begin}{many!r}"])
        assert json.loads(long) == {"a": many}


def test_arguments_arrive_as_soon_as_they_are_certain() -> None:
    parser = make_parser("gemma4")
    assert parser.feed(f"Hm {START}call:f") == [TextDelta("Hm")]
    start, *_ = parser.feed("{a")
    assert isinstance(start, ToolCallStart)
    pieces = [parser.feed(piece) for piece in (f":{QUOTE}Ro", "me", f"{QUOTE},b:1", "2}")]
    texts = ["".join(part.text for part in parts) for parts in pieces]  # type: ignore[union-attr]
    assert texts == ['"a": "Ro', "me", '", "b": ', "12}"]
    parser = make_parser("lfm2")
    start, *_ = parser.feed(f"{CALLS_START}[f(a=")
    assert isinstance(start, ToolCallStart)
    pieces = [parser.feed(piece) for piece in ("'Ro", "me", "', b=1", "2)")]
    texts = ["".join(part.text for part in parts) for parts in pieces]  # type: ignore[union-attr]
    assert texts == [': "Ro', "me", '", "b": ', "12}"]
