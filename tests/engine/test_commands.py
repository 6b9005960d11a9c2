"""Ctrl-C waits for the end of a block, except in what the block lets it interrupt."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.commands import DelayedInterrupt
from nanovllm.testing.invariants import check_scheduler


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler_stays() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_it_comes_at_the_end_of_the_block() -> None:
    done = []

    def block() -> None:
        with DelayedInterrupt():
            press()
            press()
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done


def test_it_interrupts_a_function_at_once() -> None:
    done = []

    def compute() -> None:
        press()
        done.append(True)

    with pytest.raises(KeyboardInterrupt), DelayedInterrupt() as interrupt:
        interrupt.interruptible(compute)
    assert not done


def test_one_that_came_before_interrupts_the_next_function() -> None:
    done = []

    def block() -> None:
        with DelayedInterrupt() as interrupt:
            press()
            interrupt.interruptible(done.append, True)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert not done


def test_a_second_one_waits_for_what_the_first_one_began() -> None:
    done = []

    def block() -> None:
        with DelayedInterrupt() as interrupt:
            try:
                interrupt.interruptible(press)
            except KeyboardInterrupt:
                press()
                done.append(True)
                raise

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done


@pytest.mark.parametrize("in_function", [True, False])
def test_a_handler_that_returns_is_called_each_time(in_function: bool) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with DelayedInterrupt() as interrupt:
            for count in (1, 2):
                if in_function:
                    interrupt.interruptible(press)
                    assert len(calls) == count
            press()
            assert len(calls) == 2 * in_function
        assert len(calls) == 2 * in_function + 1
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_no_function_stays(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with DelayedInterrupt() as interrupt:
            assert signal.getsignal(signal.SIGINT) is handler
            assert interrupt.interruptible(lambda: 3) == 3
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_nothing() -> None:
    seen: list[object] = []

    def run(look: Callable[[], object]) -> None:
        with DelayedInterrupt():
            seen.append(look())

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run, args=(lambda: signal.getsignal(signal.SIGINT),))
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_handler_that_the_block_sets_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with DelayedInterrupt():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("owner", ["executor", "scheduler"])
def test_a_step_is_interrupted_where_it_computes(demo_llm: LLM, owner: str) -> None:
    """Ctrl-C while the step is scheduled waits until the step is to be computed."""
    engine, computed = demo_llm.engine, []
    params = SamplingParams(temperature=0, max_tokens=4)
    expected = demo_llm.generate("What is a KV cache?", params)[0].token_ids
    part: Any = getattr(engine, owner)
    name = "execute" if owner == "executor" else "schedule"
    function = getattr(part, name)

    def pressed(*args: Any) -> Any:
        press()
        computed.append(owner == "executor")
        return function(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, name, pressed)
        engine.add_request("What is a KV cache?", params)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert computed == ([] if owner == "executor" else [False])
    check_scheduler(engine.scheduler)
    outputs = []
    while not engine.is_finished():
        outputs += engine.step()
    assert outputs[0].token_ids == expected


def test_ctrl_c_at_any_time_leaves_an_engine_that_answers(demo_llm: LLM) -> None:
    """Also while prompts are tokenized, and with continuations and grammars among the requests."""
    rng = random.Random(0)
    prompts = ["What is a KV cache?", "Hi " * 100, "What is a block?"]
    params = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=1),
        SamplingParams(temperature=0, max_tokens=2, n=3),
        SamplingParams(max_tokens=12, seed=1, structured_outputs={"choice": ["a block", "b"]}),
    ]

    def generate() -> list[list[list[int]]]:
        found = demo_llm.generate(prompts, params, use_tqdm=False)
        return [[completion.token_ids for completion in output.outputs] for output in found]

    def generate_until_interrupted(seconds: float) -> None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            generate()

    expected, engine = generate(), demo_llm.engine
    for _ in range(12):
        with pytest.raises(KeyboardInterrupt):
            generate_until_interrupted(rng.random() * 0.05)
        assert engine.is_finished()
        check_scheduler(engine.scheduler)
        assert generate() == expected
