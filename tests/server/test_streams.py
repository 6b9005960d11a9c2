"""The chunks of a streamed answer, joined, are the whole answer: field by field, whatever is asked.

The options are random; the seed that a failing test names makes them again.
"""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.every_case import EVERY_CASE
from tests.glossary import QUESTIONS
from tests.helpers import HAS_GRAMMARS
from tests.server.conftest import Running

Answer = dict[str, Any]
SEEDS = 30 if EVERY_CASE else 12
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["é", "🦊", "KV"]}}},
    },
}


def maybe(rng: random.Random, *values: Any, chance: float = 0.4) -> Any:
    """Return one of the values, or None, which leaves the option out."""
    return rng.choice(values) if rng.random() < chance else None


def common_options(rng: random.Random) -> dict[str, Any]:
    options = {
        "max_tokens": rng.choice([1, 2, 9, 25]),
        "n": maybe(rng, 2, 3),
        "seed": rng.randrange(100),
        "temperature": rng.choice([0, 0.8, 3.0]),
        "stop": maybe(rng, ["z" * 30], "e", [" the", "a", "\ufffd"]),
        "include_stop_str_in_output": maybe(rng, True),
        "min_tokens": maybe(rng, 1),
        "ignore_eos": maybe(rng, True),
        "skip_special_tokens": maybe(rng, False),
        "return_token_ids": maybe(rng, True, chance=0.6),
        "return_tokens_as_token_ids": maybe(rng, True, chance=0.2),
        "prompt_logprobs": maybe(rng, 0, 2, chance=0.3),
        "cache_salt": str(rng.random()),
    }
    if HAS_GRAMMARS:
        options["guided_choice"] = maybe(rng, ["né 🦊"], ["🦊🦊", "日本 <b>"], chance=0.3)
    return options


def chat_options(rng: random.Random) -> dict[str, Any]:
    options = common_options(rng)
    options["messages"] = [{"role": "user", "content": rng.choice(QUESTIONS)}]
    options["logprobs"] = maybe(rng, True, chance=0.6)
    options["top_logprobs"] = maybe(rng, 0, 3) if options["logprobs"] else None
    if rng.random() < 0.4:
        options["tools"] = [TOOL]
        if HAS_GRAMMARS and not options["guided_choice"]:
            options["tool_choice"] = maybe(rng, "required", "auto", chance=0.8)
    return options


def completion_options(rng: random.Random) -> dict[str, Any]:
    options = common_options(rng)
    prompts: list[Any] = ["a", QUESTIONS[0], "né 🦊 日本", "<|im_end|> a", [QUESTIONS[1], "é"]]
    options["prompt"] = rng.choice([*prompts, [64, 253, 64], [[64], [65, 253]]])
    options["logprobs"] = maybe(rng, 0, 3, chance=0.6)
    options["echo"] = maybe(rng, True, chance=0.6)
    if options["echo"] and rng.random() < 0.3:
        options |= {"max_tokens": 0, "min_tokens": None}
    return options


def chat(**options: Any) -> dict[str, Any]:
    """Return a chat with an answer of several tokens."""
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    return {"messages": messages, "temperature": 0, "max_tokens": 5, **options}


def ask(server: Running, path: str, options: dict[str, Any]) -> Answer:
    reply = server.send(path, options)
    assert reply.status == 200, reply.body
    answer: Answer = reply.body
    return answer


def stream(server: Running, path: str, options: dict[str, Any], **usage: bool) -> list[Answer]:
    """Return the chunks of a streamed answer."""
    reply = server.send(path, {**options, "stream": True, "stream_options": usage})
    assert reply.status == 200, reply.body
    *events, done = [line for line in reply.body.split("\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def join_chunks(chunks: list[Answer], join_choice: Callable[[Answer, Answer], None]) -> Answer:
    """Return the whole answer that chunks make; `join_choice` adds what only one route has."""
    answer: Answer = {}
    choices: dict[int, Answer] = {}
    for chunk in chunks:
        for name, value in chunk.items():
            if name != "choices" and (value is not None or name not in answer):
                answer[name] = value
        for new in chunk["choices"]:
            choice = choices.setdefault(new["index"], {"index": new["index"], "logprobs": None})
            assert choice.get("finish_reason") is None, "a chunk behind the last one"
            if new["logprobs"] is not None:
                whole = choice["logprobs"] = choice["logprobs"] or {}
                for name, values in new["logprobs"].items():
                    whole[name] = whole.get(name, []) + values
            if new.get("token_ids") is not None:
                choice["token_ids"] = choice.get("token_ids", []) + new["token_ids"]
            for name in ("finish_reason", "stop_reason"):
                choice[name] = new.get(name)
            join_choice(choice, new)
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer


def join_message(choice: Answer, new: Answer) -> None:
    """Add a chat's delta to its message."""
    message, delta = choice.setdefault("message", {"content": ""}), new["delta"]
    message["role"] = delta.get("role", message.get("role"))
    for name in ("content", "reasoning", "reasoning_content"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"type": call["type"], "name": call["function"]["name"], "arguments": ""})
        calls[call["index"]]["arguments"] += call["function"]["arguments"]


def join_text(choice: Answer, new: Answer) -> None:
    """Add a completion's new text, and what only the first chunk has."""
    choice["text"] = choice.get("text", "") + new["text"]
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert name not in choice or new[name] is None, f"{name} is sent twice"
        choice.setdefault(name, new[name])


def plain(value: Any) -> Any:
    """Return an answer without what no two have in common, and without null."""
    if isinstance(value, dict):
        left_out = {"id", "object", "created", "prompt_tokens_details", "service_tier"}
        return {n: plain(v) for n, v in value.items() if n not in left_out and v is not None}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return pytest.approx(value, abs=0.02) if isinstance(value, float) else value


def plain_chat(answer: Answer) -> Any:
    """Do the same with a whole answer of a chat, whose ids of calls are random."""
    for choice in answer["choices"]:
        message = choice["message"]
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            call |= call.pop("function")
    return plain(answer)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_streamed_chat_is_the_whole_chat(server: Running, seed: int) -> None:
    options = chat_options(random.Random(seed))
    whole = ask(server, CHAT, options)
    chunks = stream(server, CHAT, options, include_usage=True)
    assert plain(join_chunks(chunks, join_message)) == plain_chat(whole), options
    for chunk in chunks:  # log-probabilities come with their text, or before it
        for choice in chunk["choices"]:
            if options["logprobs"] and not options["stop"] and choice["delta"].get("content"):
                assert choice["logprobs"] is not None or options.get("tools"), options


@pytest.mark.parametrize("seed", range(SEEDS))
def test_streamed_completion_is_the_whole_completion(server: Running, seed: int) -> None:
    options = completion_options(random.Random(seed))
    whole = ask(server, COMPLETIONS, options)
    chunks = stream(server, COMPLETIONS, options, include_usage=True)
    joined = join_chunks(chunks, join_text)
    assert plain(joined) == plain(whole), options
    for choice in whole["choices"]:
        if options["logprobs"] is not None:
            check_offsets(choice, options)


def check_offsets(choice: Answer, options: dict[str, Any]) -> None:
    """Check that each whole token's text is where its offset says, if it is in the text."""
    found = choice["logprobs"]
    assert len(found["text_offset"]) == len(found["tokens"])
    assert found["text_offset"] == sorted(found["text_offset"])
    if options["return_tokens_as_token_ids"] or options["stop"] or "\ufffd" in choice["text"]:
        return
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert choice["text"].startswith(token, offset), (choice["text"], token, offset)


def test_logprobs_come_with_their_text(server: Running) -> None:
    """Also those of the last token, if the answer ends by length: the empty last chunk has none."""
    first, *chunks, last = stream(server, CHAT, chat(logprobs=True))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert choice["delta"]["content"] == "".join(tokens)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["logprobs"] is None


def test_token_ids_come_without_their_text(server: Running) -> None:
    """Symptom: ids of tokens whose text is held back are lost."""
    whole = ask(server, CHAT, chat(return_token_ids=True))["choices"][0]["token_ids"]
    options = chat(return_token_ids=True, stop=["z" * 30])
    _, *chunks, last = stream(server, CHAT, options)
    found = [chunk["choices"][0]["token_ids"] for chunk in (*chunks, last)]
    assert all(found[:-2])
    assert [token_id for token_ids in found for token_id in token_ids] == whole


@pytest.mark.parametrize("include_usage", [False, True, None])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_comes_with_each_chunk_only_with_include_usage(
    server: Running, path: str, include_usage: bool | None
) -> None:
    options = chat() if path == CHAT else {"prompt": "a", "max_tokens": 5}
    usage: Any = {"include_usage": include_usage, "continuous_usage_stats": True}
    counts = [
        chunk["usage"]["completion_tokens"] if "usage" in chunk else None
        for chunk in stream(server, path, options, **usage)
    ]
    if include_usage:
        assert counts == sorted(counts, key=int)
        assert (counts[0] == 0) == (path == CHAT)  # the role
        assert 0 not in counts[1:]
        assert counts[-1] == 5
    else:
        assert set(counts) == {None}


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_not_asked_for_is_null(server: Running, wanted: bool) -> None:
    options = {"return_token_ids": True, "prompt_logprobs": 0} if wanted else {}
    whole = ask(server, CHAT, chat(**options))
    first, second, *_ = stream(server, CHAT, chat(**options))
    completion = ask(server, COMPLETIONS, {"prompt": "a", **options})["choices"][0]
    chunk = stream(server, COMPLETIONS, {"prompt": "a", **options})[0]["choices"][0]
    found = [whole["prompt_token_ids"], whole["prompt_logprobs"], whole["choices"][0]["token_ids"]]
    found += [first["prompt_token_ids"], second["choices"][0]["token_ids"]]
    for choice in (completion, chunk):
        found += [choice[f"{name}"] for name in ("token_ids", "prompt_token_ids")]
        found += [choice["prompt_logprobs"]]
    assert [value is not None for value in found] == [wanted] * len(found)


def test_top_logprobs_of_the_whole_vocabulary(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: -1 returns all but the least likely one."""
    engine = server.state.llm.engine
    vocab_size = engine.worker_info.vocab_size
    monkeypatch.setattr(engine.input_processor.params_check, "max_logprobs", vocab_size)
    answer = ask(server, CHAT, chat(max_tokens=1, logprobs=True, top_logprobs=-1))
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == engine.worker_info.vocab_size


TEXT = "né 🦊x"


@pytest.mark.skipif(not HAS_GRAMMARS, reason="needs llguidance")
def test_bytes_and_offsets_where_a_character_has_several_tokens(server: Running) -> None:
    """Symptom: bytes are those of U+FFFD, and an offset counts each of these."""
    options = {"guided_choice": [TEXT], "max_tokens": 30, "top_logprobs": 2}
    answer = ask(server, CHAT, chat(**options, logprobs=True))
    *entries, _ = answer["choices"][0]["logprobs"]["content"]  # without the end of sequence
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == TEXT.encode()
    assert all(isinstance(top["bytes"], list) for entry in entries for top in entry["top_logprobs"])
    del options["top_logprobs"]
    choice = ask(server, COMPLETIONS, {**options, "prompt": TEXT, "logprobs": 0, "echo": True})
    found = choice["choices"][0]["logprobs"]
    begins = [0, 1, 1, 2, 3, 3, 3, 3, 4]  # a token for each byte
    assert found["text_offset"] == [*begins, *(5 + begin for begin in begins), 10]
