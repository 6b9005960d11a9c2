"""How outputs end: max_tokens, max_model_len, end of sequence, stop tokens and min_tokens."""

import random
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import CompletionOutput
from tests.helpers import generate_all, random_prompt

EOS = (7, 11)
"""End-of-sequence ids of the random model."""


@pytest.fixture
def llm(random_llm: LLM) -> LLM:
    return random_llm


def forced(llm: LLM, token: int, prompt_length: int = 3, **options: Any) -> CompletionOutput:
    """Generate with such a bias for `token` that it comes wherever it is allowed."""
    params = SamplingParams(logit_bias={token: 100.0}, temperature=0, **options)
    (output,) = generate_all(llm, [(random_prompt(random.Random(1), prompt_length), params)])
    return output.outputs[0]


def end(completion: CompletionOutput) -> tuple[int, str | None, int | str | None]:
    return len(completion.token_ids), completion.finish_reason, completion.stop_reason


@pytest.mark.parametrize("max_tokens", [1, 2, 13])
def test_max_tokens_ends_the_output(llm: LLM, max_tokens: int) -> None:
    assert end(forced(llm, 50, max_tokens=max_tokens)) == (max_tokens, "length", None)


def test_max_model_len_ends_the_output_before_max_tokens(llm: LLM) -> None:
    assert end(forced(llm, 50, prompt_length=40, max_tokens=1000)) == (8, "length", None)
    assert end(forced(llm, 50, prompt_length=47, max_tokens=1000)) == (1, "length", None)


@pytest.mark.parametrize("eos", EOS)
def test_eos_is_in_the_tokens_and_is_no_stop_reason(llm: LLM, eos: int) -> None:
    """Unless it is ignored; then it may still be a stop token."""
    completion = forced(llm, eos)
    assert completion.token_ids == [eos]
    assert end(completion) == (1, "stop", None)
    assert end(forced(llm, eos, stop_token_ids=[eos])) == (1, "stop", None)
    assert end(forced(llm, eos, stop_token_ids=[eos], ignore_eos=True)) == (1, "stop", eos)
    completion = forced(llm, eos, max_tokens=9, ignore_eos=True, min_tokens=5)
    assert completion.token_ids == [eos] * 9
    assert end(completion) == (9, "length", None)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_token_is_in_the_tokens_and_is_the_stop_reason(llm: LLM, ignore_eos: bool) -> None:
    completion = forced(llm, 50, stop_token_ids=[49, 50], ignore_eos=ignore_eos)
    assert completion.token_ids == [50]
    assert end(completion) == (1, "stop", 50)


def test_stop_token_as_the_last_allowed_token_is_a_stop(llm: LLM) -> None:
    assert end(forced(llm, 50, max_tokens=1, stop_token_ids=[50])) == (1, "stop", 50)
    assert end(forced(llm, 7, max_tokens=1)) == (1, "stop", None)
    assert end(forced(llm, 7, prompt_length=47)) == (1, "stop", None)


@pytest.mark.parametrize("min_tokens", [1, 2, 6])
@pytest.mark.parametrize(("token", "stop_reason"), [(7, None), (50, 50)])
def test_min_tokens_forbids_early_stop_tokens(
    llm: LLM, token: int, stop_reason: int | None, min_tokens: int
) -> None:
    completion = forced(llm, token, min_tokens=min_tokens, stop_token_ids=[50])
    assert not {*EOS, 50} & {*completion.token_ids[:-1]}
    assert completion.token_ids[-1] == token
    assert end(completion) == (min_tokens + 1, "stop", stop_reason)


def test_min_tokens_may_equal_max_tokens(llm: LLM) -> None:
    completion = forced(llm, 7, min_tokens=5, max_tokens=5)
    assert end(completion) == (5, "length", None)
    assert not {*EOS} & {*completion.token_ids}


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 5}, {"temperature": 0}], ids=str)
def test_contradictory_request_ends_and_affects_no_other(
    make_llm: Any, random_model: str, filters: dict[str, Any]
) -> None:
    llm = make_llm(random_model, dtype="float32", max_model_len=48)
    sound = ([4, 5, 6], SamplingParams(top_p=0.9, seed=1, max_tokens=6, ignore_eos=True))
    contradictory = SamplingParams(allowed_token_ids=[7], min_tokens=2, max_tokens=4, **filters)
    (alone,) = generate_all(llm, [sound])
    output, beside = generate_all(llm, [([1, 2], contradictory), sound])
    assert beside.token_ids == alone.token_ids
    assert output.token_ids == [7, 7]
    assert end(output.outputs[0]) == (2, "stop", None)
