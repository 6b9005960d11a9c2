"""Threads share one LLM: each gets the text that it would get alone, and none waits for ever.

A thread of the engine runs the steps for all. What interrupts one that waits leaves the others.
"""

import contextlib
import gc
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nanovllm import LLM, NanoVLLMError, SamplingParams, demo_model
from nanovllm.errors import EngineDeadError
from nanovllm.testing.invariants import check_scheduler
from tests.glossary import ANSWER_TO, GREEDY, OPTIONS, QUESTIONS
from tests.helpers import assert_idle, generate, in_threads, join, wait_until

ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
FORTY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PREFIX = "A glossary of inference engines, question by question, for those who build them. "


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    llm = LLM(demo_model.MODEL, max_num_seqs=32, kvcache_block_size=8, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared LLM; check that the test left nothing in it."""
    yield shared
    assert_idle(shared)


def test_24_threads_with_shared_prefixes_get_the_texts_of_one(llm: LLM) -> None:
    """Symptom: wrong text without an error, `double free`, and wrong answers afterwards."""
    prompts = [[PREFIX + q for q in QUESTIONS[i : i + 2]] for i in range(24)]
    params = [
        SamplingParams(temperature=index % 2, seed=index, max_tokens=1 + index)
        for index in range(24)
    ]
    expected = [llm.generate(p, s, False) for p, s in zip(prompts, params, strict=True)]
    jobs = [
        lambda p=p, s=s: llm.generate(p, s, use_tqdm=False)
        for p, s in zip(prompts, params, strict=True)
    ]
    for outputs, alone in zip(in_threads(jobs), expected, strict=True):
        assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
        assert [o.text for o in outputs] == [o.text for o in alone]
    check_scheduler(llm.engine.scheduler)
    assert generate(llm, QUESTIONS[0]).text == " " + ANSWER_TO[QUESTIONS[0]]


def test_threads_share_batches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    execute = llm.engine.executor.execute

    def measured(schedule: Any) -> Any:
        sizes.append(len(schedule.rows))
        return execute(schedule)

    monkeypatch.setattr(llm.engine.executor, "execute", measured)
    in_threads([lambda: generate(llm, QUESTIONS[0], FORTY)] * 8)
    assert max(sizes) == 8
    assert len(sizes) < 2 * FORTY.max_tokens  # one after the other: 8 times max_tokens


def test_streams_chats_and_aborts_in_many_threads(llm: LLM) -> None:
    def whole(question: str) -> bool:
        return generate(llm, question).text == " " + ANSWER_TO[question]

    def chat(question: str) -> bool:
        (output,) = llm.chat([{"role": "user", "content": question}], GREEDY, use_tqdm=False)
        return bool(output.text == ANSWER_TO[question])

    def stream(question: str) -> bool:
        return join(llm.stream(question, GREEDY))[0].text == " " + ANSWER_TO[question]

    def closed(question: str) -> bool:
        pieces: Any = llm.stream(question, GREEDY)
        text = next(pieces).text + next(pieces).text
        pieces.close()
        return (" " + ANSWER_TO[question]).startswith(text)

    def abandoned(question: str) -> bool:
        cycle: list[Any] = [llm.stream(question, GREEDY)]
        cycle.append(cycle)
        return (" " + ANSWER_TO[question]).startswith(next(cycle[0]).text)

    def aborted(question: str) -> bool:
        pieces = llm.stream(question, GREEDY)
        first = next(pieces)
        llm.abort(first.request_id)
        text = first.text + "".join(piece.text for piece in pieces)
        return (" " + ANSWER_TO[question]).startswith(text)

    def by_hand(question: str) -> bool:
        request = llm.add_request(question, GREEDY)
        return llm.abort(request) is not None

    ways = [whole, chat, stream, closed, abandoned, aborted, by_hand]
    rng = random.Random(0)
    work = [(way, rng.choice(QUESTIONS)) for way in ways for _ in range(9)]
    rng.shuffle(work)
    jobs = [lambda part=work[i::21]: [way(q) for way, q in part] for i in range(21)]
    assert in_threads(jobs) == [[True] * 3] * 21
    gc.collect()


def test_abort_in_another_thread_ends_generate(llm: LLM) -> None:
    """Symptom: generate waits for ever for a request that is gone."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.generate, QUESTIONS[0], ENDLESS, False)
        wait_until(lambda: bool(llm.engine.scheduler.running), 20)
        request = llm.engine.scheduler.running[0].seq_id
        rest = llm.abort(request)
        (output,) = running.result(20)
    assert rest is not None
    assert output.finish_reason == "abort"
    assert output.token_ids == rest.token_ids


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_exception_in_a_step_ends_the_requests_that_run(
    llm: LLM, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread gets it with the traceback of the step; later requests run."""
    execute = llm.engine.executor.execute

    def fails(schedule: Any) -> Any:
        if len(llm.engine.scheduler.running) == 4:
            raise error("just now")
        return execute(schedule)

    def job(question: str) -> Any:
        with pytest.raises(error, match="just now") as raised:
            generate(llm, question, ENDLESS)
        return raised.traceback[-1].name

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "execute", fails)
        assert in_threads([lambda q=q: job(q) for q in QUESTIONS[:4]]) == ["fails"] * 4
    assert generate(llm, QUESTIONS[0]).text == " " + ANSWER_TO[QUESTIONS[0]]


def test_a_failure_that_repeats_leaves_nobody_waiting(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Symptom: while requests are ended after a failure, a second one ends the engine's thread."""
    broken = True

    def fails(*args: Any) -> Any:
        if broken:
            raise MemoryError("no text just now")
        return make(*args)

    processor = llm.engine.output_processor
    make = processor._make_completion_output
    monkeypatch.setattr(processor, "_make_completion_output", fails)

    def job(question: str) -> Any:
        with pytest.raises(MemoryError):
            llm.generate([question] * 3, [GREEDY, FORTY, ENDLESS], use_tqdm=False)
        return True

    assert all(in_threads([lambda q=q: job(q) for q in QUESTIONS[:4]]))
    broken = False
    assert "a command to the engine failed" in caplog.text
    assert llm.engine.is_finished()
    assert generate(llm, QUESTIONS[0]).text == " " + ANSWER_TO[QUESTIONS[0]]


def test_interrupts_at_any_point_leave_nobody_waiting(llm: LLM) -> None:
    """Ctrl-C in the main thread, again and again, while other threads generate.

    Also while prompts are tokenized, and with continuations and grammars among the requests.
    """
    prompts = ["What is a KV cache?", "Hi " * 100, "What is a block?"]
    params = [
        SamplingParams(temperature=0, max_tokens=4, logprobs=1),
        SamplingParams(temperature=0, max_tokens=2, n=3),
        SamplingParams(max_tokens=4, seed=1, structured_outputs={"choice": ["a block", "b"]}),
    ]
    stop = threading.Event()

    def work(question: str) -> set[str]:
        texts = set()
        while not stop.is_set():
            texts.add(generate(llm, question).text)
        return texts

    def interrupt(signum: int, frame: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    rng = random.Random(0)
    num_interrupts = 0
    old = signal.signal(signal.SIGALRM, interrupt)
    pool = ThreadPoolExecutor(2)
    try:
        futures = [pool.submit(work, question) for question in QUESTIONS[:2]]
        for _ in range(60):
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.01))
                    llm.generate(prompts, params, use_tqdm=False)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    num_interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        stop.set()
        texts = [future.result(30) for future in futures]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        stop.set()
        pool.shutdown(wait=False)
    assert num_interrupts > 20
    assert texts == [{" " + ANSWER_TO[question]} for question in QUESTIONS[:2]]


def test_shutdown_ends_the_requests_of_all_threads(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, **OPTIONS)

    def job() -> Any:
        try:
            return generate(llm, QUESTIONS[0], ENDLESS)
        except EngineDeadError as error:
            return str(error)

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(job) for _ in range(6)]
        wait_until(lambda: len(llm.engine.scheduler.running) == 6, 20)
        llm.shutdown()
        assert {future.result(20) for future in futures} == {
            "the engine was shut down; make a new LLM"
        }


def test_ctrl_c_in_shutdown_ends_the_engine_all_the_same(
    make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: later calls said that this thread is running a step already."""
    llm = make_llm(demo_model.MODEL, **OPTIONS)
    shutdown = llm.engine.executor.shutdown

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        shutdown()

    monkeypatch.setattr(llm.engine.executor, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.shutdown()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="was shut down"):
            generate(llm, QUESTIONS[0])
        llm.shutdown()


def test_callback_in_a_step_cannot_use_the_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a logits processor that generates waits for ever for its own step."""
    execute = llm.engine.executor.execute
    raised = []

    def reentrant(schedule: Any) -> Any:
        for call in (lambda: generate(llm, QUESTIONS[1]), lambda: llm.abort(0), llm.is_finished):
            with pytest.raises(NanoVLLMError, match="this thread is running a step") as caught:
                call()
            raised.append(caught)
        return execute(schedule)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "execute", reentrant)
        assert generate(llm, QUESTIONS[0]).text == " " + ANSWER_TO[QUESTIONS[0]]
    assert raised


def test_a_signal_handler_may_use_the_llm(llm: LLM) -> None:
    """The thread that it interrupts only waits."""
    texts = []
    before = signal.signal(
        signal.SIGALRM, lambda *_: texts.append(generate(llm, QUESTIONS[1]).text)
    )
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        assert generate(llm, QUESTIONS[0], FORTY).token_ids
        wait_until(lambda: bool(texts), 20)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert texts == [" " + ANSWER_TO[QUESTIONS[1]]]
