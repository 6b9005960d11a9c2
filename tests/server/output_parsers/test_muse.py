"""Answers of Muse Glimmer: messages to itself, the user and functions, however they are cut."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.apps.server.output_parsers.muse import MuseParser
from tests.every_case import examples
from tests.server.output_parsers.helpers import Split, cut, split

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}}
FUNCTIONS = [SimpleNamespace(name="weather", parameters={"properties": PROPERTIES})]
CITY = '<atem:parameter name="city">Rome</atem:parameter>\n'


def invoked(name: str, *parameters: str) -> str:
    invoke = f'<atem:invoke name="{name}">\n{"".join(parameters)}</atem:invoke>'
    return f"<atem:function_calls>\n{invoke}\n</atem:function_calls>"


def called(name: str, *parameters: str) -> str:
    return f" to={name}<|message|>{invoked(name, *parameters)}"


def parse(
    text: str, sizes: list[int] | None = None, *, is_cut: bool = False, **options: bool
) -> Split:
    parser = MuseParser(functions=FUNCTIONS, **options)
    pieces = [text] if sizes is None else cut(text, sizes)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return split(parts + parser.finish(cut=is_cut))


VALUES = {"city": ' 5\n"Rome" </b>\n', "days": 3, "more": {"a": [1]}, "else": "7"}
NEXT = "<|eom|><|start|>assistant"
CASES: list[tuple[str, tuple[str, str, list[tuple[str, str]]]]] = [
    (" to=user<|message|>Hello\n", ("", "Hello\n", [])),
    (
        f" to=self<|message|>Hm. 1 < 2{NEXT} to=user<|message|>Two.<|eot|>",
        ("Hm. 1 < 2", "Two.", []),
    ),
    (
        f" to=self<|message|>Hm.{NEXT}{called('weather', CITY)}<|eot|>",
        ("Hm.", "", [("weather", '{"city": "Rome"}')]),
    ),
    (
        f"{called('weather', CITY)}{NEXT}{called('now')}<|eot|>",
        ("", "", [("weather", '{"city": "Rome"}'), ("now", "{}")]),
    ),
    (
        called(
            "weather",
            '<atem:parameter name="city"> 5\n"Rome" </b>\n</atem:parameter>\n',
            '<atem:parameter name="days">3</atem:parameter>\n',
            '<atem:parameter name="more">{"a": [1]}</atem:parameter>\n',
            '<atem:parameter name="else">7</atem:parameter>\n',
        ),
        (
            "",
            "",
            [
                (
                    "weather",
                    json.dumps(
                        {"city": ' 5\n"Rome" </b>\n', "days": 3, "more": {"a": [1]}, "else": "7"}
                    ),
                )
            ],
        ),
    ),
    (called("weather.weather", CITY), ("", "", [("weather", '{"city": "Rome"}')])),
    (called("weather.today", CITY), ("", "", [("weather.today", '{"city": "Rome"}')])),
    (called("weather", '{"city": "Rome"}'), ("", "", [("weather", '{"city": "Rome"}')])),
    (f" to=self<|message|>I do {invoked('now')}", (f"I do {invoked('now')}", "", [])),
    (f" to=self<|message|>Hm.<|start|>assistant{called('now')}", ("Hm.", "", [("now", "{}")])),
    (f" to=self<|message|>a{NEXT} to=self<|message|>b", ("a\nb", "", [])),
    ("Hello to=you", ("", "Hello to=you", [])),
    ("to be", ("", "to be", [])),
    ("assistant to=self", ("", "to=self", [])),
    (" to=weather<|message|>What?", ("", "What?", [])),
    ("", ("", "", [])),
]


@pytest.mark.parametrize(("text", "answer"), CASES)
def test_answers(text: str, answer: Split) -> None:
    for size in (1, 2, 3, 7, 1000):
        assert parse(text, [size] * (len(text) // size)) == answer


def test_nothing_of_a_header_or_a_call_that_is_cut_off_is_text() -> None:
    text = f" to=self<|message|>Hm.{NEXT}{called('weather', CITY)}"
    for end in range(len(text)):
        for sizes in (None, [1] * end):
            reasoning, said, _ = parse(text[:end], sizes, is_cut=True)
            assert "Hm.".startswith(reasoning)
            assert said == ""


def test_what_is_not_asked_for_is_text() -> None:
    text = f" to=self<|message|>Hm.{NEXT}{called('now')}"
    assert parse(text, has_reasoning=False) == ("", "Hm.", [("now", "{}")])
    reasoning, said, calls = parse(text, has_calls=False)
    assert (reasoning, calls) == ("Hm.", [])
    assert said.startswith("<atem:function_calls>")
    assert parse("Hm.<|eom|>", started=True) == ("Hm.", "", [])


FRAGMENTS = [
    *(
        "<|start|>",
        "<|message|>",
        "<|eom|>",
        "<|eot|>",
        "assistant",
        " to=self",
        " to=user",
        " to=now",
    ),
    *(
        "<atem:function_calls>",
        '<atem:invoke name="weather">',
        '<atem:parameter name="days">',
        "\n",
    ),
    *(
        "</atem:parameter>",
        "</atem:invoke>",
        "</atem:function_calls>",
        "{",
        "}",
        "1",
        " ",
        '"',
        "<",
        "x",
    ),
]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join),
    st.lists(st.integers(1, 9), max_size=40),
    st.booleans(),
)
def test_any_cut_gives_the_same(text: str, sizes: list[int], is_cut: bool) -> None:
    whole = parse(text, is_cut=is_cut)
    assert parse(text, sizes, is_cut=is_cut) == whole
    assert parse(text, [1] * len(text), is_cut=is_cut) == whole
