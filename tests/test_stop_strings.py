"""Stop strings cut the text exactly. test_invariance.py has them in batches, chunks and queues."""

import dataclasses
from typing import Any

import pytest

from nanovllm import LLM
from tests.glossary import ANSWER_TO, GREEDY, QUESTION, SAMPLED
from tests.helpers import cut, end_of, generate, whole

pytestmark = pytest.mark.usefixtures("idle_afterwards", "no_endless_wait")


@pytest.fixture
def llm(demo_llm: LLM) -> LLM:
    return demo_llm


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "stop", ["ach", "ks th", ".", " ", ["blocks", "fixed"], ["attention keeps", "n k"], "frames."]
)
def test_stop_string_cuts_the_answer(llm: LLM, stop: Any, include: bool) -> None:
    params = dataclasses.replace(GREEDY, stop=stop, include_stop_str_in_output=include)
    (completion,) = generate(llm, QUESTION, params).outputs
    text, stop_string = cut(" " + ANSWER_TO[QUESTION], params.stop, include)
    assert stop_string
    assert completion.text == text
    assert end_of(completion) == ("stop", stop_string)
    decode = llm.get_tokenizer().decode
    assert stop_string in decode(completion.token_ids)
    assert stop_string not in decode(completion.token_ids[:-1])


def test_stop_string_that_never_comes_changes_nothing(llm: LLM) -> None:
    free = generate(llm, QUESTION)
    stopped = generate(llm, QUESTION, dataclasses.replace(GREEDY, stop=["paged?", "~"]))
    assert whole(stopped) == whole(free)
    assert end_of(stopped.outputs[0]) == ("stop", None)


def test_many_stop_strings_cost_no_more_than_one(llm: LLM) -> None:
    """Symptom: each token is followed by a search for each stop string: a million took 5 s."""
    many = [f"{number:x}" for number in range(10**5, 2 * 10**5)]
    params = dataclasses.replace(GREEDY, stop=["fixed", *many, "attention keep"])
    (completion,) = generate(llm, QUESTION, params).outputs
    assert end_of(completion) == ("stop", "attention keep")
    assert completion.text == " Paged "


def test_stop_string_counts_with_the_last_allowed_token(llm: LLM) -> None:
    for max_tokens in range(1, 12):
        params = dataclasses.replace(GREEDY, stop=["attention keep"], max_tokens=max_tokens)
        (completion,) = generate(llm, QUESTION, params).outputs
        text = llm.get_tokenizer().decode(completion.token_ids)
        if "attention keep" in text:
            assert end_of(completion) == ("stop", "attention keep")
            assert completion.text == " Paged "
        else:
            assert end_of(completion) == ("length", None)
            assert completion.text == text


@pytest.mark.parametrize("min_tokens", [0, 1, 9, 17, 30])
def test_stop_strings_count_from_min_tokens_on(llm: LLM, min_tokens: int) -> None:
    free = generate(llm, QUESTION).token_ids
    tokenizer = llm.get_tokenizer()
    params = dataclasses.replace(GREEDY, stop=["ed", " to "], min_tokens=min_tokens)
    (completion,) = generate(llm, QUESTION, params).outputs
    answer = " " + ANSWER_TO[QUESTION]
    unsearched = len(tokenizer.decode(free[: max(0, min_tokens - 1)]))
    _, start = min(
        (start + len(stop), start)
        for stop in params.stop
        for start in range(len(answer))
        if answer.startswith(stop, start) and start + len(stop) > unsearched
    )
    assert completion.text == answer[:start]
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) >= min_tokens


def test_each_of_several_continuations_has_its_own_stop(llm: LLM) -> None:
    params = dataclasses.replace(SAMPLED, n=3, stop=["token", "end", "n the"])
    free = generate(llm, "What is the KV cache?", dataclasses.replace(params, stop=()))
    assert len({c.text for c in free.outputs}) > 1
    stopped = generate(llm, "What is the KV cache?", params)
    assert [c.index for c in stopped.outputs] == [0, 1, 2]
    found = [(c.text, c.stop_reason) for c in stopped.outputs]
    assert found == [cut(c.text, params.stop) for c in free.outputs]
    assert len({stop for _, stop in found}) > 1
    for index, completion in enumerate(stopped.outputs):
        length = len(completion.token_ids)
        assert completion.token_ids == free.outputs[index].token_ids[:length]
