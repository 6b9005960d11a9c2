"""Tools and forms through the server: what a grammar enforces, an untrained model obeys too."""

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

MODEL = "model"
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "hot": {"type": "boolean"}},
    "required": ["city", "hot"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "A tool", "parameters": SCHEMA}}
    for name in ("get_weather", "get_time")
]


def join_calls(stream: Any) -> tuple[list[dict[str, str]], str | None]:
    """Return name and arguments of each streamed call, and the finish reason."""
    calls: list[dict[str, str]] = []
    reason = None
    for chunk in stream:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    calls.append({"name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments
    return calls, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}]
)
def test_a_tool_is_called(client: OpenAI, choice: Any, stream: bool) -> None:
    found: Any = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        stream=stream,
        max_tokens=300,
    )
    if stream:
        calls, reason = join_calls(found)
    else:
        reason = found.choices[0].finish_reason
        calls = [call.function.model_dump() for call in found.choices[0].message.tool_calls]
        assert found.choices[0].message.content is None
    assert reason == "tool_calls"
    (call,) = calls
    jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
    assert choice == "required" or call["name"] == "get_time"


def test_tools_that_are_not_to_be_called(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=10
    )
    assert found.choices[0].message.tool_calls is None
    assert found.choices[0].message.content


FORMS: list[Any] = [
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
        }
    },
    {"structured_outputs": {"json": SCHEMA}},
    {"guided_json": SCHEMA},
]


@pytest.mark.parametrize("form", FORMS, ids=["response_format", "structured_outputs", "guided"])
def test_an_answer_fits_its_schema(client: OpenAI, form: dict[str, Any]) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=300, extra_body=form
    )
    jsonschema.validate(json.loads(chat.choices[0].message.content or ""), SCHEMA)
    text = client.completions.create(model=MODEL, prompt="JSON:", max_tokens=300, extra_body=form)
    jsonschema.validate(json.loads(text.choices[0].text), SCHEMA)


def test_other_forms(client: OpenAI) -> None:
    def ask(**form: Any) -> str:
        found = client.completions.create(
            model=MODEL, prompt="It is", max_tokens=60, extra_body=form
        )
        return found.choices[0].text

    assert ask(guided_choice=["red", "green"]) in ("red", "green")
    assert ask(guided_regex="[0-9]{3}-[a-c]{2}").replace("-", "").isalnum()
    assert ask(guided_grammar='start: "a" "b"+ "c"').startswith("ab")
    assert ask(structured_outputs={"choice": ["x"]}) == "x"
