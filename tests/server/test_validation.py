"""Every rule on a request answers 400 in OpenAI's form and names the field; then all is well."""

import urllib.request
from typing import Any

import openai
import pytest
from openai import OpenAI

from nanovllm.apps.server import generation
from tests.server.conftest import Running

MESSAGES = [{"role": "user", "content": "What is paged attention?"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**30}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": ["x" * 2000]}, "stop[0]"),
    ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
    ({"bad_words": ["x"] * 2000}, "bad_words"),
    ({"bad_words": ["x", "x" * 65]}, "bad_words[1]"),
    ({"guided_choice": ["x"] * 2000}, "guided_choice"),
    ({"logit_bias": dict.fromkeys(map(str, range(2000)), 1)}, "logit_bias"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * 65537}, "allowed_token_ids"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"prompt_logprobs": 5000}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"priority": -1}, "priority"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"request_id": ""}, "request_id"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"temprature": 1.0}, "temprature"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_json": "[" * 60000}, "guided_json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regxe": "a"}}, "structured_outputs"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "none"}}}},
        "response_format",
    ),
]
ITEM = {"role": "user", "content": ""}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
BAD_CALL = {"id": "a", "function": {"name": "f", "arguments": ["a"]}}
OF_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": MESSAGES * 5000}, "messages"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1]"),
    ({"messages": [{**ITEM, "content": [IMAGE]}]}, "messages[0]"),
    (
        {"messages": [{**ITEM, "tool_calls": [BAD_CALL]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 5000}, "top_logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "messages"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [1, 10**40]}, "prompt"),
    ({"prompt": [5000]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": "a" * 10**6}, "prompt"),
    ({"prompt": "a" * 10**6, "truncate_prompt_tokens": 4}, "prompt"),
    ({"prompt": [1] * 1024}, "prompt"),
    ({"logprobs": 5000}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
]


CASES = [
    *((CHAT, fields, param) for fields, param in BOTH + OF_CHAT),
    *((COMPLETIONS, fields, param) for fields, param in BOTH[::4] + OF_COMPLETIONS),
]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "What is"}
    return {**given, "max_tokens": 8, **fields}


@pytest.mark.parametrize(("path", "fields", "param"), CASES)
def test_a_broken_rule_is_named(
    server: Running, path: str, fields: dict[str, Any], param: str
) -> None:
    given = body_of(path, **fields)
    if "max_completion_tokens" in fields:
        del given["max_tokens"]
    reply = server.send(path, given)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nothing",
        b"[]",
        b'{"prompt": "a", "messages": [], "temperature": NaN}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}",
        b'{"logit_bias": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"prompt": [' + b"1," * 300000 + b"1]}",
        "﻿{}".encode(),
        b'{"prompt": "a"} {"prompt": "b"}',
    ],
    ids=range(13),
)
def test_a_body_that_is_no_request(server: Running, body: bytes) -> None:
    reply = server.send(COMPLETIONS, body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


def test_fields_that_clients_send_and_that_change_nothing(server: Running) -> None:
    common = {
        "user": "me",
        "service_tier": "auto",
        "store": False,
        "metadata": {"a": "b"},
        "use_beam_search": False,
        "length_penalty": 1.0,
        "n": None,
        "stop": None,
        "stream_options": None,
        "priority": 0,
        "a field of another server": None,
    }
    assert server.send(COMPLETIONS, body_of(COMPLETIONS, best_of=1, **common)).status == 200
    chat = {"parallel_tool_calls": True, "modalities": ["text"], "tool_choice": "none"}
    chat |= {"add_special_tokens": False}  # as vLLM's default is
    assert server.send(CHAT, body_of(CHAT, **chat, **common)).status == 200
    empty: dict[str, Any] = {"model": "", "user": "", "response_format": {}, "stream_options": {}}
    empty |= {"structured_outputs": {}}
    assert server.send(COMPLETIONS, body_of(COMPLETIONS, suffix="", **empty)).status == 200
    chat = {"tool_choice": "", "reasoning_effort": "", "documents": [], "chat_template": ""}
    chat |= {"tools": []}  # as agents send it where no tool is allowed
    assert server.send(CHAT, body_of(CHAT, **chat, **empty)).status == 200
    given = {"input": "Hi", "max_output_tokens": 2, "tools": [], "text": {}, "reasoning": {}}
    given |= {"previous_response_id": "", "tool_choice": "", "instructions": ""}
    assert server.send("/v1/responses", given).status == 200


def test_errors_of_the_client_library(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be") as caught:
        client.completions.create(model="model", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    messages: Any = MESSAGES
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        client.chat.completions.create(model="gpt-4o", messages=messages)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature"):  # before the stream begins
        client.completions.create(model="model", prompt="a", temperature=-1, stream=True)
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model="model", prompt=[1] * 2000, stream=True)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_other_statuses_have_the_same_form(
    server: Running, method: str, path: str, status: int
) -> None:
    reply = server.send(path, method=method)
    assert reply.status == status
    assert reply.error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_taken(server: Running, kind: str) -> None:
    reply = server.send(CHAT, body_of(CHAT), Content_Type=kind)
    assert reply.status == 415
    assert "Content-Type" in reply.error["message"]


def test_what_a_client_tries_first_is_told_in_words(server: Running) -> None:
    reply = server.send(CHAT, b"\x1f\x8b", Content_Encoding="gzip")
    assert reply.status == 415
    assert reply.error["message"] == "the body must not be compressed, got 'gzip': send it plain"
    reply = server.send(CHAT)
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    assert reply.error["message"] == f"{CHAT} takes POST, not GET"
    asked = urllib.request.Request(f"{server.url}/health", method="HEAD")
    with urllib.request.urlopen(asked) as answer:
        assert (answer.status, answer.read()) == (200, b"")


CALL = {"function": {"name": "f", "arguments": ""}}
TOOL = {"type": "function", "name": "f"}
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"input": [ITEM] * 100000}, "input"),
        ("/v1/responses", {"input": [{}] * 100000}, "input[0].role"),
        ("/v1/responses", {"input": [{**ITEM, "content": [{}] * 5000}]}, "input[0].content"),
        ("/tokenize", {"messages": [ITEM] * 100000}, "messages"),
        ("/tokenize", {"prompt": "a", "tools": [FUNCTION] * 129}, "tools"),
        (CHAT, {"messages": [{**ITEM, "tool_calls": [CALL] * 100}] * 50}, "messages"),
        (CHAT, {"messages": [{**ITEM, "tool_calls": [CALL] * 129}]}, "messages[0].tool_calls"),
        (CHAT, {"messages": MESSAGES, "documents": [{}] * 5000}, "documents"),
    ],
)
def test_lists_are_bounded(server: Running, path: str, fields: dict[str, Any], param: str) -> None:
    reply = server.send(path, fields)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_an_answer_has_so_many_logprobs_at_most(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: one request took 0.6 GiB, and more the larger max_model_len and max_logprobs are."""
    monkeypatch.setattr(generation, "MAX_ANSWER_LOGPROBS", 1000)
    body = {"prompt": "a", "logprobs": 9, "ignore_eos": True}
    assert server.send(COMPLETIONS, {**body, "max_tokens": 100}).status == 200
    for more in ({"max_tokens": 101}, {"max_tokens": 51, "n": 2}, {"prompt_logprobs": 1000}):
        reply = server.send(COMPLETIONS, {**body, "max_tokens": 100, **more})
        assert (reply.status, reply.error["param"]) == (400, "logprobs")
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 9, "ignore_eos": True}
    (choice,) = server.send(CHAT, chat).body["choices"]
    assert (len(choice["logprobs"]["content"]), choice["finish_reason"]) == (100, "length")
    for more in ({"max_tokens": 101}, {"n": 2}):
        assert server.send(CHAT, {**chat, **more}).error["param"] == "top_logprobs"


TWO_KINDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"stop": 7}, "stop should be a valid string or a valid list, got 7"),
    (CHAT, {"stop": ["a", "x" * 2000]}, "stop[1] string should have at most 1024 characters"),
    (CHAT, {"messages": [{**ITEM, "content": [{}] * 5000}]}, "at most 4096 items"),
    (CHAT, {"messages": [{**ITEM, "content": ["a"]}]}, "content[0] should be an object"),
    (CHAT, {"tools": [FUNCTION], "tool_choice": "any"}, "'none', 'auto' or 'required', got 'any'"),
    (
        CHAT,
        {"tools": [FUNCTION], "tool_choice": {"type": "tool", "function": {"name": "f"}}},
        "tool_choice.type should be 'function', got 'tool'",
    ),
    (
        CHAT,
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name is missing",
    ),
    (CHAT, {"guided_json": 7}, "guided_json should be an object or a valid string, got 7"),
]


@pytest.mark.parametrize(("path", "fields", "message"), TWO_KINDS)
def test_of_a_field_with_two_kinds_the_broken_rule_is_named(
    server: Running, path: str, fields: dict[str, Any], message: str
) -> None:
    """Symptom: a list that is too long "should be a valid string"."""
    given = fields if path == "/v1/responses" else body_of(path, **fields)
    reply = server.send(path, given)
    assert reply.status == 400
    assert message in reply.error["message"]


def test_parameters_that_leave_no_token_are_the_clients_error(server: Running) -> None:
    """Symptom: 500, as if the model were broken."""
    (token,) = server.send("/tokenize", {"prompt": "a"}).body["tokens"]
    given = {"structured_outputs": {"regex": "b+"}, "allowed_token_ids": [token]}
    for path in (CHAT, COMPLETIONS):
        reply = server.send(path, body_of(path, **given))
        assert reply.status == 400
        assert "the request's rules" in reply.error["message"]


def test_the_schema_knows_no_422(server: Running) -> None:
    schema = server.send("/openapi.json").body
    assert CHAT in schema["paths"]
    for operations in schema["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert "4XX" in operation["responses"]


@pytest.mark.of_engines
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/pause", "start the server with --dev-mode"),
        ("/start_profile", "start the server with --profile-dir"),
        ("/sleep", "start the server with --enable-sleep-mode"),
        ("/v1/batches", "use `nanovllm batch`"),
    ],
)
def test_a_route_of_another_server_says_what_to_use(server: Running, path: str, words: str) -> None:
    reply = server.send(path, {})
    assert (reply.status, words in reply.error["message"]) == (404, True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ebnf": "root ::= 'a'"}, "use structured_outputs, such as {"),
        ({"mirostat": 2}, "use temperature, top_p or min_p"),
        (
            {"separate_reasoning": True, "mirostat": 0, "mirostat_tau": 5.0, "cache_prompt": True},
            "",
        ),
    ],
)
def test_fields_of_other_servers(server: Running, fields: dict[str, Any], words: str) -> None:
    """They are dropped if they ask for what happens anyway, else refused with what to use."""
    reply = server.send(CHAT, {**body_of(CHAT, max_tokens=1), **fields})
    if not words:
        assert reply.status == 200
    else:
        assert (reply.status, reply.error["param"]) == (400, next(iter(fields)))
        assert words in reply.error["message"]


def test_structural_tags_say_what_to_use(server: Running) -> None:
    form = {"type": "structural_tag", "structures": [], "triggers": []}
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": form}
    reply = server.send("/v1/chat/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "response_format.type")
    assert "use tools, or structured_outputs with a grammar" in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/v1/chat/completions", "; did you mean '/v1/chat/completions'?"),
        ("/chat/completions", "; did you mean '/v1/chat/completions'?"),
        ("/v1/chat/completion", "; did you mean '/v1/chat/completions'?"),
        ("/v1/completions/", "; did you mean '/v1/completions'?"),
        ("/llm/metrics", "; did you mean '/metrics'?"),
        ("/api/generate", ": use POST /v1/chat/completions"),
        ("/v1/", ": routes begin with it: it belongs to the address that a client is given"),
        ("/api/unknown", "; /openapi.json lists all"),
        ("/" + "x" * 5000, "; /openapi.json lists all"),
    ],
)
def test_a_path_without_a_route_names_the_nearest(server: Running, path: str, meant: str) -> None:
    reply = server.send(path)
    error = reply.error
    assert (reply.status, error["type"]) == (404, "not_found_error")
    assert error["message"].startswith("there is no route '/")
    assert error["message"].endswith(meant)
    assert len(error["message"]) < 300
