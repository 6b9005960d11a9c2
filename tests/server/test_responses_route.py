"""/v1/responses by OpenAI's client, unmodified."""

import json
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from nanovllm.apps.server.responses_route import ResponsesRequest, messages_of
from tests.glossary import ANSWERS, QUESTIONS
from tests.server.conftest import CITY, Running

MODEL = "model"
TOOL: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
OTHER_TOOL: Any = {"type": "function", "name": "now", "parameters": None, "strict": None}


def respond(client: OpenAI, **fields: Any) -> Any:
    return client.responses.create(model=MODEL, **fields)


def events_of(client: OpenAI, **fields: Any) -> tuple[list[Any], Any]:
    """Return the events of a streamed response, and its end; check what all streams have."""
    events = list(client.responses.create(model=MODEL, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == f"response.{last.response.status}"
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert items == last.response.output
    return events, last.response


def test_answers_a_question(client: OpenAI) -> None:
    found = respond(client, input=QUESTIONS[0], metadata={"a": "b"}, temperature=0.0)
    assert found.output_text == ANSWERS[0]
    assert found.status == "completed"
    assert found.error is found.incomplete_details is None
    assert found.id.startswith("resp_")
    assert found.metadata == {"a": "b"}
    assert found.temperature == 0.0
    assert found.store is False
    (item,) = found.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.usage.output_tokens_details.reasoning_tokens == 0


def test_streams_by_named_events(client: OpenAI, server: Running) -> None:
    events, found = events_of(client, input=QUESTIONS[1])
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWERS[1] == found.output_text
    assert kinds[2:4] == ["output_item.added", "content_part.added"]
    assert kinds[4:-4] == ["output_text.delta"] * len(deltas)
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    reply = server.send("/v1/responses", {"input": QUESTIONS[1], "stream": True})
    lines = reply.body.splitlines()
    assert lines[0] == "event: response.created"
    assert all(line.startswith(("event: response.", "data: {")) for line in lines if line)


def test_input_tokens_are_counted(client: OpenAI) -> None:
    found = respond(client, input="Hi", tools=[TOOL], max_output_tokens=1)
    counted = client.responses.input_tokens.count(model=MODEL, input="Hi", tools=[TOOL])
    assert counted.input_tokens == found.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_max_output_tokens(client: OpenAI, stream: bool) -> None:
    options = {"input": QUESTIONS[0], "max_output_tokens": 3}
    found = events_of(client, **options)[1] if stream else respond(client, **options)
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].status == "incomplete"
    assert ANSWERS[0].startswith(found.output_text)
    assert found.usage.output_tokens == 3


def test_a_conversation_goes_on(client: OpenAI) -> None:
    """What an answer consists of can be sent back as it is."""
    first = respond(client, input=[{"role": "user", "content": QUESTIONS[3]}])
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": QUESTIONS[4]}]}
    given = [{"role": "user", "content": QUESTIONS[3]}, *first.output, question]
    second = respond(client, input=given, instructions="Be brief.", store=True)
    assert second.output_text == ANSWERS[4]
    assert second.instructions == "Be brief."
    assert second.usage.input_tokens > first.usage.total_tokens


def test_json_schema(client: OpenAI) -> None:
    form = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    found = respond(client, input=QUESTIONS[0], text={"format": form}, max_output_tokens=200)
    assert json.loads(found.output_text).keys() == {"city"}
    assert found.text.format.to_dict()["schema"] == CITY
    found = respond(
        client,
        input=QUESTIONS[0],
        max_output_tokens=60,
        text={"format": {"type": "json_object"}},
    )
    assert found.output_text.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_round_of_tool_calls(client: OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {
        "tools": [TOOL, OTHER_TOOL] if choice != "required" else [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": 300,
    }
    given: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    events, found = events_of(client, input=given, **fields)
    assert found.status == "completed"
    (call,) = found.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("weather", "completed")
    assert json.loads(call.arguments).keys() == {"city"}
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[2] == "output_item.added"
    assert kinds[-3:-1] == ["function_call_arguments.done", "output_item.done"]
    kind = "response.function_call_arguments.delta"
    deltas = [event.delta for event in events if event.type == kind]
    assert "".join(deltas) == call.arguments
    assert respond(client, input=given, **fields).output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = respond(
        client, input=[*given, call, result], tools=[TOOL], tool_choice="none", max_output_tokens=5
    )
    assert answer.output[0].type == "message"


def test_parsed_output_of_the_client(client: OpenAI) -> None:
    with client.responses.stream(
        model=MODEL,
        input="Hi",
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=300,
    ) as stream:
        found = stream.get_final_response()
    assert found.output[0].type == "function_call"
    assert found.output[0].parsed_arguments.keys() == {"city"}


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
SPOKEN = (
    "\n\nLet me look.\n"
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
GRAMMAR = f'start: <think> "\\nThe user asks.\\n" </think> {json.dumps(SPOKEN)}'
"""The shipped model does not reason: a grammar makes it write the tags, which are tokens."""


def test_reasoning_text_and_calls_are_items(client: OpenAI, server: Running) -> None:
    body = {"input": "Hi", "tools": [TOOL, OTHER_TOOL], "structured_outputs": {"grammar": GRAMMAR}}
    response = server.send("/v1/responses", body).body
    text = server.send("/v1/responses", {**body, "stream": True}).body
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    streamed = events[-1]["response"]
    for found in (response, streamed):
        reasoning, message, *calls = found["output"]
        assert (reasoning["type"], reasoning["content"][0]["text"]) == (
            *("reasoning", "The user asks."),
        )
        assert (message["type"], message["content"][0]["text"]) == ("message", "Let me look.")
        assert [(call["name"], call["arguments"]) for call in calls] == [
            ("now", "{}"),
            ("weather", '{"city": "Rome"}'),
        ]
        assert {item["status"] for item in found["output"]} == {"completed"}
        counted = found["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert 0 < counted < found["usage"]["output_tokens"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind, last in zip(kinds, ["", *kinds], strict=False) if kind != last] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    adapter: Any = TypeAdapter(ResponseStreamEvent)
    for event in events:  # what the client's types demand of each
        adapter.validate_python(event)
    hidden = server.send("/v1/responses", {**body, "include_reasoning": False}).body
    assert [item["type"] for item in hidden["output"]] == ["message", *["function_call"] * 2]
    again = respond(client, input=[{"role": "user", "content": "Hi"}, *response["output"]])
    assert again.status == "completed"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")],
)
def test_responses_are_not_stored(server: Running, method: str, path: str) -> None:
    reply = server.send(f"/v1/responses/resp_1{path}", method=method)
    assert reply.status == 404
    assert "there is no response 'resp_1': responses are not stored; send" in reply.error["message"]


def test_items_become_messages() -> None:
    body = ResponsesRequest.model_validate(
        {
            "instructions": "Think.",
            "input": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"text": "Hm."}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "a"},
                {"type": "function_call_output", "call_id": "2", "output": [{"text": "b"}]},
                {"type": "reasoning", "id": "rs_2", "summary": [{"text": "So."}]},
                {"type": "reasoning", "id": "rs_3", "summary": [], "encrypted_content": "x"},
                {"role": "assistant", "content": "Both.", "status": "completed", "id": "msg_1"},
                {"role": "assistant", "content": "Done."},
            ],
        }
    )
    found = [message.model_dump(exclude_none=True) for message in messages_of(body)]
    system, developer, user, calls, *results, both, done = found
    assert (system["role"], system["content"]) == ("system", "Think.")
    assert developer["role"] == "developer"
    assert user == {"role": "user", "content": "Hi"}
    assert calls["reasoning_content"] == "Hm."
    assert [call["function"]["name"] for call in calls["tool_calls"]] == ["f", "g"]
    assert [result["name"] for result in results] == ["f", "g"]
    assert [result["tool_call_id"] for result in results] == ["1", "2"]
    assert both == {"role": "assistant", "reasoning_content": "So.", "content": "Both."}
    assert done == {"role": "assistant", "content": "Done."}


OTHER = {"type": "function", "name": "f"}
FORM = {"type": "json_schema", "schema": {"type": "x"}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "r"}, "previous_response_id", "not stored"),
        ({"background": True}, "background", "leave it out"),
        ({"conversation": "c"}, "conversation", "send the earlier items as input"),
        ({"include": ["all"]}, "include", "reasoning.encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "tool_choice": "f"}, "tool_choice", "'required'"),
        ({"tools": [TOOL], "tool_choice": OTHER}, "tool_choice", "a tool named 'f'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1 to"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "needs"),
        ({"text": {"format": FORM}}, "text.format", "cannot be used"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format", "both"),
        ({"input": "Hi " * 2000}, "input", "1024"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text only"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "are not stored"),
        ({"input": [CALL] * 129}, "input", "at most 128 calls in succession"),
        ({"input": [{"role": "me", "content": ""}]}, "input[0].role", "'assistant'"),
        ({"input": [{**CALL, "arguments": 5}]}, "input[0].arguments", "valid string"),
    ],
)
def test_bad_requests_are_refused(
    server: Running, fields: dict[str, Any], param: str, message: str
) -> None:
    reply = server.send("/v1/responses", {"input": "Hi", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert message in reply.error["message"]


def test_a_long_conversation_is_cut_if_asked(client: OpenAI) -> None:
    """The end of it is kept, with room for the answer: of at most half of the context."""
    given = [{"role": "user", "content": "Hi " * 2000}, {"role": "user", "content": QUESTIONS[0]}]
    for max_tokens, kept in ((2, 1022), (40, 984), (1000, 512), (None, 768)):
        found = respond(client, input=given, truncation="auto", max_output_tokens=max_tokens)
        assert found.usage.input_tokens == kept
        assert found.truncation == "auto"


def test_one_call_if_asked(client: OpenAI) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    fields: Any = {
        "input": "Hi",
        "tools": [TOOL, OTHER_TOOL],
        "parallel_tool_calls": False,
        "extra_body": {"structured_outputs": {"choice": [f"{call}\n{call}"]}},
    }
    found = respond(client, **fields)
    assert [(item.type, item.name) for item in found.output] == [("function_call", "now")]


def test_too_long_a_prompt_has_openais_code(server: Running) -> None:
    """Symptom: agents did not shorten the conversation, as the client shows them no code."""
    for size in (2000, 400_000):  # refused by its tokens, and before they are all counted
        messages = [{"role": "user", "content": "Hi " * size}]
        for path, body in (
            ("/v1/responses", {"input": "Hi " * size}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"messages": messages, "max_tokens": 1}),
        ):
            reply = server.send(path, body)
            error = reply.body["error"]
            assert reply.status == 400
            assert "prompt is too long" in error["message"]
            assert path == "/v1/messages" or error["code"] == "context_length_exceeded"
