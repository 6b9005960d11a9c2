"""Schemas of tools are bounded and checked before anything is made of them."""

import time
from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from nanovllm import AsyncLLM
from nanovllm.apps.server.protocol.tool_schemas import MAX_VALUES, check_keywords, check_size
from tests.server.conftest import Running, running

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"type": {"type": ["string", "null"]}}},
        {"type": "made up", "properties": [], "anyOf": {}, "enum": None, "$ref": "", "items": True},
        {"properties": {"properties": {"enum": ["enum"], "const": {"type": 5}}}},
        {"default": {"type": 5}, "properties": {"a": "no schema"}, "required": True},
    ],
)
def test_right_keywords(schema: dict[str, Any]) -> None:
    check_keywords(schema, "parameters")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": 5}, r"parameters.type must be the name of a type .*got 5"),
        ({"type": ["string", 5]}, r"parameters.type must be"),
        ({"properties": {"a": {"type": {"b": 1}}}}, r"parameters.properties.a.type must be"),
        ({"properties": ["a"]}, r"parameters.properties must be an object of schemas"),
        ({"patternProperties": {"b": {"enum": "c"}}}, r"patternProperties.b.enum must be a list"),
        ({"$defs": {"A": {"$ref": 1}}}, r"parameters.\$defs.A.\$ref must be a text"),
        ({"anyOf": [{}, {"oneOf": 5}]}, r"parameters.anyOf\[1\].oneOf must be a list of schemas"),
        ({"items": {"allOf": {"a": 1}}}, r"parameters.items.allOf must be a list of schemas"),
        ({"not": {"definitions": 1}}, r"parameters.not.definitions must be an object"),
        ({"additionalProperties": {"type": 1.5}}, r"parameters.additionalProperties.type must be"),
    ],
)
def test_wrong_keywords(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(PydanticCustomError, match=message):
        check_keywords(schema, "parameters")


def test_values_are_counted_over_all_schemas() -> None:
    schema = {"enum": [0] * (MAX_VALUES // 2)}
    check_size([schema, None], "tools")
    with pytest.raises(PydanticCustomError, match="send fewer tools"):
        check_size([schema, schema], "tools")


@pytest.fixture(scope="module")
def tagged(front: str, async_llm: AsyncLLM) -> Any:
    """A server of a model that writes calls as Qwen 3.5 does."""
    with running(async_llm, tool_call_parser="qwen3_coder") as found:
        yield found


def body(schema: Any, **fields: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    call = "<function=f>\n(<parameter=a>\n1\n</parameter>\n){2}</function>"
    form = {"structured_outputs": {"regex": call}}
    return {"messages": MESSAGES, "tools": [tool], "max_tokens": 400, **form, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"properties": {"a": {"type": 5}}}, "tools[0].function.parameters.properties.a.type"),
        ({"properties": {"a": {"anyOf": 5}}}, "tools[0].function.parameters.properties.a.anyOf"),
        (
            {"properties": {"a": {"anyOf": [{"type": "string"}] * 100_000}}},
            "tools[0].function.parameters",
        ),
    ],
)
def test_a_schema_that_cannot_be_read_is_the_clients_error(
    tagged: Running, schema: Any, param: str, stream: bool
) -> None:
    """Symptom: 500, or no answer to anybody for 19 s."""
    start = time.monotonic()
    reply = tagged.send(CHAT, body(schema, stream=stream))
    assert (reply.status, reply.error["param"]) == (400, param)
    assert time.monotonic() - start < 5
    function = {"type": "function", "name": "f", "parameters": schema}
    reply = tagged.send("/v1/responses", {"input": "Hi", "tools": [function]})
    assert (reply.status, reply.error["param"]) == (400, param.replace(".function", ""))


def test_tools_that_are_too_large_together(tagged: Running) -> None:
    given = body({"enum": [0] * (MAX_VALUES // 2)})
    given["tools"] *= 2
    reply = tagged.send(CHAT, given)
    assert (reply.status, reply.error["param"]) == (400, "tools")


def test_a_large_schema_says_types(tagged: Running) -> None:
    schema = {"properties": {"a": {"anyOf": [{"type": "integer"}] * (MAX_VALUES // 2 - 9)}}}
    reply = tagged.send(CHAT, body(schema, n=3, truncate_prompt_tokens=50, max_tokens=60))
    assert reply.status == 200
    (call,) = reply.body["choices"][2]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a": 1, "a": 1}'


@pytest.mark.parametrize("name", ["self", "cls", "args", "kwargs", "__init__"])
def test_names_in_a_form_are_fields_only(tagged: Running, name: str) -> None:
    """Symptom: 500 for {"self": 1}, which reached the keyword arguments of a method."""
    given = {"messages": MESSAGES, "structured_outputs": {name: 1, "json_object": True}}
    reply = tagged.send(CHAT, given)
    assert (reply.status, reply.error["param"]) == (400, "structured_outputs")
    assert f"has no field '{name}'" in reply.error["message"]
