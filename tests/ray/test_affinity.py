"""The key of a conversation, the same for all its turns, and the replicas that it prefers."""

import json
from collections import Counter
from typing import Any

import pytest

from nanovllm.apps.ray.affinity import conversation_key
from nanovllm.utils.affinity import FREE_REQUESTS, order

CHAT = "/v1/chat/completions"
KEYS = [f"conversation {number}" for number in range(600)]
IDLE = dict.fromkeys("abcdef", 0)
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
        *(b"", b"{", b"\xff", b"[1]", b"{}", b'{"messages": []}', b'{"messages": 7}'),
        *(b'{"prompt": ""}', b'{"prompt": {"a": 1}}', b'{"prompt": []}', b"[" * 100_000),
    ],
)
def test_what_has_no_beginning_has_no_key(body: bytes) -> None:
    assert conversation_key(CHAT, (), body) == ""
    assert conversation_key("/tokenize", (), b'{"prompt": "a"}') == ""


def test_odd_messages_do_no_harm() -> None:
    """Python may read what is too deep for it to write."""
    odd = [[7], [None, user("a")], [{"role": 3}], [[user("a")]]]
    assert all(key(CHAT, messages=messages) for messages in odd)
    for depth in range(800, 1000):
        content = "[" * depth + "]" * depth
        body = f'{{"messages": [{{"role": "user", "content": {content}}}]}}'
        conversation_key(CHAT, (), body.encode())


def test_a_conversation_keeps_its_replica_whatever_the_others_do() -> None:
    for key in KEYS:
        first, second, *_ = order(key, IDLE)
        assert order(key, dict(reversed(IDLE.items())))[0] == first
        others = {name: 0 for name in IDLE if name != first}
        assert order(key, others)[0] == second, "only its own replica's end moves a conversation"
        assert order(key, {**IDLE, "new": 0})[0] in (first, "new")
        assert order(key, {**IDLE, first: FREE_REQUESTS - 1})[0] == first


def test_conversations_are_spread() -> None:
    counts = Counter(order(key, IDLE)[0] for key in KEYS)
    assert len(counts) == len(IDLE)
    assert max(counts.values()) < 1.4 * len(KEYS) / len(IDLE)


def test_a_busy_replica_comes_last_and_the_next_one_is_always_the_same() -> None:
    for key in KEYS:
        first, second, third, *_ = order(key, IDLE)
        assert order(key, {**IDLE, first: 20})[0] == second
        assert order(key, {**IDLE, first: 20, second: 30})[0] == third
        assert order(key, {**IDLE, first: 20, second: 30})[-2:] == [first, second]
        assert order(key, dict.fromkeys(IDLE, 100)) == order(key, IDLE), "all are as busy"
