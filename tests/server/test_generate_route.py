"""/inference/v1/generate: token ids in and out; and equal log-probabilities over HTTP."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")

from nanovllm.kernels.cpu.library import library
from tests.server.conftest import Running

PROMPT = list(range(200, 240))
PATH = "/inference/v1/generate"


def body(token_ids: list[int], **params: Any) -> dict[str, Any]:
    return {"token_ids": token_ids, "sampling_params": params}


def test_tokens_are_those_of_completions(server: Running) -> None:
    params = {"temperature": 0.8, "seed": 5, "max_tokens": 12, "n": 2}
    reply = server.send(PATH, {**body(PROMPT, **params), "return_token_ids": True})
    assert reply.status == 200
    other = {"prompt": PROMPT, "return_token_ids": True, **params}
    expected = server.send("/v1/completions", other).body
    choices = reply.body["choices"]
    assert [c["token_ids"] for c in choices] == [c["token_ids"] for c in expected["choices"]]
    assert [c["index"] for c in choices] == [0, 1]
    assert reply.body["prompt_token_ids"] == PROMPT
    assert reply.body["model"] == expected["model"]
    assert reply.body["output_mode"] == "tokens"
    assert reply.body["usage"]["completion_tokens"] == 24
    assert choices[0]["logprobs"] is None
    spans = [{"version": "0", "start": 0, "end": 12}]
    assert [c["weight_versions"] for c in choices] == [spans, spans]


def test_logprobs_have_the_tokens_themselves(server: Running) -> None:
    given = body(PROMPT, max_tokens=5, logprobs=3, temperature=0, prompt_logprobs=1)
    reply = server.send(PATH, given)
    content = reply.body["choices"][0]["logprobs"]["content"]
    assert [each["token_id"] for each in content] == reply.body["choices"][0]["token_ids"]
    for each in content:
        assert each["rank"] == 1
        assert len(each["top_logprobs"]) == 3
        assert each["top_logprobs"][0] == {k: each[k] for k in ("token_id", "logprob", "rank")}
    assert len(reply.body["prompt_logprobs"]) == len(PROMPT)
    zero = server.send(PATH, body(PROMPT, max_tokens=1, logprobs=0))
    assert len(zero.body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 1


def test_a_stream_joins_to_the_whole(server: Running) -> None:
    given = body(PROMPT, max_tokens=9, temperature=0, logprobs=0)
    whole = server.send(PATH, given).body["choices"][0]
    given |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    text = server.send(PATH, given).body
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [token for c in choices for token in c["token_ids"]] == whole["token_ids"]
    content = [each for c in choices for each in c["logprobs"]["content"]]
    assert content == whole["logprobs"]["content"]
    assert [c["weight_versions"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["weight_versions"] == whole["weight_versions"]


def test_defaults_are_those_of_sampling_params(server: Running) -> None:
    """max_tokens may fill the context; a stop string ends it, though the answer has no text."""
    reply = server.send(PATH, body(PROMPT, ignore_eos=True, seed=1, temperature=0))
    assert len(reply.body["choices"][0]["token_ids"]) == 1024 - len(PROMPT)
    assert reply.body["choices"][0]["finish_reason"] == "length"
    completion = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    word = server.send("/v1/completions", completion).body["choices"][0]["text"].split()[2]
    stopped = server.send(PATH, body(PROMPT, stop=word, temperature=0)).body["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", word)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (body([]), "token_ids"),
        (body([10**9]), "token_ids"),
        (body([1], temperature=-1.0), "sampling_params.temperature"),
        (body([1], stream=True), "sampling_params.stream"),
        ({**body([1]), "output_mode": "text"}, "output_mode"),
        ({**body([1]), "stream_options": {}}, "stream_options"),
        ({"token_ids": [1]}, "sampling_params"),
    ],
)
def test_wrong_requests(server: Running, given: dict[str, Any], param: str) -> None:
    reply = server.send(PATH, given)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.skipif(library() is None, reason="no compiler here")
@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_sampled_logprobs_are_those_of_scoring(server: Running, path: str) -> None:
    """A trainer's question, over HTTP: twelve at once are sampled, and scored in other batches."""
    rng = random.Random(3)
    prompts = [[rng.randrange(100, 900) for _ in range(rng.randrange(1, 90))] for _ in range(12)]

    def sampled(prompt: list[int]) -> tuple[list[int], list[float]]:
        params = {"max_tokens": 24, "logprobs": 0, "temperature": 1.0, "ignore_eos": True}
        if path == PATH:
            choice = server.send(path, body(prompt, **params)).body["choices"][0]
            content = choice["logprobs"]["content"]
            return choice["token_ids"], [each["logprob"] for each in content]
        given = {"prompt": prompt, "return_token_ids": True, **params}
        choice = server.send(path, given).body["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def scored(tokens: list[int], first: int) -> list[float]:
        params = {"max_tokens": 1, "prompt_logprobs": 0}
        given = body(tokens, **params) if path == PATH else {"prompt": tokens, **params}
        answer = server.send(path, given).body
        found = answer["prompt_logprobs" if path == PATH else "choices"]
        found = found if path == PATH else found[0]["prompt_logprobs"]
        pairs = zip(tokens[first:], found[first:], strict=True)
        return [entries[str(token)]["logprob"] for token, entries in pairs]

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(sampled, prompts))
    with ThreadPoolExecutor(5) as pool:
        wholes = [p + tokens for p, (tokens, _) in zip(prompts, found, strict=True)]
        again = list(pool.map(scored, wholes, map(len, prompts)))
    assert again == [logprobs for _, logprobs in found]
    assert len({value for logprobs in again for value in logprobs}) > 100
