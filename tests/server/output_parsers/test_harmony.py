"""Answers in harmony, however their text is cut and wherever the model breaks the format."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from nanovllm.apps.server.output_parsers.harmony import TAGS, HarmonyParser
from nanovllm.apps.server.output_parsers.parts import (
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.chat.tool_messages import for_harmony
from nanovllm.options.sampling_params import TOKEN_MARK
from tests.every_case import examples
from tests.server.output_parsers.helpers import Split, split

START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN = TAGS
THOUGHT = f"{CHANNEL}analysis{MESSAGE}Hm. é{END}{START}assistant"
FINAL = f"{CHANNEL}final{MESSAGE}"
WEATHER = f"{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}"
ARGUMENTS = '{"city": {"name": "Ro\\"}me 🌧"}, "tag": "<|call|>"}'


def parse(pieces: list[str], *, cut: bool = False, **options: bool) -> Split:
    """Return the answer that comes in pieces of a text in which no tag is a token."""
    parser = HarmonyParser(**options)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return split(parts + parser.finish(cut=cut))


def parse_tokens(tokens: list[str], *, cut: bool = False, by_characters: bool = False) -> Split:
    """Return the answer of tokens: those that are tags are special tokens."""
    parser = HarmonyParser(marked=TAGS)
    marked = [TOKEN_MARK + token if token in TAGS else token for token in tokens]
    pieces = "".join(marked) if by_characters else marked
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return split(parts + parser.finish(cut=cut))


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "calls"),
    [
        (f"{THOUGHT}{FINAL}4.{RETURN}", "Hm. é", "4.", []),
        (f"{THOUGHT}{FINAL}4.", "Hm. é", "4.", []),
        (f'{THOUGHT}{WEATHER}{{"a": 1}}{CALL}', "Hm. é", "", [("weather", '{"a": 1}')]),
        (f"{WEATHER}{CALL}", "", "", [("weather", "{}")]),
        (
            f' to=functions.weather{CHANNEL}commentary json{MESSAGE}{{"a": 1}}',
            "",
            "",
            [("weather", '{"a": 1}')],
        ),
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
def test_channels(text: str, reasoning: str, answer: str, calls: list[tuple[str, str]]) -> None:
    assert parse([text]) == (reasoning, answer, calls)
    assert parse(list(text)) == (reasoning, answer, calls)


@pytest.mark.parametrize(
    "end",
    [
        *("<|chan", CHANNEL, f"{CHANNEL}ana", f"{CHANNEL}commentary to=functions.wea", WEATHER),
        *(f"{END}{START}assis", f"{END}{START}assistant", END),
        f"{CHANNEL}commentary to=f <|constr",
    ],
)
def test_nothing_of_a_header_that_is_cut_off_is_text(end: str) -> None:
    text = f"{THOUGHT}{FINAL}4.{end}"
    assert parse([text], cut=True) == parse(list(text), cut=True) == ("Hm. é", "4.", [])


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    assert parse([f'{WEATHER}{{"a": "'], cut=True) == ("", "", [("weather", '{"a": "')])
    assert parse([f"{CHANNEL}analysis{MESSAGE}Hm"], cut=True) == ("Hm", "", [])


def test_text_that_reads_like_tags_is_text() -> None:
    """Symptom: an answer that explains harmony ends at the first <|end|> in it."""
    typed = [f"{tag[:3]}|{tag[3:]}".replace("||", "|") for tag in TAGS]
    said = [piece for tag in TAGS for piece in (tag[:4], tag[4:], " ")]
    tokens = [CHANNEL, "analysis", MESSAGE, *said, END, START, "assistant"]
    tokens += [CHANNEL, "final", MESSAGE, *typed, *said, END, START, "assistant"]
    tokens += [CHANNEL, "commentary", " to=", "functions.f", MESSAGE, *said, CALL]
    everything = "".join(said)
    assert parse_tokens(tokens) == (everything, "".join(typed) + everything, [("f", everything)])


def test_without_tools_or_a_reasoning_parser() -> None:
    text = f'{THOUGHT}{WEATHER}{{"a": 1}}{CALL}'
    assert parse([text], has_calls=False) == ("Hm. é", '{"a": 1}', [])
    assert parse([text], has_reasoning=False) == ("", "Hm. é", [("weather", '{"a": 1}')])
    python = f"{CHANNEL}analysis to=python{MESSAGE}1{CALL}"
    assert parse([python], has_calls=False) == ("1", "", [])


def test_a_prompt_that_ends_inside_the_reasoning() -> None:
    text = f"Hm.{END}{START}assistant{FINAL}4."
    assert parse([text], started=True) == parse(list(text), started=True) == ("Hm.", "4.", [])


def test_no_answer_has_more_calls_than_a_request_may_have() -> None:
    text = f"{WEATHER}[]{END}{START}assistant" * 130
    _, answer, calls = parse([text])
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


WORDS = ["analysis", "final", "commentary", "assistant", " to=functions.f", " json", "a b", "{}"]
TOKENS = st.sampled_from([*TAGS, *WORDS, "<|", "end|>", "é🌧", " ", "\n", "?", "x", "to="])


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(TOKENS, max_size=30), st.lists(st.integers(1, 9), max_size=40), st.booleans())
def test_any_cut_gives_the_same(tokens: list[str], sizes: list[int], is_cut: bool) -> None:
    text = "".join(tokens)
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    whole = parse([text], cut=is_cut)
    assert parse([*pieces, rest], cut=is_cut) == whole
    assert parse(list(text), cut=is_cut) == whole
    marked = parse_tokens(tokens, cut=is_cut)
    assert parse_tokens(tokens, cut=is_cut, by_characters=True) == marked


BODIES = st.text(st.sampled_from("a{}\"'\\ \né🌧<|>:=to"), min_size=1, max_size=12)


@settings(max_examples=examples(150), deadline=None)
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
    assert parse([text]) == parse(list(text)) == expected


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
