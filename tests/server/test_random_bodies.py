"""Random bodies: none makes the server fail.

`FUZZ_EXAMPLES=5000 pytest tests/server/test_random_bodies.py` sends that many of new seeds in each
test.
"""

import copy
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from nanovllm import AsyncLLM
from nanovllm.apps.server.protocol import ConversationRequest, RequestModel
from tests.server.conftest import Reply, Running, running

NUM = int(os.environ.get("FUZZ_EXAMPLES", 60))
SEED = time.time_ns() if "FUZZ_EXAMPLES" in os.environ else 0

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
BASES: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm."},
                {"role": "tool", "tool_call_id": "call_1", "content": "31"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "auto",
            "chat_template_kwargs": {"enable_thinking": False},
            "max_completion_tokens": 2,
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "response_format": SCHEMA,
            "max_tokens": 3,
        },
    ),
    (COMPLETIONS, {"prompt": ["Hi", "Ho"], "max_tokens": 2, "stop": ["x"]}),
    (
        "/v1/embeddings",
        {"input": ["Hi", "Ho"], "dimensions": 8, "encoding_format": "base64", "user": "a"},
    ),
    ("/pooling", {"input": [[1, 2], [3]], "pooling": "mean", "truncate_prompt_tokens": 4}),
    ("/v1/score", {"text_1": "Hi", "text_2": ["Ho", "Hu"], "normalize": False}),
    (
        "/rerank",
        {"query": "Hi", "documents": ["Ho", {"text": "Hu"}], "top_n": 1, "max_tokens_per_doc": 3},
    ),
    (
        RESPONSES,
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"text": "Hm."}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "31"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 2,
        },
    ),
    ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
EMPTY: list[Any] = [None, "", [], {}]
ODD: list[Any] = [
    *(0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, 10**30, True, False),
    *("a", " ", "\x00", "null", "none", "auto", "é😀", "<|im_end|>", "x" * 3000, "[", "{}"),
    *([[]], [None], [0], [""], [{}], [1] * 200, ["a", "b"]),
    *({"": 1}, {"a": None}, {"type": "object"}, {"type": 5}, {"type": "text"}, {"$ref": "#"}),
]
GOOD: dict[str, list[Any]] = {
    "stream": [True],
    "stream_options": [{"include_usage": True, "continuous_usage_stats": True}],
    "n": [2, 3],
    "best_of": [2],
    "echo": [True],
    "temperature": [0, 0.7, 2],
    "top_k": [-1, 5],
    "top_p": [0.5],
    "min_p": [0.1],
    "seed": [-1, 7],
    "logprobs": [True, 0, 2],
    "top_logprobs": [0, 2, -1],
    "prompt_logprobs": [0, 2],
    "max_tokens": [0, 1, 5, 40],
    "max_output_tokens": [1, 5],
    "max_completion_tokens": [1, 9],
    "min_tokens": [0, 3],
    "stop": ["a", ["e", "</tool_call>"], []],
    "include_stop_str_in_output": [True],
    "stop_token_ids": [[5, 6]],
    "bad_words": [["a", " the"]],
    "allowed_token_ids": [[40, 41, 42]],
    "logit_bias": [{"40": 100}, {"41": -100}],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "presence_penalty": [2],
    "frequency_penalty": [-2],
    "repetition_penalty": [1.3],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "truncate_prompt_tokens": [-1, 1, 9],
    "truncation": ["auto"],
    "parallel_tool_calls": [False],
    "include_reasoning": [False],
    "tool_choice": ["required", "none", {"type": "function", "function": {"name": "f"}}],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
    "reasoning_effort": ["low"],
    "cache_salt": ["salt"],
    "user": ["me"],
    "guided_regex": ["a+", "(", "(?=a)"],
    "guided_choice": [["yes", "no"], [""]],
    "guided_json": [{"type": "string", "maxLength": 3}, '{"type": "integer"}', {"type": 5}],
    "guided_grammar": ['start: "a"', "root ::= [a-z]"],
    "structured_outputs": [{"self": 1}, {"regex": "a|b"}, {"json": 5}, {"choice": ["a", "a"]}],
    "return_token_strs": [True],
    "add_special_tokens": [True],
}
"""Values that a field takes, most of them: what goes together is left to chance."""


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value in a JSON value."""
    if at:
        yield at
    inside = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else inside:
        yield from places(inner, (*at, key))


def put(body: Any, at: tuple[Any, ...], value: Any) -> None:
    *before, last = at
    for key in before:
        body = body[key]
    body[last] = copy.deepcopy(value)


def failures(reply: Reply) -> list[Any]:
    """Return what an answer, or an event of a stream, says of a failure of the server."""
    events = [reply.body]
    if isinstance(reply.body, str):
        lines = [line for line in reply.body.split("\n") if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert events, "a stream without an event"
    found = []
    for event in events:
        error = event.get("error") or event.get("response", {}).get("error") or {}
        assert reply.status < 400 or error["message"]
        reasons = [choice["finish_reason"] for choice in event.get("choices", ())]
        if "error" in reasons or "server_error" in (error.get("type"), error.get("code")):
            found.append(event)
    return found


def fields_of_routes(server: Running) -> dict[str, list[str]]:
    """Return the fields of each route's body, as its schema has them."""
    schema = server.send("/openapi.json").body
    found = {}
    for path, operations in schema["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is not None:
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            found[path] = list(schema["components"]["schemas"][name]["properties"])
    return found


@pytest.fixture(scope="module")
def odd(front: str, async_llm: AsyncLLM) -> Iterator[Running]:
    """A server that nobody keeps long."""
    with running(async_llm, request_timeout=0.5) as found:
        yield found


def test_no_body_makes_the_server_fail(odd: Running, idle_afterwards: None) -> None:
    rng, fields = random.Random(SEED), fields_of_routes(odd)
    for path, base in BASES:
        assert odd.send(path, base).status == 200
    statuses = []
    for _ in range(NUM):
        path, base = rng.choice(BASES)
        body = copy.deepcopy(base)
        for _ in range(rng.choice([1, 1, 2, 3, 6])):
            value = rng.choice(rng.choice([EMPTY, ODD]))
            name = rng.choice(fields[path])
            if name in GOOD and rng.random() < 0.7:
                body[name] = copy.deepcopy(rng.choice(GOOD[name]))
            elif rng.random() < 0.5:
                body[name] = copy.deepcopy(value)
            else:
                put(body, rng.choice(list(places(body))), value)
        reply = odd.send(path, body)
        statuses.append(reply.status)
        shown = json.dumps(body)[:6000]
        assert not failures(reply), (path, shown, reply.body)
    assert statuses.count(200) > NUM / 8
    assert odd.send("/health").status == 200


def test_null_is_as_if_a_field_inside_were_not_there() -> None:
    """Symptom: 400 for `"type": null` of a tool, as Anthropic's client may write it."""

    def of(kind: type[RequestModel]) -> Iterator[type[RequestModel]]:
        yield kind
        for more in kind.__subclasses__():
            yield from of(more)

    for kind in set(of(RequestModel)) - {ConversationRequest}:  # which is no request by itself
        for name, field in kind.model_fields.items():
            named = field.alias or name
            try:
                kind.model_validate({named: None})
            except ValidationError as error:
                wrong = [one["loc"][:1] for one in error.errors()]
                assert field.is_required() or (named,) not in wrong, (kind, name)
