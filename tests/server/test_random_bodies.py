"""Random bodies: none makes the server fail, and what a conversation says is in its prompt.

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
from nanovllm.apps.server.conversation import render
from nanovllm.apps.server.protocol.chat import ConversationRequest
from nanovllm.apps.server.protocol.common import RequestModel
from nanovllm.apps.server.protocol.responses import ResponsesRequest
from nanovllm.apps.server.response_items import messages_of
from tests.chat.family_templates import TEMPLATES
from tests.server.conftest import Reply, Running, running

NUM = int(os.environ.get("FUZZ_EXAMPLES", 150))
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


@pytest.mark.parametrize(("path", "base"), BASES, ids=range(len(BASES)))
def test_null_is_as_if_the_field_were_not_there(
    odd: Running, path: str, base: dict[str, Any]
) -> None:
    """Every field of the schema that may be left out may be null."""
    needed = {"messages", "prompt", "input", "tokens"} & base.keys()
    names = fields_of_routes(odd)[path]
    for name in some_of(names):
        if name in needed | {"prompt", "messages"}:
            continue
        without = {key: value for key, value in base.items() if key != name}
        given = {**without, name: None}
        statuses = [odd.send(path, body).status for body in (without, given)]
        taken = [status in (200, 504) for status in statuses]  # 504: it may be slow
        assert taken[0] == taken[1], (path, name, statuses)


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


def some_of(names: list[str]) -> list[str]:
    return random.Random(SEED).sample(names, min(len(names), max(8, NUM // 30)))


class Talk:
    """A random conversation, as chats and as responses have it; each text has a word of its own."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.words: list[str] = []
        """What must be in the prompt."""
        self.messages: list[dict[str, Any]] = []
        self.items: list[dict[str, Any]] = []
        for _ in range(rng.choice([0, 0, 1, 2])):
            self.says(self.pick("system", "developer"))
        for turn in range(rng.randint(1, 3)):
            self.says("user")
            if rng.random() < 0.5:
                self.calls(turn)
            self.answers()
            if rng.random() < 0.15:
                self.says(self.pick("system", "developer"))
        self.says("user")

    def pick(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def word(self) -> str:
        word = "w" + "".join(self.rng.choices("bcdfghjk", k=7))
        self.words.append(word)
        return word

    def empty(self, *names: str) -> dict[str, Any]:
        """Return some of these fields, with values that mean nothing."""
        return {name: self.pick(*EMPTY) for name in names if self.rng.random() < 0.3}

    def says(self, role: str) -> None:
        word = self.word()
        kind = {"type": "text", "text": word}
        content = self.pick(word, [kind], [kind, {"type": "text", "text": ""}])
        more = self.empty("name", "tool_calls", "refusal", "reasoning", "function_call", "audio")
        self.messages.append({"role": role, "content": content, **more})
        parts = word if isinstance(content, str) else [{"type": "input_text", "text": word}]
        self.items.append({"role": role, "content": parts, **self.pick({}, {"type": None})})

    def answers(self) -> None:
        word = self.word()
        more = self.empty("name", "tool_calls", "refusal", "annotations", "audio")
        more |= self.pick({}, {"reasoning_content": "Hm."}, {"reasoning": "Hm."}, {"extra": 1})
        self.messages.append({"role": "assistant", "content": word, **more})
        self.items.append(
            {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
            | {"content": [{"type": "output_text", "text": word, "annotations": []}]}
        )

    def arguments(self) -> Any:
        word = self.word()
        given = self.pick(
            *({"city": word}, {"city": [word, None, 1.5]}, f'{{"city": "{word}', f"[{word!r}]"),
            *(f'"{word}"', word, f'{{"city": "He said "{word}""}}', f"{word}: [", None, "", "null"),
        )
        if given in (None, "", "null"):
            self.words.pop()
        return json.dumps(given) if isinstance(given, dict) and self.rng.random() < 0.7 else given

    def calls(self, turn: int) -> None:
        calls, results = [], []
        for number in range(self.pick(1, 1, 2)):
            call_id, name, result = f"call{turn}000{number}", self.word(), self.word()
            function = {"name": name, "arguments": self.arguments()}
            extra = self.pick({}, {"parsed_arguments": {}}, {"extra_content": {}})
            kind = self.pick({"type": "function"}, {}, {"type": None}, {"type": ""})
            calls.append({"id": call_id, **kind, "function": {**function, **extra}, **extra})
            results.append({"role": "tool", "tool_call_id": call_id, "content": result})
            results[-1] |= self.empty("name")
            self.items.append({"type": "function_call", "call_id": call_id, **function, **extra})
            self.items.append(
                {"type": "function_call_output", "call_id": call_id, "output": result}
            )
        content = self.pick({}, {"content": None}, {"content": ""}, {"content": []})
        self.messages.append({"role": "assistant", "tool_calls": calls, **content})
        self.messages += results


def prompt_of_chat(server: Running, body: dict[str, Any]) -> str:
    reply = server.send("/tokenize", body)
    assert reply.status == 200, reply.body
    return str(server.send("/detokenize", {"tokens": reply.body["tokens"]}).body["prompt"])


def prompt_of_response(server: Running, given: dict[str, Any]) -> str:
    body = ResponsesRequest.model_validate(given)
    messages = messages_of(body.instructions, body.input)
    return render(server.state, messages, chat_template_kwargs=body.chat_template_kwargs)


def test_what_a_conversation_says_is_in_its_prompt(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chats and in responses, with templates in the shapes of all families."""
    rng = random.Random(SEED)
    more = {"chat_template_kwargs": {"bos_token": ""}}  # the shipped tokenizer has none
    for number in range(NUM // 3):
        family = rng.choice(list(TEMPLATES))
        monkeypatch.setattr(server.state, "chat_template", TEMPLATES[family])
        talk = Talk(rng)
        chat = {"messages": talk.messages, **more}
        if rng.random() < 0.4:
            chat["tools"] = [{"type": "function", "function": FUNCTION}]
        response = {"instructions": "winstruct", "input": talk.items, **more}
        for text, words in (
            (prompt_of_chat(server, chat), talk.words),
            (prompt_of_response(server, response), ["winstruct", *talk.words]),
        ):
            missing = [word for word in words if word not in text]
            assert not missing, (number, family, missing, talk.messages, text)
