"""Schemas of tools are bounded and checked before anything is made of them."""

import time
import tracemalloc
from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from nanovllm import AsyncLLM
from nanovllm.apps.server.protocol import MAX_VALUES, check_keywords, check_size
from tests.server.conftest import Running, running

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


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


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": 5}, "type"),
        ({"properties": {"a": {"type": ["string", {}]}}}, "properties.a.type"),
        ({"properties": ["a"]}, "properties"),
        ({"anyOf": [{}, {"oneOf": 5}]}, "anyOf[1].oneOf"),
        ({"$defs": {"A": {"$ref": 1}}}, "$defs.A.$ref"),
        ({"items": {"allOf": {"a": 1}}}, "items.allOf"),
        ({"patternProperties": {"b": {"enum": "c"}}}, "patternProperties.b.enum"),
        ({"not": {"definitions": 1}}, "not.definitions"),
        ({"additionalProperties": {"type": 1.5}}, "additionalProperties.type"),
    ],
)
def test_a_keyword_of_a_wrong_kind_is_named(tagged: Running, schema: Any, place: str) -> None:
    """Symptom: 500."""
    reply = tagged.send(CHAT, body(schema))
    assert (reply.status, reply.error["param"]) == (400, f"tools[0].function.parameters.{place}")
    assert reply.error["message"].startswith(f"parameters.{place} must be ")


def test_other_schemas_pass(tagged: Running) -> None:
    """Models are shown them as they are."""
    for schema in (
        {"type": "made up", "properties": [], "anyOf": {}, "enum": None, "$ref": "", "items": True},
        {"properties": {"properties": {"enum": ["enum"], "const": {"type": 5}}}},
        {"default": {"type": 5}, "properties": {"type": {"type": ["string", "null"]}}},
    ):
        assert tagged.send(CHAT, body(schema)).status == 200


def test_a_very_large_schema_is_refused_at_once(tagged: Running) -> None:
    """Symptom: no answer to anybody for 19 s."""
    schema = {"properties": {"a": {"anyOf": [{"type": "string"}] * 100_000}}}
    start = time.monotonic()
    reply = tagged.send(CHAT, body(schema))
    assert (reply.status, reply.error["param"]) == (400, "tools[0].function.parameters")
    function = {"type": "function", "name": "f", "parameters": schema}
    reply = tagged.send("/v1/responses", {"input": "Hi", "tools": [function]})
    assert (reply.status, reply.error["param"]) == (400, "tools[0].parameters")
    assert time.monotonic() - start < 5


def test_tools_that_are_too_large_together(tagged: Running) -> None:
    given = body({"enum": [0] * (MAX_VALUES // 2)})
    given["tools"] *= 2
    reply = tagged.send(CHAT, given)
    assert (reply.status, reply.error["param"]) == (400, "tools")


def test_a_large_schema_says_types(tagged: Running) -> None:
    schema = {"properties": {"a": {"anyOf": [{"type": "integer"}] * (MAX_VALUES // 4)}}}
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


def test_a_long_name_is_not_copied() -> None:
    """Symptom: a name of 1.5 MB with 16,000 properties took 24 GB."""
    schema = {"properties": {"k" * 2**16: {"properties": {str(i): {} for i in range(2000)}}}}
    tracemalloc.start()
    check_keywords(schema, "parameters")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22
