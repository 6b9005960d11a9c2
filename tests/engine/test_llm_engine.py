"""LLM and LLMEngine: requests, outputs, statistics; failures leave nothing behind."""

import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.errors import EngineDeadError
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from nanovllm.parallel.in_process import InProcessExecutor
from nanovllm.parallel.rank_setup import num_cores
from nanovllm.testing.invariants import check_scheduler
from tests.helpers import generate

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
QUESTION = demo_model.entries()[0][0]


@pytest.fixture(scope="module")
def llm(random_model: str) -> LLM:
    return LLM(random_model)


@pytest.fixture(scope="module")
def demo_llm() -> LLM:
    return LLM(demo_model.MODEL, max_model_len=128)


def test_priority_is_given_for_all_or_for_each(make_llm: Any, random_model: str) -> None:
    llm = make_llm(random_model, max_num_seqs=1)
    for priority, first in ((1, 0), ([1, 0], 1), (range(1, -1, -1), 1)):
        outputs = llm.generate([[5], [8]], GREEDY, use_tqdm=False, priority=priority)
        starts = [output.metrics.first_scheduled_time for output in outputs]
        assert starts.index(min(starts)) == first


def test_each_engine_has_its_own_num_threads(make_llm: Any, random_model: str) -> None:
    """Symptom: num_threads becomes the next engine's default, or a new thread ignores it."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        llm = make_llm(random_model, num_threads=2)
        assert torch.get_num_threads() == 3
        runner = llm.engine.executor._runner
        execute, seen = runner.execute, []
        runner.execute = lambda step: (seen.append(torch.get_num_threads()), execute(step))[1]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(llm.generate, [1, 2], GREEDY, False).result()
        assert set(seen) == {2}
        assert make_llm(random_model).engine.executor._num_threads == min(3, num_cores())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_output_reads_like_nano_vllm_and_like_vllm(make_llm: Any) -> None:
    question, answer = demo_model.entries()[0]
    (output,) = make_llm(demo_model.MODEL).generate(
        question, SamplingParams(temperature=0, max_tokens=128), use_tqdm=False
    )
    assert output["text"].strip() == output.outputs[0].text.strip() == answer
    assert output["token_ids"] == output.outputs[0].token_ids
    assert output.prompt == question
    assert output.finish_reason == "stop"
    assert output.finished


def test_finish_reason_is_length_or_stop(llm: LLM) -> None:
    (free,) = llm.generate(
        [[9]], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), use_tqdm=False
    )
    assert (free.finish_reason, len(free.token_ids)) == ("length", 200)
    prompts = [[i] for i in range(50) if i not in (7, 11)]
    params = [
        SamplingParams(max_tokens=30, seed=seed, allowed_token_ids=range(20))
        for seed in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    stopped = [o for o in outputs if o.finish_reason == "stop"]
    assert {o.token_ids[-1] for o in stopped} == {7, 11}  # both EOS ids of the model
    assert not any({7, 11} & set(o.token_ids[:-1]) for o in outputs)


@pytest.mark.parametrize("queue_depth", [0, 1, 3])
def test_failed_step_loses_no_token(
    random_model: str, queue_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a failed step are computed again and keep the tokens they had."""
    engine = make_engine(Config(model=random_model), queue_depth=queue_depth)
    prompts = [[i + 1] * 20 for i in range(6)]
    expected: dict[int, list[int]] = {}
    for broken in (False, True):
        ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
        calls = 0
        execute = engine.executor.execute

        def flaky(schedule: Any, execute: Any = execute) -> Any:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                raise MemoryError("no memory just now")
            return execute(schedule)

        if broken:
            monkeypatch.setattr(engine.executor, "execute", flaky)
        outputs: dict[int, list[int]] = {}
        while not engine.is_finished():
            try:
                outputs |= {o.request_id: o.token_ids for o in engine.step()}
            except MemoryError:
                check_scheduler(engine.scheduler)
        tokens = dict(enumerate(outputs[request] for request in ids))
        expected = expected or tokens
        assert tokens == expected
    assert calls > 6


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("error", [MemoryError, type("PanicException", (BaseException,), {})])
def test_a_text_that_cannot_be_made_ends_only_its_request(
    demo_llm: LLM,
    error: type[BaseException],
    stop: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Symptom: requests that ended in the same step wait for ever for their outputs."""
    engine = demo_llm.engine
    params = dataclasses.replace(GREEDY, stop=stop)
    expected = generate(demo_llm, QUESTION, params)
    ids = [engine.add_request(QUESTION, params) for _ in range(3)]

    def fails(*args: Any, **options: Any) -> Any:
        raise error("no text")

    detokenizer = engine.output_processor._completions[ids[1]].detokenizer
    monkeypatch.setattr(detokenizer, "add" if stop else "add_all", fails)
    outputs = {}
    while not engine.is_finished():
        outputs |= {output.request_id: output for output in engine.step()}
    first, broken, last = (outputs[request_id] for request_id in ids)
    assert first.text == last.text == expected.text
    assert (broken.text, broken.finish_reason) == ("", "error")
    assert "no text" in broken.outputs[0].stop_reason
    assert broken.token_ids == expected.token_ids[: len(broken.token_ids)]
    assert "no text" in caplog.text
    check_scheduler(engine.scheduler)


def test_an_output_that_cannot_be_made_keeps_no_other_back(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: requests that ended in the same step wait for ever for their outputs."""
    engine = llm.engine
    ids = [engine.add_request([1, 2, 3], GREEDY) for _ in range(3)]
    make_output = engine.output_processor.make_output

    def fails_for_the_first(request: Any) -> Any:
        output = make_output(request)
        if output is not None and output.request_id == ids[0]:
            raise MemoryError("no output")
        return output

    monkeypatch.setattr(engine.output_processor, "make_output", fails_for_the_first)
    outputs, num_failures = [], 0
    while not engine.is_finished():
        try:
            outputs += engine.step()
        except MemoryError:
            num_failures += 1
    assert num_failures == 1
    assert [output.request_id for output in outputs] == ids[1:]
    assert [len(output.token_ids) for output in outputs] == [8, 8]
    check_scheduler(engine.scheduler)


def test_generate_leaves_other_requests_alone(llm: LLM) -> None:
    mine = llm.engine.add_request([1, 2, 3], GREEDY)
    others = llm.generate([[4], [5]], SamplingParams(max_tokens=40, seed=1), use_tqdm=False)
    assert mine not in [o.request_id for o in others]
    outputs = []
    while not llm.engine.is_finished():
        outputs += llm.engine.step()
    assert [o.request_id for o in outputs] == [mine]


def test_abort_returns_the_tokens_so_far(llm: LLM) -> None:
    request = llm.engine.add_request([1, 2, 3], GREEDY)
    for _ in range(4 + llm.engine.queue_depth):
        llm.engine.step()
    output = llm.engine.abort(request)
    assert output is not None
    assert output.finish_reason == "abort"
    assert len(output.token_ids) == 4
    assert llm.engine.abort(request) is None
    assert llm.engine.is_finished()


def test_seed_repeats_a_request_and_its_absence_does_not(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
    first, second = (llm.generate([[1]], params, use_tqdm=False)[0].token_ids for _ in range(2))
    assert first == second
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    drawn = {tuple(o.token_ids) for o in llm.generate([[1]] * 8, free, use_tqdm=False)}
    assert len(drawn) == 8


@pytest.mark.parametrize("queue_depth", [1, 4])
def test_stats_exclude_tokens_after_a_stop(random_model: str, queue_depth: int) -> None:
    """Symptom: tokens of steps launched before a stop was known count, so the rate is too high."""
    engine = make_engine(Config(model=random_model), queue_depth=queue_depth)
    params = SamplingParams(temperature=1.0, max_tokens=60, stop_token_ids=list(range(200)))
    ids = [engine.add_request([i + 1], params) for i in range(12)]
    outputs = []
    while not engine.is_finished():
        outputs += engine.step()
    assert {output.request_id for output in outputs} == set(ids)
    assert any(output.finish_reason == "stop" for output in outputs)
    assert engine.stats.num_decode_tokens == sum(len(output.token_ids) for output in outputs)


@pytest.mark.parametrize("queue_depth", [1, 3])
def test_engine_finishes_while_superfluous_steps_are_in_flight(
    random_model: str, queue_depth: int
) -> None:
    """Symptom: after the last stop, the engine waits for steps whose tokens are not needed."""
    engine = make_engine(Config(model=random_model), queue_depth=queue_depth)
    expected: list[list[int]] = []
    for _ in range(2):
        free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        engine.add_request([5], free)
        tokens = []
        while not engine.is_finished():
            tokens += [output.token_ids for output in engine.step()]
        stop = next(t for i, t in enumerate(tokens[0][:6]) if i and t not in tokens[0][:i])
        engine.add_request([5], dataclasses.replace(free, stop_token_ids=[stop]))
        while not engine.is_finished():
            tokens += [output.token_ids for output in engine.step()]
        assert tokens[1] == tokens[0][: tokens[0].index(stop) + 1]
        assert engine._in_flight  # launched before the stop was known
        expected = expected or tokens
        assert tokens == expected
    engine.shutdown()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_is_launched_ahead_if_the_device_runs_ahead(
    random_model: str, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = InProcessExecutor.start
    monkeypatch.setattr(
        InProcessExecutor,
        "start",
        lambda self: dataclasses.replace(start(self), runs_ahead=runs_ahead),
    )
    engine = make_engine(Config(model=random_model))
    engine.add_request([1, 2, 3], GREEDY)
    in_flight = set()
    while not engine.is_finished():
        engine.step()
        in_flight.add(len(engine._in_flight))
    assert in_flight == ({0, 1} if runs_ahead else {0})


def test_del_llm_frees_memory(random_model: str) -> None:
    process = psutil.Process()
    llm = LLM(random_model, device="cpu", kv_cache_memory_bytes=2**30, max_num_seqs=512)
    pool = llm.engine.executor._runner.network.attention.layers[0].kv_cache
    with torch.inference_mode():
        pool.fill_(1.0)
    size = pool.untyped_storage().nbytes()
    held = process.memory_info().rss
    gone = weakref.ref(llm.engine)
    del llm, pool
    assert gone() is None, "a reference cycle keeps the engine until the next collection"
    gc.collect()
    assert held - process.memory_info().rss > size / 8


def test_shutdown_may_be_called_twice(random_model: str) -> None:
    llm = LLM(random_model)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate([[1]], GREEDY, use_tqdm=False)


def test_progress_shows_rates(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1] * 50] * 4, GREEDY)
    shown = capfd.readouterr()
    assert "Generating: 100%" in shown.err
    assert "Decode=" in shown.err
    assert shown.out == ""
