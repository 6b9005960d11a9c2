"""/v1/messages by Anthropic's client, unmodified."""

import json
import time
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from nanovllm.apps.server.messages_route import (
    CountTokensRequest,
    MessagesRequest,
    _object,
    messages_of,
)
from tests.glossary import ANSWERS, QUESTIONS
from tests.server.conftest import CITY, Running

MODEL = "model"
TOOL: Any = {"name": "weather", "description": "of a city", "input_schema": CITY}
OTHER_TOOL: Any = {"name": "now", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def anthropic_client(server: Running) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="none", max_retries=0)


GREEDY: Any = {"temperature": 0.0}  # not an argument of today's client


def ask(client: Anthropic, content: Any, **fields: Any) -> Any:
    given = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": content}]}
    return client.messages.create(**(given | fields), extra_body=GREEDY)


def test_answers_a_question(anthropic_client: Anthropic) -> None:
    found = ask(anthropic_client, QUESTIONS[0], metadata={"user_id": "me"})
    (block,) = found.content
    assert (block.type, block.text) == ("text", ANSWERS[0])
    assert (found.role, found.type, found.model) == ("assistant", "message", MODEL)
    assert found.id.startswith("msg_")
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
    again = ask(anthropic_client, QUESTIONS[0]).usage
    assert again.output_tokens == found.usage.output_tokens > 0
    assert again.cache_read_input_tokens + again.input_tokens == (
        found.usage.cache_read_input_tokens + found.usage.input_tokens
    )


def test_streams_by_named_events(anthropic_client: Anthropic, server: Running) -> None:
    question = {"role": "user", "content": QUESTIONS[1]}
    fields: Any = {"model": MODEL, "max_tokens": 64, "messages": [question]}
    with anthropic_client.messages.stream(**fields, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWERS[1]
        found = stream.get_final_message()
    assert found.stop_reason == "end_turn"
    assert found.usage.output_tokens > 0
    reply = server.send("/v1/messages", {**fields, **GREEDY, "stream": True})
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    names = [
        line.removeprefix("event: ") for line in reply.body.splitlines() if line[:6] == "event:"
    ]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_ends_of_a_message(anthropic_client: Anthropic) -> None:
    assert ask(anthropic_client, QUESTIONS[0], max_tokens=2).stop_reason == "max_tokens"
    word = ANSWERS[0].split()[2]
    found = ask(anthropic_client, QUESTIONS[0], stop_sequences=["#", word])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", word)
    assert found.content[0].text == ANSWERS[0][: ANSWERS[0].index(word)]


def test_continues_the_models_own_message(anthropic_client: Anthropic) -> None:
    begin = ANSWERS[0][:20]
    messages = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": begin},
    ]
    found = ask(anthropic_client, "", messages=messages)
    assert begin + found.content[0].text == ANSWERS[0]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_round_of_tool_calls(anthropic_client: Anthropic, choice: Any) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    asked = {"role": "user", "content": "The weather in Rome?"}
    fields: Any = {"model": MODEL, "max_tokens": 96, "messages": [asked], "tools": [TOOL]}
    found = anthropic_client.messages.create(**fields, tool_choice=choice)
    (call,) = found.content
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (call.name, call.input.keys()) == ("weather", {"city"})
    assert found.stop_reason == "tool_use"
    with anthropic_client.messages.stream(**fields, tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    assert streamed.stop_reason == "tool_use"
    assert streamed.content[0].input.keys() == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "25 C"}
    turn: Any = [
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Thank you."}]},
    ]
    fields["messages"] += turn
    last = anthropic_client.messages.create(**fields, tool_choice={"type": "none"})
    assert last.content[0].type == "text"


def test_counts_tokens(anthropic_client: Anthropic) -> None:
    given: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTIONS[0]}]}
    count = anthropic_client.messages.count_tokens(**given).input_tokens
    usage = ask(anthropic_client, QUESTIONS[0]).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    with_system = anthropic_client.messages.count_tokens(**given, system="Be brief.")
    assert with_system.input_tokens > count


def test_anthropics_tool_loop_goes_on_without_a_thread(anthropic_client: Anthropic) -> None:
    """It asks for a conversation that the server holds, and learns that there is none."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Get the weather of a city."""
        return f"sunny in {city}"

    runner = anthropic_client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=64,
        tools=[weather],
        messages=[{"role": "user", "content": QUESTIONS[0]}],
        max_iterations=1,
    )
    assert [message.role for message in runner] == ["assistant"]


def test_a_form_of_the_text_may_stand_next_to_calls() -> None:
    """Symptom: a tool that must be called was refused, as an answer of calls has no text."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": CITY}},
    }
    assert list(MessagesRequest.model_validate(body).forms()) == ["output_config.format"]


def converted(*messages: Any, system: Any = None) -> list[dict[str, Any]]:
    body = MessagesRequest.model_validate(
        {"max_tokens": 1, "messages": list(messages), "system": system}
    )
    found = messages_of(body)
    return [message.model_dump(exclude_unset=True) for message in found]


def test_blocks_become_messages() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "any"}
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [
            {"type": "text", "text": "5"},
            {"type": "tool_reference", "tool_name": "g", "cache_control": None},
        ],
    }
    found = converted(
        {"role": "user", "content": [document, {"type": "text", "text": "Sum it."}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I do."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        {"role": "user", "content": "Well?"},
        system="x-anthropic-billing-header: a=1;\nBe kind.",
    )
    function = {"name": "f", "arguments": {"a": 1}}
    assert found == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "T\nD\n\nSum it."},
        {
            "role": "assistant",
            "content": "I do.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5\ng", "name": "f"},
        {"role": "user", "content": "And?\n\nWell?"},
    ]


def test_results_without_calls_take_no_longer_than_others() -> None:
    """Symptom: each searches the calls of all turns; a body of 0.7 MB takes a minute."""
    turns = [said(*[{**CALL, "id": str(i)}] * 128, RESULT) for i in range(32)]
    messages = [*turns, said(*[RESULT] * 4064)]
    body = MessagesRequest.model_validate({"max_tokens": 1, "messages": messages})
    start = time.process_time()
    assert len(messages_of(body)) == 32 * 2 + 4064
    assert time.process_time() - start < 2


ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
GRAMMAR = f'start: <think> "Hm." </think> "Let me see." {json.dumps(ROME)}'


def test_every_kind_of_block_is_streamed(server: Running) -> None:
    """The shipped model neither reasons nor calls: a grammar makes it do both."""
    body = {"max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
    body |= {"thinking": {"type": "adaptive"}, "structured_outputs": {"grammar": GRAMMAR}}
    message = server.send("/v1/messages", body).body
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    text = server.send("/v1/messages", {**body, "stream": True}).body
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    stream = anthropic.lib.streaming._messages  # what the client makes of the events
    snapshot, buffers = None, {}
    for event in events:
        if event["type"] != "ping":
            snapshot = stream.accumulate_event(
                event=adapter.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
            )
    blocks: Any = snapshot.content
    assert blocks[0].thinking.strip() == "Hm."
    assert blocks[0].signature == message["content"][0]["signature"]
    assert blocks[1].text.strip() == "Let me see."
    assert blocks[2].input == {"city": "Rome"} == message["content"][2]["input"]


def test_a_call_that_is_cut_off_keeps_what_is_there() -> None:
    assert _object('{"a": 1, "b": [2') == {"a": 1, "b": [2]}
    assert _object("[1") == _object("nonsense") == {}


REFERENCE = {"type": "tool_reference", "name": "g"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "none"}
TEXT = {"type": "text", "text": "a"}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": {"type": "content", **source}}


def test_models_have_names_to_show(anthropic_client: Anthropic) -> None:
    (found,) = anthropic_client.models.list().data
    assert found.display_name == found.id == MODEL


def test_texts_in_documents_and_search_results_are_read() -> None:
    hit = {"type": "search_result", "source": "u", "title": "t", "content": [TEXT, TEXT]}
    documents = [{**document(content=[TEXT]), "title": "d"}, document(content="b")]
    found = CountTokensRequest.model_validate(
        {
            "messages": [
                {"role": "user", "content": [hit, *documents]},
                said({**CALL, "id": "c"}),
                {"role": "user", "content": [{**RESULT, "tool_use_id": "c", "content": [hit]}]},
            ]
        }
    )
    first, _, result = messages_of(found)
    assert first.content == "t\nu\na\na\n\nd\na\n\nb"
    assert result.content == "t\nu\na\na"


def test_tools_are_those_after_the_last_message() -> None:
    def tool(name: str, **fields: Any) -> dict[str, Any]:
        return {"name": name, "input_schema": {"type": "object", **fields}}

    def change(kind: str, **fields: Any) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": fields}]}

    def names(*changes: dict[str, Any]) -> list[str]:
        messages = [{"role": "user", "content": "a"}, *changes]
        given = {"messages": messages, "tools": [tool("f"), tool("g")]}
        found = CountTokensRequest.model_validate(given)
        assert len(messages_of(found)) == 1
        return [function.name for function in found.functions]

    f, g = ({"type": "tool_reference", "name": name} for name in "fg")
    assert names(change("addition", **f)) == ["f", "g"]
    assert names(change("removal", **f)) == ["g"]
    assert names(change("removal", **f), change("addition", **f)) == ["f", "g"]
    assert names(change("removal", **f), change("removal", **g)) == []


def test_the_billing_line_stays_out_wherever_the_system_speaks() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=d1d48;"
    for content in (line, [{"type": "text", "text": line}], line + "\nb"):
        given = [{"role": "user", "content": line}, {"role": "system", "content": content}]
        found = CountTokensRequest.model_validate({"system": content, "messages": given})
        texts = [message.content for message in messages_of(found)]
        assert texts == (["b", line, "b"] if str(content).endswith("b") else [line])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens should be a valid integer"),
        ({"messages": [said(IMAGE)]}, "part of type 'image', but the model reads text only"),
        (
            {"messages": [said({"type": "server_tool_use"})]},
            "tool_result or tool_addition or tool_removal, got 'server_tool_use'",
        ),
        (
            {"messages": [said({"type": "tool_removal", "tool": REFERENCE})]},
            "a tool_removal names 'g': define it",
        ),
        (
            {"messages": [said(document(content=[IMAGE]))]},
            "must be of type text, got 'image': the models here read text only",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "runs no tools itself"),
        ({"tools": [{"name": "f"}]}, "input_schema is missing"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [OTHER_TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "named 'f'"),
        ({"stop": "a"}, "no field 'stop'; did you mean 'stop_sequences'?"),
        ({"messages": [{"role": "user", "content": []}]}, "must have some content"),
        ({"messages": [said(CALL)] * 129}, "at most 128 tool_use blocks in succession"),
        ({"messages": [said({**CALL, "name": ""})]}, "name string should have at least 1"),
        ({"messages": [said(*[CALL] * 4096)] * 5}, "must have at most 16384 blocks"),
        ({"messages": [said(*[{**RESULT, "content": [TEXT] * 9}] * 1700)]}, "16384 blocks"),
    ],
)
def test_bad_requests_say_what_is_wrong(server: Running, fields: Any, words: str) -> None:
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], **fields}
    reply = server.send("/v1/messages", body)
    assert reply.status == 400
    assert reply.body.keys() == {"type", "error"}
    assert reply.body["error"]["type"] == "invalid_request_error"
    assert words in reply.body["error"]["message"]


def test_errors_have_anthropics_form(anthropic_client: Anthropic, server: Running) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        ask(anthropic_client, "Hi", model="claude-opus-9")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: .*max_model_len"):
        ask(anthropic_client, "word " * 5000)
    begins = "'message': 'prompt is too long: [0-9]+ tokens"
    with pytest.raises(anthropic.BadRequestError, match=begins):
        ask(anthropic_client, "glossary, " * 520)
    reply = server.send("/v1/messages/batches", {})
    assert reply.status == 404
    assert reply.body["error"]["type"] == "not_found_error"
