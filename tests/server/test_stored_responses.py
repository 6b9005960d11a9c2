"""Responses that are kept: conversations by id, the routes of a response, and what bounds them."""

from typing import Any

import openai
import pytest
from hypothesis import given, settings, strategies as st
from openai import OpenAI

from nanovllm import AsyncLLM
from nanovllm.apps.server.error_bodies import APIError
from nanovllm.apps.server.protocol.responses import ResponsesRequest
from nanovllm.apps.server.response_items import (
    conversation_of,
    items_of,
    messages_of,
    stored_items,
)
from nanovllm.apps.server.response_store import ResponseStore, StoredResponse
from tests.glossary import ANSWERS, QUESTIONS
from tests.server.conftest import Running, running
from tests.server.test_responses_route import MODEL, TOOL, respond

ROUTE = "/v1/responses"


def stored(name: str, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(name, previous, b"", b"x" * size)


def ids(chain: list[StoredResponse]) -> list[str]:
    return [each.response_id for each in chain]


def test_a_conversation_loses_its_end_before_its_beginning() -> None:
    store = ResponseStore(max_responses=4, max_bytes=1000)
    for name, previous in (("a", None), ("other", None), ("b", "a"), ("c", "b")):
        store.add("", stored(name, previous))
    assert ids(store.conversation("", "c")) == ["a", "b", "c"]
    store.add("", stored("d"))  # in place of the one not used for longest
    with pytest.raises(APIError, match="no response 'other'"):
        store.get("", "other")
    store.add("", stored("e"))
    assert ids(store.conversation("", "b")) == ["a", "b"]
    with pytest.raises(APIError) as raised:
        store.conversation("", "c")
    assert raised.value.status_code == 400
    assert raised.value.body["error"]["code"] == "previous_response_not_found"


def test_bytes_are_bounded() -> None:
    store = ResponseStore(max_responses=100, max_bytes=100)
    for index in range(50):
        store.add("", stored(str(index), size=30))
    assert [index for index in range(50) if (("", str(index)) in store._kept)] == [47, 48, 49]
    store.add("", stored("large", size=101))  # is not kept, and pushes nothing out
    assert ("", "49") in store._kept
    assert store._num_bytes.total() == 90
    for _ in range(9):  # in place of the last one of the name
        store.add("", stored("same", size=60))
    assert store._num_bytes.total() == 90  # with "49"


@pytest.mark.parametrize("limits", [(100, 100), (10, 1000)])
def test_an_owner_keeps_a_fair_share(limits: tuple[int, int]) -> None:
    """Symptom: whoever stored much pushed out what all others had."""
    store = ResponseStore(*limits)
    for name in ("a", "b"):
        store.add("mine", stored(name))
    for index in range(50):
        store.add("yours", stored(str(index)))
    store.add("yours", stored("large", size=limits[1] + 1))
    assert ids(store.get("mine", "a") + store.get("mine", "b")) == ["a", "b"]
    assert store._num_responses == {"mine": 2, "yours": 8}
    for index in range(50):
        store.add("mine", stored(str(index)))
    assert store._num_responses == {"mine": 5, "yours": 5}


def test_owners_share_nothing_and_rings_end() -> None:
    store = ResponseStore(max_responses=9, max_bytes=1000)
    store.add("mine", stored("a", previous="b"))
    store.add("mine", stored("b", previous="a"))
    assert ids(store.get("mine", "a")) == ["b", "a"]
    for method in (store.get, store.conversation, store.delete):
        with pytest.raises(APIError):
            method("yours", "a")
    with pytest.raises(APIError):
        store.conversation("mine", "a")


_TEXT = st.text(max_size=9)
_NAME = st.text(min_size=1, max_size=9)
_ITEMS = st.lists(
    st.one_of(
        st.builds(dict, role=st.sampled_from(["user", "assistant"]), content=_TEXT),
        st.builds(
            dict, type=st.just("reasoning"), content=st.builds(lambda t: [{"text": t}], _TEXT)
        ),
        st.builds(dict, type=st.just("custom_tool_call"), call_id=_NAME, name=_NAME, input=_TEXT),
        st.builds(dict, type=st.just("function_call"), call_id=_NAME, name=_NAME, arguments=_TEXT),
        st.builds(dict, type=st.just("function_call_output"), call_id=_NAME, output=_TEXT),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=50, deadline=None)
@given(_ITEMS)
def test_what_is_stored_is_the_same_conversation(given_items: list[Any]) -> None:
    items = items_of(ResponsesRequest.model_validate({"input": given_items}).input, {})
    kept = StoredResponse("a", None, stored_items(items), b"", b'{"output": []}')
    again = conversation_of([kept])

    def texts(items: Any) -> list[Any]:
        found = [message.model_dump(exclude_none=True) for message in messages_of("Hi", items)]
        for message in found:  # a text or its only part
            if isinstance(message.get("content"), list):
                (part,) = message["content"]
                message["content"] = part["text"]
        return found

    assert texts(again) == texts(items)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_by_id(client: OpenAI, stream: bool) -> None:
    """The prompt is the same as with the whole conversation in the input."""
    first = respond(client, input=QUESTIONS[3], instructions="Be brief.")
    given: dict[str, Any] = {"input": QUESTIONS[4], "previous_response_id": first.id}
    if stream:
        (*_, last) = client.responses.create(model=MODEL, stream=True, **given)
        second = last.response
    else:
        second = respond(client, **given)
    assert second.output_text == ANSWERS[4]
    assert (second.previous_response_id, second.instructions) == (first.id, None)
    question = [{"role": "user", "content": QUESTIONS[3]}]
    answer = {"role": "user", "content": QUESTIONS[4]}
    whole = respond(client, input=[*question, *first.output, answer], store=False)
    assert whole.usage.input_tokens == second.usage.input_tokens
    assert whole.usage.input_tokens_details.cached_tokens >= second.usage.input_tokens - 16
    assert client.responses.retrieve(second.id) == second
    third = respond(client, input="Why?", previous_response_id=second.id, max_output_tokens=1)
    listed = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    texts = [item.content[0].text for item in listed]  # type: ignore[union-attr]
    assert texts == [QUESTIONS[3], ANSWERS[3], QUESTIONS[4], ANSWERS[4], "Why?"]
    newest = client.responses.input_items.list(third.id, limit=1)
    assert newest.data[0] == listed[-1]
    assert newest.has_more


def test_calls_and_their_outputs_are_stored(client: OpenAI) -> None:
    fields: Any = {"tools": [TOOL], "parallel_tool_calls": False, "max_output_tokens": 200}
    first = respond(client, input="Weather?", tool_choice="required", **fields)
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "hot"}
    second = respond(
        client, input=[result], previous_response_id=first.id, tool_choice="none", **fields
    )
    assert second.output[0].type == "message"
    *_, question = (items := client.responses.input_items.list(second.id)).data
    assert [item.type for item in items.data] == [
        *("function_call_output", "function_call", "message")
    ]
    assert question.status == "completed"  # type: ignore[union-attr]


def test_items_of_the_input_may_be_references(client: OpenAI, server: Running) -> None:
    """AI SDKs send them in place of what the model has said."""
    question: dict[str, Any] = {"role": "user", "content": QUESTIONS[3]}
    first = respond(client, input=[question])
    given: list[Any] = [question, first.output[0], {"role": "user", "content": QUESTIONS[4]}]
    whole = respond(client, input=given)
    given[1] = {"type": "item_reference", "id": first.output[0].id}
    second = respond(client, input=given)
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.output_text == whole.output_text == ANSWERS[4]
    client.responses.delete(first.id)
    third = respond(client, input="Why?", previous_response_id=second.id, max_output_tokens=1)
    assert third.usage.input_tokens > second.usage.total_tokens
    reply = server.send(ROUTE, {"input": given})
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert "send the item itself" in reply.error["message"]
    assert client.responses.input_tokens.count(model=MODEL, input="Hi").input_tokens < 20


def test_a_deleted_response_is_gone(client: OpenAI, server: Running) -> None:
    first = respond(client, input="Hi", max_output_tokens=1)
    second = respond(client, input="Hi", previous_response_id=first.id, max_output_tokens=1)
    reply = server.send(f"{ROUTE}/{first.id}", method="DELETE")
    assert reply.body == {"id": first.id, "object": "response", "deleted": True}
    for method in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            method(first.id)
    assert client.responses.retrieve(second.id).id == second.id
    with pytest.raises(openai.BadRequestError, match=f"no response '{first.id}'") as raised:
        respond(client, input="Hi", previous_response_id=second.id)
    assert raised.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(second.id)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_1", "after"),
        ("?stream=true", "stream"),
    ],
)
def test_bad_queries_are_refused(client: OpenAI, server: Running, query: str, param: str) -> None:
    found = respond(client, input="Hi", max_output_tokens=1)
    reply = server.send(f"{ROUTE}/{found.id}{query}")
    assert (reply.status, reply.error["param"]) == (400, param)
    assert param in reply.error["message"]


def test_what_is_not_to_be_stored_is_not(client: OpenAI, async_llm: AsyncLLM) -> None:
    found = respond(client, input="Hi", store=False, max_output_tokens=1)
    assert found.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)
    with running(async_llm, max_stored_responses=0) as server:
        reply = server.send(ROUTE, {"input": "Hi", "store": True, "max_output_tokens": 1})
        assert reply.body["store"] is False
        reply = server.send(ROUTE, {"input": "Hi", "previous_response_id": reply.body["id"]})
        assert (reply.status, "max_stored_responses is 0" in reply.error["message"]) == (400, True)


def test_keys_do_not_see_the_responses_of_others(async_llm: AsyncLLM) -> None:
    with running(async_llm, api_keys=("one", "two")) as server:
        mine, yours = server.client("one"), server.client("two")
        found = respond(mine, input="Hi", max_output_tokens=1)
        assert mine.responses.retrieve(found.id) == found
        with pytest.raises(openai.NotFoundError):
            yours.responses.retrieve(found.id)
        with pytest.raises(openai.BadRequestError):
            respond(yours, input="Hi", previous_response_id=found.id)


def test_a_conversation_is_no_larger_than_a_body(async_llm: AsyncLLM) -> None:
    """Symptom: a small request had megabytes of its conversation parsed."""
    with running(async_llm, max_body_bytes=1400) as server:
        body: dict[str, Any] = {"max_output_tokens": 1, "input": "Hi " * 150}
        first = server.send(ROUTE, body).body
        second = server.send(ROUTE, {**body, "previous_response_id": first["id"]})
        assert second.status == 200
        reply = server.send(ROUTE, {**body, "previous_response_id": second.body["id"]})
        assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
        assert "max_body_bytes is 1400" in reply.error["message"]


def test_a_conversation_that_grew_afterwards_is_not_read(async_llm: AsyncLLM) -> None:
    """Symptom: a chain of responses, each replaced by a large one, took a GET 900 MB and 5 s."""
    with running(async_llm, max_body_bytes=4000) as server:
        text: list[dict[str, Any]] = [{"type": "input_text", "text": "Hi", "unread": " " * 2500}]
        for index, content in ((0, "Hi"), (1, "Hi"), (2, "Hi"), (1, text), (0, text)):
            body: dict[str, Any] = {"input": [{"role": "user", "content": content}]}
            body |= {"max_output_tokens": 1, "request_id": str(index)}
            body |= {"previous_response_id": f"resp_{index - 1}"} if index else {}
            assert server.send(ROUTE, body).status == 200
        assert server.send(f"{ROUTE}/resp_1/input_items").status == 200
        reply = server.send(f"{ROUTE}/resp_2/input_items")
        assert (reply.status, "max_body_bytes is 4000" in reply.error["message"]) == (400, True)


def test_too_long_a_prompt_has_openais_code(server: Running) -> None:
    """Symptom: agents did not shorten the conversation, as the client shows them no code."""
    for size in (2000, 400_000):  # refused by its tokens, and before they are all counted
        messages = [{"role": "user", "content": "Hi " * size}]
        for path, body in (
            (ROUTE, {"input": "Hi " * size}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"messages": messages, "max_tokens": 1}),
        ):
            reply = server.send(path, body)
            error = reply.body["error"]
            assert reply.status == 400
            assert "prompt is too long" in error["message"]
            assert path == "/v1/messages" or error["code"] == "context_length_exceeded"


def test_a_conversation_of_too_many_items(server: Running) -> None:
    body: dict[str, Any] = {"max_output_tokens": 1, "truncation": "auto"}
    body["input"] = [{"role": "user", "content": ""}] * 3000
    first = server.send(ROUTE, body)
    assert first.status == 200
    reply = server.send(ROUTE, {**body, "previous_response_id": first.body["id"]})
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
    assert "6001 items" in reply.error["message"]
