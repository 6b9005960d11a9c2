"""/v1/completions by OpenAI's client, unmodified: the answers are those of the library."""

import math
from typing import Any

import pytest
from openai import OpenAI

from nanovllm import LLM
from tests.glossary import ANSWERS, GREEDY, QUESTIONS
from tests.helpers import generate
from tests.server.conftest import Running

MODEL = "model"


def test_answers_are_those_of_the_library(client: OpenAI) -> None:
    found = client.completions.create(model=MODEL, prompt=QUESTIONS[0], max_tokens=160)
    (choice,) = found.choices
    assert choice.text == f" {ANSWERS[0]}"
    assert choice.finish_reason == "stop"
    assert found.object == "text_completion"
    assert found.id.startswith("cmpl-")
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.usage.prompt_tokens_details is not None


def test_default_max_tokens_is_that_of_openai(client: OpenAI) -> None:
    found = client.completions.create(model=MODEL, prompt=QUESTIONS[0])
    assert found.usage.completion_tokens == 16
    assert found.choices[0].finish_reason == "length"


def test_cached_prompt_tokens_are_counted(client: OpenAI, server: Running) -> None:
    block_size = server.state.llm.engine.worker_info.block_size
    prompt = [index % 1000 for index in range(2 * block_size + 1)]
    for expected in (0, 2 * block_size):
        found = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        assert found.usage.prompt_tokens_details.cached_tokens == expected


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_come_back_by_index(client: OpenAI, server: Running, stream: bool) -> None:
    tokenizer = server.state.llm.get_tokenizer()
    ids = [tokenizer.encode(question) for question in QUESTIONS[:4]]
    for prompt in (QUESTIONS[:4], ids):
        found: Any = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=160, n=2, temperature=0, stream=stream
        )
        texts = [""] * 8
        for chunk in found if stream else [found]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [f" {answer}" for answer in ANSWERS[:4] for _ in range(2)]


def test_echo_with_logprobs(client: OpenAI, demo_llm: LLM) -> None:
    """What lm-eval's local-completions reads: log-probabilities of a prompt, and nothing more."""
    prompt = f"{QUESTIONS[5]} {ANSWERS[5]}"
    found = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    (choice,) = found.choices
    assert choice.text == prompt
    assert found.usage.completion_tokens == 0
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == prompt
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert prompt[offset:].startswith(token)
    expected = generate(demo_llm, prompt, GREEDY.clone(max_tokens=1, prompt_logprobs=1))
    assert logprobs.token_logprobs[0] is None
    for index, entries in enumerate(expected.prompt_logprobs[1:], 1):
        entry = entries[expected.prompt_token_ids[index]]
        assert math.isclose(logprobs.token_logprobs[index], entry.logprob, abs_tol=1e-3)
        best = max(logprobs.top_logprobs[index], key=lambda t: logprobs.top_logprobs[index][t])
        assert (best == logprobs.tokens[index]) == (entry.rank == 1)
