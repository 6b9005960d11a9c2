"""Tools and forms through the server: what a grammar enforces, an untrained model obeys too."""

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from tests.server.conftest import Running

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


@pytest.mark.parametrize(
    ("form", "choice"),
    [
        ({"guided_choice": ["a"]}, "required"),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            {"type": "function", "function": {"name": "get_time"}},
        ),
    ],
)
def test_a_form_beside_a_tool_that_must_be_called_is_refused(
    server: Running, form: dict[str, Any], choice: Any
) -> None:
    """Symptom: structured_outputs is dropped silently."""
    (field,) = form.keys() - {"response_format"}  # of which "text" says nothing
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 5, **form}
    reply = server.send("/v1/chat/completions", {**body, "tool_choice": choice})
    assert (reply.status, reply.error["param"]) == (400, field)
    assert f"tool_choice and {field} both say what to write" in reply.error["message"]
    named = choice if choice == "required" else {"type": "function", "name": "get_time"}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"model": MODEL, "input": "Hi", "tools": tools, "tool_choice": named}
    reply = server.send("/v1/responses", {**body, field: form[field]})
    assert (reply.status, reply.error["param"]) == (400, field)


def test_a_response_format_beside_a_tool_that_must_be_called(client: OpenAI) -> None:
    """It is the form of a text, and such an answer has none. OpenAI's API takes both."""
    found = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        response_format={"type": "json_object"},
    )
    assert found.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(("is_inner", "stream"), [(False, True), (True, False), (True, True)])
def test_a_schema_beyond_a_limit_is_the_clients_error(
    server: Running, is_inner: bool, stream: bool
) -> None:
    """Symptom: it compiles, and fails at a later token with 500, which clients send again."""
    schema: Any = {"type": "object", "properties": {f"k{i}": {"const": i} for i in range(700)}}
    if is_inner:
        before = {"enum": [1, 2]}
        schema = {"properties": {"a": before, "b": schema}, "required": ["a", "b"]}
        schema["type"] = "object"
    form = {"json": schema, "disable_any_whitespace": True}
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 30, "structured_outputs": form}
    reply = server.send("/v1/chat/completions", {**body, "stream": stream})
    if is_inner and stream:
        assert reply.status == 200
        error = json.loads(reply.body.split("\n\n")[-3].removeprefix("data: "))["error"]
    else:
        assert reply.status == 400
        error = reply.error
        assert error["param"] == (None if is_inner else "structured_outputs")
    assert error["type"] == "invalid_request_error"
    unfinished = "the output cannot be finished: " if is_inner else ""
    assert error["message"].startswith(f"{unfinished}structured_outputs.json '{{")
    assert "the limit is 2000" in error["message"]


def test_an_error_of_tools_names_them(server: Running) -> None:
    """Symptom: it is an excerpt of a grammar that the client has not written."""
    good = {"name": "good", "parameters": {"properties": {"a": {"format": "path"}}}}
    bad = {"name": "bad", "parameters": {"properties": {"a": {"not": {}}}}}
    tools = [{"type": "function", "function": function} for function in (good, bad)]
    body = {"model": MODEL, "messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    reply = server.send("/v1/chat/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert reply.error["message"] == (
        'tools cannot be used: the parameters of "bad": the keyword "not" of JSON Schema cannot be '
        "enforced: write the schema without"
    )


@pytest.mark.parametrize(
    ("kind", "name"), [("json_object", "schema"), ("json", "value"), ("json_schema", "schema")]
)
def test_a_schema_as_llama_cpp_and_tgi_write_it(server: Running, kind: str, name: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40}
    form = {"type": kind, name: {"const": "42"}}
    reply = server.send("/v1/chat/completions", {**body, "response_format": form})
    assert reply.body["choices"][0]["message"]["content"] == '"42"'
    for wrong in ({**form, name: 123}, {**form, name: {"type": "hiccup"}}, {**form, "other": 1}):
        reply = server.send("/v1/chat/completions", {**body, "response_format": wrong})
        assert (reply.status, (reply.error["param"] or "")[:15]) == (400, "response_format")


@pytest.mark.parametrize("kind", ["text", "json_object"])
def test_a_schema_of_another_type_is_refused(server: Running, kind: str) -> None:
    """Symptom: the answer is any text, though the request has a schema."""
    schema = {"name": "a", "schema": {"const": "42"}}
    body = {"messages": MESSAGES, "response_format": {"type": kind, "json_schema": schema}}
    reply = server.send("/v1/chat/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "response_format.type")
    reply = server.send(
        "/v1/responses", {"input": "?", "text": {"format": {"type": kind, **schema}}}
    )
    assert (reply.status, reply.error["param"]) == (400, "text.format.type")
    assert reply.error["message"] == f"a schema needs the type \"json_schema\", got '{kind}'"


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
