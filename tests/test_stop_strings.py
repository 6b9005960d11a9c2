"""Stop strings cut the text exactly, whatever runs beside the request."""

import dataclasses
from typing import Any

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams, demo_model
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from nanovllm.testing.invariants import check_scheduler
from tests.glossary import ANSWER_TO, GREEDY, OPTIONS, QUESTION, QUESTIONS, SAMPLED, TINY_POOL
from tests.helpers import assert_idle, cut, end_of, generate, join, whole

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


def test_a_million_stop_strings_cost_no_more_than_one(llm: LLM) -> None:
    """Symptom: each token is followed by a search for each stop string, which took 5 s."""
    many = [f"{number:x}" for number in range(10**6, 2 * 10**6)]
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


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 9, 17, 30])
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


def stops_of(index: int) -> list[str]:
    """Return stop strings that span words, lie inside words, or never occur."""
    return [["ache", "never"], ["s to", "es th"], ["tion", " in "], [". "], ["zzz"]][index % 5]


def with_stops(include: bool = False) -> tuple[list[SamplingParams], list[tuple[str, str | None]]]:
    """Return the parameters of 40 questions, and the (text, stop string) expected for each."""
    params, expected = [], []
    for index, question in enumerate(QUESTIONS[:40]):
        stop = stops_of(index)
        params.append(dataclasses.replace(GREEDY, stop=stop, include_stop_str_in_output=include))
        expected.append(cut(" " + ANSWER_TO[question], stop, include))
    return params, expected


def assert_stop_strings_cut(llm: Any) -> None:
    params, expected = with_stops()
    outputs = llm.generate(QUESTIONS[:40], params, use_tqdm=False)
    assert [(o.text, o.outputs[0].stop_reason) for o in outputs] == expected
    assert {o.finish_reason for o in outputs} == {"stop"}
    assert_idle(llm)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 64},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"kvcache_block_size": 3},
        TINY_POOL,
    ],
)
def test_stop_strings_do_not_depend_on_the_batch(
    make_llm: Any, options: dict[str, Any], preempted: list[tuple[int, int]]
) -> None:
    assert_stop_strings_cut(make_llm(demo_model.MODEL, **{**OPTIONS, **options}))
    assert bool(preempted) == (options is TINY_POOL)


def test_stop_strings_do_not_depend_on_tensor_parallelism(tensor_parallel_llm: Any) -> None:
    assert_stop_strings_cut(tensor_parallel_llm(demo_model.MODEL, 2))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("queue_depth", [0, 1, 3])
def test_stop_strings_do_not_depend_on_steps_in_flight(queue_depth: int, include: bool) -> None:
    """With a queue, later steps are in flight when the stop string is found."""
    engine = make_engine(Config(model=demo_model.MODEL, **OPTIONS), queue_depth=queue_depth)
    params, expected = with_stops(include)
    ids = [
        engine.add_request(question, param, stream=index % 2 == 1)
        for index, (question, param) in enumerate(zip(QUESTIONS[:40], params, strict=True))
    ]
    pieces: dict[int, list[RequestOutput]] = {request: [] for request in ids}
    while not engine.is_finished():
        for output in engine.step():
            pieces[output.request_id].append(output)
        check_scheduler(engine.scheduler)
    joined = [join(pieces[request])[0] for request in ids]
    assert [(one.text, one.stop_reason) for one in joined] == expected
    assert engine.scheduler.block_manager.num_free_blocks == engine.worker_info.num_blocks
    engine.shutdown()


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
