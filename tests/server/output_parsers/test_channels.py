"""Answers of gpt-oss and Muse Glimmer, however they are cut and the model breaks the format."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.apps.server.output_parsers.channels import (
    HARMONY_TAGS,
    ChannelsParser,
    HarmonyParser,
    MuseParser,
)
from nanovllm.apps.server.output_parsers.parts import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.protocol import Tool
from nanovllm.chat.tool_messages import for_harmony
from tests.every_case import examples
from tests.server.output_parsers.helpers import Split, from_tokens, in_pieces, split

START, MESSAGE, END, CALL, RETURN, CHANNEL, CONSTRAIN = HARMONY_TAGS
THOUGHT = f"{CHANNEL}analysis{MESSAGE}Hm. é{END}{START}assistant"
FINAL = f"{CHANNEL}final{MESSAGE}"
WEATHER = f"{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}"
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}}
FUNCTIONS = [Tool.model_construct(name="weather", parameters={"properties": PROPERTIES})]


def parse(
    kind: type[ChannelsParser], pieces: Sequence[str], *, cut: bool = False, **options: Any
) -> Split:
    parser = kind(functions=FUNCTIONS, **options)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return split(parts + parser.finish(cut=cut))


def check(
    kind: type[ChannelsParser],
    text: str,
    reasoning: str = "",
    answer: str = "",
    calls: Sequence[tuple[str, str]] = (),
    **options: Any,
) -> None:
    """Check what is read of a text, however it is cut."""
    for size in (1, 2, 3, 7, len(text) + 1):
        found = parse(kind, in_pieces(text, size), **options)
        assert found == (reasoning, answer, list(calls)), size


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "calls"),
    [
        (f"{THOUGHT}{FINAL}4.{RETURN}", "Hm. é", "4.", []),
        (f'{THOUGHT}{WEATHER}{{"a": 1}}{CALL}', "Hm. é", "", [("weather", '{"a": 1}')]),
        (f"{WEATHER}{CALL}", "", "", [("weather", "{}")]),
        (
            f"{CHANNEL}commentary{MESSAGE}Plan:{END}{START}assistant{WEATHER}[1]{END}"
            f"{START}assistant to=python{CHANNEL}analysis code{MESSAGE}1 + 1{CALL}",
            "",
            "Plan:",
            [("weather", "[1]"), ("python", "1 + 1")],
        ),
        (f"{THOUGHT}{THOUGHT}{FINAL}a{END}{START}assistant{FINAL}b", "Hm. é\nHm. é", "a\nb", []),
        # The model breaks the format.
        ("Hello", "", "Hello", []),
        ("assistants to=day", "", "assistants to=day", []),
        (f"Hello {FINAL}4.", "", "Hello \n4.", []),
        (f"{CHANNEL}musings{MESSAGE}4.{RETURN}", "", "4.", []),
        (f"{CHANNEL}commentary?commentary?{MESSAGE}4.{RETURN}", "", "4.", []),
        (f"{CHANNEL}I think so.{END}{START}assistant{FINAL}4.", "", "I think so.\n4.", []),
        (f"{CHANNEL}analysisHm. {END}{FINAL}4.", "Hm. ", "4.", []),
        (f"{CHANNEL}analysis{MESSAGE}Hm.{CHANNEL}final{MESSAGE}4.", "Hm.", "4.", []),
        (f"{CHANNEL}analysis{MESSAGE}Hm.{START}assistant{FINAL}4.", "Hm.", "4.", []),
        (f"{THOUGHT.removesuffix('assistant')}{FINAL}4.", "Hm. é", "4.", []),
        (f"{CHANNEL}analysis{MESSAGE}Hm.{END}\n assistant{FINAL}4.", "Hm.", "4.", []),
        (f"{CHANNEL}analysis{MESSAGE}Hm.{END}4.{RETURN}", "Hm.", "4.", []),
        (f"{MESSAGE}4.{MESSAGE}5{CONSTRAIN}6", "", "4.56", []),
        (f"{THOUGHT}{START}assistant{CHANNEL}{MESSAGE}4.", "Hm. é", "4.", []),
        (f'{WEATHER.removesuffix(MESSAGE)}{{"a": 1}}{CALL}', "", "", [("weather", '{"a": 1}')]),
        (f"{CHANNEL}commentary to=functions. {MESSAGE}4.", "", "4.", []),
        (f"{CHANNEL}commentary to=assistant{MESSAGE}4.", "", "4.", []),
        (f"{THOUGHT}{CHANNEL}final", "Hm. é", "", []),
        (f"{END}{RETURN}{CALL}{START}{START}", "", "", []),
        ("", "", "", []),
    ],
)
def test_answers_of_gpt_oss(
    text: str, reasoning: str, answer: str, calls: list[tuple[str, str]]
) -> None:
    check(HarmonyParser, text, reasoning, answer, calls)


@pytest.mark.parametrize(
    "end",
    [
        *("<|chan", CHANNEL, f"{CHANNEL}ana", f"{CHANNEL}commentary to=functions.wea", WEATHER),
        *(f"{END}{START}assis", END, f"{CHANNEL}commentary to=f <|constr"),
    ],
)
def test_nothing_of_a_header_that_is_cut_off_is_text(end: str) -> None:
    check(HarmonyParser, f"{THOUGHT}{FINAL}4.{end}", "Hm. é", "4.", cut=True)


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    check(HarmonyParser, f'{WEATHER}{{"a": "', calls=[("weather", '{"a": "')], cut=True)
    check(HarmonyParser, f"{CHANNEL}analysis{MESSAGE}Hm", "Hm", cut=True)


def test_text_that_reads_like_tags_is_text() -> None:
    """Symptom: an answer that explains harmony ends at the first <|end|> in it."""
    said = [piece for tag in HARMONY_TAGS for piece in (tag[:4], tag[4:], " ")]
    tokens = [CHANNEL, "analysis", MESSAGE, *said, END, START, "assistant"]
    tokens += [CHANNEL, "final", MESSAGE, *said, END, START, "assistant"]
    tokens += [CHANNEL, "commentary", " to=", "functions.f", MESSAGE, *said, CALL]
    text, everything = from_tokens(tokens, HARMONY_TAGS), "".join(said)
    calls = [("f", everything)]
    check(HarmonyParser, text, everything, everything, calls, marked=HARMONY_TAGS)


def test_without_tools_or_a_reasoning_parser() -> None:
    text = f'{THOUGHT}{WEATHER}{{"a": 1}}{CALL}'
    check(HarmonyParser, text, "Hm. é", '{"a": 1}', has_calls=False)
    check(HarmonyParser, text, "", "Hm. é", [("weather", '{"a": 1}')], has_reasoning=False)
    python = f"{CHANNEL}analysis to=python{MESSAGE}1{CALL}"
    check(HarmonyParser, python, "1", has_calls=False)
    text = f" to=self<|message|>Hm.{NEXT}{called('now')}"
    check(MuseParser, text, "", "Hm.", [("now", "{}")], has_reasoning=False)
    check(MuseParser, text, "Hm.", invoked("now"), has_calls=False)


def test_a_prompt_that_ends_inside_the_reasoning() -> None:
    check(HarmonyParser, f"Hm.{END}{START}assistant{FINAL}4.", "Hm.", "4.", started=True)
    check(MuseParser, "Hm.<|eom|>", "Hm.", started=True)


def test_no_answer_has_more_calls_than_a_request_may_have() -> None:
    text = f"{WEATHER}[]{END}{START}assistant" * 130
    _, answer, calls = parse(HarmonyParser, [text])
    assert calls == [("weather", "[]")] * 128
    assert answer == "[]\n[]"


def test_pieces_arrive_as_soon_as_they_are_certain() -> None:
    parser = HarmonyParser()
    assert parser.feed(f"{CHANNEL}analysis{MESSAGE}a <|") == [ReasoningDelta("a ")]
    assert parser.feed(f"b{END}{START}assistant") == [ReasoningDelta("<|b")]
    assert parser.feed(f"{FINAL}c") == [TextDelta("c")]
    assert parser.feed(f"{END}{START}assistant{WEATHER}") == []
    start, piece = parser.feed('{"a": ')
    assert isinstance(start, ToolCallStart)
    assert piece == ToolCallArguments(0, '{"a": ')


BODIES = st.text(st.sampled_from("a{}\"'\\ \né🌧<|>:=to"), min_size=1, max_size=12)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("rtcp"), BODIES), min_size=1, max_size=5))
def test_messages_come_out_as_they_went_in(messages: list[tuple[str, str]]) -> None:
    headers = {
        "r": f"{CHANNEL}analysis{MESSAGE}",
        "t": FINAL,
        "p": f"{CHANNEL}commentary{MESSAGE}",
        "c": WEATHER,
    }
    text = f"{END}{START}assistant".join(headers[kind] + body for kind, body in messages)
    said = {kind: [body for k, body in messages if k == kind] for kind in "rc"}
    answer = "\n".join(body for kind, body in messages if kind in "tp")
    expected = ("\n".join(said["r"]), answer, [("weather", body) for body in said["c"]])
    assert parse(HarmonyParser, [text]) == parse(HarmonyParser, list(text)) == expected


def invoked(name: str, *parameters: str) -> str:
    invoke = f'<atem:invoke name="{name}">\n{"".join(parameters)}</atem:invoke>'
    return f"<atem:function_calls>\n{invoke}\n</atem:function_calls>"


def called(name: str, *parameters: str) -> str:
    return f" to={name}<|message|>{invoked(name, *parameters)}"


def parameter(key: str, value: str) -> str:
    return f'<atem:parameter name="{key}">{value}</atem:parameter>\n'


NEXT = "<|eom|><|start|>assistant"
CITY = parameter("city", "Rome")
ROME = '{"city": "Rome"}'
VALUES = {"city": ' 5\n"Rome" </b>\n', "days": 3, "more": {"a": [1]}, "else": "7"}
WRITTEN = [v if isinstance(v, str) else json.dumps(v) for v in VALUES.values()]


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "calls"),
    [
        (" to=user<|message|>Hello\n", "", "Hello\n", []),
        (f" to=self<|message|>1 < 2{NEXT} to=user<|message|>Two.<|eot|>", "1 < 2", "Two.", []),
        (
            f"{called('weather', CITY)}{NEXT}{called('now')}<|eot|>",
            "",
            "",
            [("weather", ROME), ("now", "{}")],
        ),
        (
            called("weather", *map(parameter, VALUES, WRITTEN)),
            "",
            "",
            [("weather", json.dumps(VALUES))],
        ),
        (called("weather.weather", CITY), "", "", [("weather", ROME)]),
        (called("weather.today", CITY), "", "", [("weather.today", ROME)]),
        (called("weather", ROME), "", "", [("weather", ROME)]),
        (f" to=self<|message|>I do {invoked('now')}", f"I do {invoked('now')}", "", []),
        (f" to=self<|message|>Hm.<|start|>assistant{called('now')}", "Hm.", "", [("now", "{}")]),
        (f" to=self<|message|>a{NEXT} to=self<|message|>b", "a\nb", "", []),
        ("Hello to=you", "", "Hello to=you", []),
        ("to be", "", "to be", []),
        ("assistant to=self", "", "to=self", []),
        (" to=weather<|message|>What?", "", "What?", []),
        ("", "", "", []),
    ],
)
def test_answers_of_muse_glimmer(
    text: str, reasoning: str, answer: str, calls: list[tuple[str, str]]
) -> None:
    check(MuseParser, text, reasoning, answer, calls)


def test_nothing_of_a_header_or_a_call_that_is_cut_off_is_text() -> None:
    text = f" to=self<|message|>Hm.{NEXT}{called('weather', CITY)}"
    for end in range(len(text)):
        for pieces in ([text[:end]], list(text[:end])):
            reasoning, said, _ = parse(MuseParser, pieces, cut=True)
            assert "Hm.".startswith(reasoning)
            assert said == ""


def test_messages_and_tools_for_the_template() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    conversation = [
        {"role": "assistant", "content": "b", "reasoning_content": "a", "tool_calls": [call]},
        {"role": "assistant", "content": "b", "reasoning_content": "a"},
        {"role": "assistant", "content": "b", "thinking": "c", "reasoning_content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
    ]
    given = json.dumps(conversation)
    tools = [{"type": "function", "function": {"name": "f"}}, {"name": "g"}]
    found, described = for_harmony(conversation, tools)
    assert [(m.get("thinking"), m.get("content")) for m in found] == [
        ("a\nb", None),
        ("a", "b"),
        ("c", "b"),
        (None, "b"),
    ]
    assert json.dumps(conversation) == given
    assert described is not None
    assert described[0]["function"] == {"name": "f", "description": ""}
    assert for_harmony(conversation, None)[1] is None
