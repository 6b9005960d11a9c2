"""Tool calls in chats by OpenAI's client, whole and streamed: the shipped model is made to call."""

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from nanovllm.apps.server.output_parsers.answer_format import find_answer_format
from nanovllm.apps.server.protocol import Tool
from tests.glossary import ANSWERS, QUESTIONS
from tests.server.conftest import Running

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 7]}},
    "required": ["city", "days"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": False}},
    {"type": "function", "function": {"name": "now", "description": "The time"}},
]
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def chat(client: OpenAI, *, stream: bool = False, **fields: Any) -> Any:
    """Return the first choice of an answer; a streamed one is put together by the client."""
    given: dict[str, Any] = {"model": "model", "tools": TOOLS, "max_tokens": 300, **fields}
    given.setdefault("messages", [{"role": "user", "content": "How is the weather?"}])
    if not stream:
        return client.chat.completions.create(**given).choices[0]
    with client.chat.completions.stream(**given) as events:
        return events.get_final_completion().choices[0]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    found = choice.message.tool_calls or []
    assert len({call.id for call in found}) == len(found)
    return [(call.function.name, json.loads(call.function.arguments)) for call in found]


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called_once(client: OpenAI, stream: bool) -> None:
    choice = chat(client, stream=stream, tool_choice=WEATHER)
    ((name, arguments),) = calls_of(choice)
    assert name == "weather"
    assert arguments.keys() == {"city", "days"}
    assert arguments["days"] in (1, 7)
    assert not choice.message.content
    assert choice.finish_reason == "tool_calls"
    choice = chat(client, stream=stream, tool_choice="required", parallel_tool_calls=False)
    ((name, arguments),) = calls_of(choice)
    jsonschema.validate(arguments, CITY if name == "weather" else {"maxProperties": 0})


def test_every_answer_of_n_calls(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": "Hi"}],
        tools=TOOLS,
        tool_choice=WEATHER,
        n=3,
        temperature=2.0,
        seed=1,
        max_tokens=300,
    )
    assert [calls_of(choice)[0][0] for choice in answer.choices] == ["weather"] * 3
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_calls_of_an_unasked_call(client: OpenAI, stream: bool) -> None:
    said = f"Let me look.\n{CALL}\n{CALL}"
    form = {"structured_outputs": {"choice": [said]}}
    choice = chat(client, stream=stream, extra_body=form)
    assert choice.message.content == "Let me look."
    assert calls_of(choice) == [("now", {}), ("now", {})]
    assert choice.finish_reason == "tool_calls"
    choice = chat(client, stream=stream, extra_body=form, tool_choice="none")
    assert (choice.message.content, calls_of(choice)) == (said, [])
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_text_after_a_call_begins_a_line(client: OpenAI, stream: bool) -> None:
    form = {"structured_outputs": {"choice": [f"Let me look. {CALL} It is noon."]}}
    choice = chat(client, stream=stream, extra_body=form)
    assert choice.message.content == "Let me look.\nIt is noon."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "arguments", "reason"),
    [('o": ', '{"t', "stop"), ("</tool_call>", '{"to": "Rome"}', "tool_calls"), ("me", "", "stop")],
)
def test_a_stop_string_inside_a_call(
    client: OpenAI, stream: bool, stop: str, arguments: str, reason: str
) -> None:
    said = '<tool_call>\n{"name": "now", "arguments": {"to": "Rome"}}\n</tool_call>'
    form = {"structured_outputs": {"choice": [said]}}
    choice = chat(client, stream=stream, extra_body=form, stop=stop)
    assert choice.finish_reason == reason
    calls = choice.message.tool_calls or []
    assert [call.function.arguments for call in calls] == [arguments] * bool(arguments)


def test_a_call_that_is_cut_off(client: OpenAI) -> None:
    for max_tokens in (1, 9, 17):
        asked: Any = {"tool_choice": WEATHER, "max_tokens": max_tokens}
        choice = chat(client, **asked)
        assert choice.finish_reason == "length"
        assert not choice.message.content
        chunks = client.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": "Hi"}],
            tools=TOOLS,
            stream=True,
            **asked,
        )
        assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_a_round(client: OpenAI, server: Running) -> None:
    """The call and its result can be sent back as they are; the model answers with text."""
    asked: dict[str, Any] = {"role": "user", "content": QUESTIONS[0]}
    first = chat(client, messages=[asked], tool_choice=WEATHER)
    (call,) = first.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [asked, first.message, result, asked]
    assert chat(client, messages=turns).message.content == ANSWERS[0]
    given = {"messages": [asked, first.message.to_dict(), result], "tools": TOOLS}
    tokens = server.send("/tokenize", given).body["tokens"]
    text = server.send("/detokenize", {"tokens": tokens}).body["prompt"]
    assert '"name": "weather"' in text.partition("<|im_end|>")[0]
    answer = text.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    tools = [Tool(**TOOLS[0]["function"])]
    parser = find_answer_format(None, "hermes", "none").parser("", tools)
    start, arguments = parser.feed(answer) + parser.finish()
    assert getattr(start, "name", None) == "weather"
    assert json.loads(getattr(arguments, "text", "")) == json.loads(call.function.arguments)
    assert "<tool_response>\nsunny\n</tool_response>" in text
