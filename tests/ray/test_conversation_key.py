"""The key of a conversation: the same for all its turns, and another for each other one."""

import json
from typing import Any

import pytest

from nanovllm.apps.ray.affinity import conversation_key

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are brief."}


def key(path: str, headers: tuple[tuple[bytes, bytes], ...] = (), **fields: Any) -> str:
    return conversation_key(path, headers, json.dumps(fields).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_all_turns_of_a_chat_have_one_key() -> None:
    turns = [SYSTEM, user("a?"), {"role": "assistant", "content": "b"}, user("c?")]
    first = key(CHAT, messages=turns[:2], model="m")
    assert first
    assert first == key(CHAT, messages=turns, model="m", stream=True)
    assert first != key(CHAT, messages=[SYSTEM, user("other?")])
    assert first != key(CHAT, messages=[user("a?")])


def test_responses_count_the_instructions_and_the_input() -> None:
    first = key("/v1/responses", instructions="Be brief.", input=[user("a?")])
    assert first == key("/v1/responses", instructions="Be brief.", input=[user("a?"), user("b?")])
    assert first != key("/v1/responses", input=[user("a?")])
    assert key("/v1/responses", input="a?") != key("/v1/responses", input="b?")


def test_of_a_plain_prompt_the_beginning_counts() -> None:
    path, text, tokens = "/v1/completions", "x" * 256, list(range(64))
    assert key(path, prompt=text) == key(path, prompt=text + "more") == key(path, prompt=[text])
    assert key(path, prompt=text) != key(path, prompt="y" + text)
    assert key(path, prompt=tokens) == key(path, prompt=[*tokens, 9]) == key(path, prompt=[tokens])
    assert key(path, prompt=tokens) != key(path, prompt=tokens[1:])


def test_what_a_client_names_comes_first() -> None:
    header = ((b"x-session-id", b"one"),)
    assert key(CHAT, header, messages=[user("a")]) == key(CHAT, header, prompt_cache_key="other")
    named = key(CHAT, prompt_cache_key="one", messages=[user("a")])
    assert named == key(CHAT, prompt_cache_key="one", messages=[user("b")])
    assert len({named, key(CHAT, header), key(CHAT, messages=[user("a")])}) == 3


def test_salts_and_models_are_kept_apart() -> None:
    salted = [key(CHAT, messages=[user("a")], cache_salt=salt) for salt in ("one", "two", None)]
    assert len({*salted}) == 3
    assert len({key(CHAT, messages=[user("a")], model=model) for model in ("base", "adapter")}) == 2


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"\xff", b"[1]", b"null", b"{}", b'{"messages": []}', b'{"messages": 7}'),
        *(b'{"prompt": ""}', b'{"prompt": {"a": 1}}', b'{"prompt": []}', b"[" * 100_000),
    ],
)
def test_what_has_no_beginning_has_no_key(body: bytes) -> None:
    assert conversation_key(CHAT, (), body) == ""


def test_the_depth_of_a_body_does_no_harm() -> None:
    """Python may read what is too deep for it to write."""
    for depth in range(800, 1000):
        content = "[" * depth + "]" * depth
        body = f'{{"messages": [{{"role": "user", "content": {content}}}]}}'
        conversation_key(CHAT, (), body.encode())


def test_other_paths_have_no_key() -> None:
    assert key("/tokenize", prompt="a") == ""
    assert key("/v1/completions/", prompt="a") == ""


@pytest.mark.parametrize("messages", [[7], [None, user("a")], [{"role": 3}], [[user("a")]]])
def test_odd_messages_do_no_harm(messages: list[Any]) -> None:
    assert key(CHAT, messages=messages)
