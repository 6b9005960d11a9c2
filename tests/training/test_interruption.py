"""Pauses, sleep and updates in any order, of many callers at once: no request is lost."""

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, RequestOutput, SamplingParams
from nanovllm.errors import InvalidRequestError, PluginError
from nanovllm.features.training.control import control_of
from tests.training.test_updates import OPTIONS, PROMPTS
from tests.training.weights import SMALL

NUM_RUNS = int(os.environ.get("UPDATE_CASES", "2"))
NUM_ACTIONS = 40


class Callers:
    """Tasks that use one engine as they like."""

    def __init__(self, llm: AsyncLLM, rng: random.Random, whole: list[list[int]]) -> None:
        self._llm = llm
        self._rng = rng
        self._whole = whole
        self._requests: list[tuple[int, int, asyncio.Task[RequestOutput]]] = []
        self._calls: list[asyncio.Task[Any]] = []
        self.num_calls = 0  # that did what they were asked for
        self.num_whole = 0  # requests that have all their tokens

    async def act(self) -> None:
        """Do something, and wait for it or not."""
        rng, llm = self._rng, self._llm
        mode = rng.choice(["abort", "wait", "wait", "wait"])
        actions: list[Callable[[], Awaitable[Any]]] = [
            lambda: llm.pause_generation(
                mode=rng.choice([mode, "keep"]), clear_cache=rng.random() < 0.5
            ),
            llm.resume_generation,
            lambda: llm.sleep(mode=mode),
            llm.wake_up,
            lambda: self._update(mode),
            llm.check_health,
        ]
        kind = rng.random()
        if kind < 0.4:
            self._request()
        elif kind < 0.5 and (tasks := [*self._calls, *(each[2] for each in self._requests)]):
            rng.choice(tasks).cancel()
        else:
            self._calls.append(asyncio.ensure_future(rng.choice(actions)()))
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.003]))

    async def end(self) -> None:
        """Let all tasks end, and check what they return."""
        for _ in range(2):  # a call that waited may have paused again
            for _ in range(200):
                await self._llm.wake_up()
                with contextlib.suppress(InvalidRequestError):  # an update runs, or sleep began
                    await self._llm.resume_generation()
                if all(call.done() for call in self._calls):
                    break
                await asyncio.sleep(0.005)
        for call in self._calls:
            assert call.done()
            error = None if call.cancelled() else call.exception()
            assert error is None or isinstance(error, InvalidRequestError), error
            self.num_calls += error is None and not call.cancelled()
        for place, num_tokens, request in self._requests:
            try:
                output = await asyncio.wait_for(request, 30)
            except (asyncio.CancelledError, InvalidRequestError):
                continue  # or refused
            expected = self._whole[place][:num_tokens]
            if output.finish_reason == "abort":
                expected = expected[: len(output.token_ids)]
            assert output.token_ids == expected
            self.num_whole += output.finish_reason == "length"
        await self._llm.check_health()  # behind the ends of cancelled requests
        engine = self._llm.engine
        assert engine.is_finished()
        assert not engine.output_processor.requests
        assert engine.scheduler.block_manager.num_free_blocks == engine.worker_info.num_blocks

    def _request(self) -> None:
        place, num_tokens = self._rng.randrange(len(PROMPTS)), self._rng.randrange(1, 30)
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        request = asyncio.ensure_future(self._llm.generate(PROMPTS[place], params))
        self._requests.append((place, num_tokens, request))

    async def _update(self, mode: str) -> None:
        try:
            await self._llm.start_weight_update(mode)
            await asyncio.sleep(0)
        finally:
            await self._llm.finish_weight_update()


def test_no_request_is_lost(shared_checkpoint: Callable[..., str]) -> None:
    async def run() -> None:
        llm = AsyncLLM(shared_checkpoint(**SMALL), **OPTIONS)
        try:
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            whole = [(await llm.generate(prompt, params)).token_ids for prompt in PROMPTS]
            num_calls = num_whole = 0
            for seed in range(NUM_RUNS):
                llm.engine.queue_depth = seed % 2 * 2
                callers = Callers(llm, random.Random(seed), whole)
                for _ in range(NUM_ACTIONS):
                    await callers.act()
                await callers.end()
                num_calls += callers.num_calls
                num_whole += callers.num_whole
            assert num_calls > 0
            assert num_whole > 0
        finally:
            llm.shutdown()

    asyncio.run(run())


PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def test_a_waiting_pause_that_is_cancelled_in_a_pause(
    shared_checkpoint: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    """Symptom: an update writes weights under the steps that the device has still to run."""
    llm = make_llm(shared_checkpoint(**SMALL), **OPTIONS)
    expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    engine, control = llm.engine, control_of(llm.engine)
    engine.queue_depth = 2
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    (pause,) = control.pause("keep", False).commands()
    pause()
    second = control.pause("wait", False)
    for command, _ in zip(second.commands(), range(4), strict=False):
        command()
    assert engine._in_flight
    second.fail()
    assert engine.is_paused
    assert not engine._in_flight
    control.resume()
    outputs = []
    while not engine.is_finished():
        outputs += engine.step()
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_a_resume_before_the_first_step_of_a_sleep(
    shared_checkpoint: Callable[..., str], make_llm: Callable[..., LLM]
) -> None:
    """Symptom: requests that come then are queued, and the sleep waits for them, too."""
    llm = make_llm(shared_checkpoint(**SMALL), **OPTIONS)
    control = control_of(llm.engine)
    (pause,) = control.pause("keep", False).commands()
    pause()
    sleep = control.sleep(1, "wait").commands()
    next(sleep)()
    control.resume()
    with pytest.raises(InvalidRequestError, match=r"about to sleep: call wake_up\(\)"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for command in sleep:
        command()
    assert llm.is_sleeping()


def test_a_policy_that_fails_while_a_pause_waits(
    shared_checkpoint: Callable[..., str],
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symptom: the policy of the dead engine gets the held requests, with an error of its own."""
    llm = make_llm(shared_checkpoint(**SMALL), **OPTIONS)
    engine, control = llm.engine, control_of(llm.engine)
    engine.add_request(PROMPTS[0], PARAMS)
    engine.is_paused = True
    call = control.pause("wait", False)
    commands = call.commands()
    next(commands)()
    engine.add_request(PROMPTS[1], PARAMS)  # held

    def fail(*_: object) -> None:
        raise PluginError("the policy m:C: failed")

    for name in ("schedule", "add"):
        monkeypatch.setattr(engine.scheduler, name, fail)
    with pytest.raises(PluginError):
        next(commands)()
    call.fail()
    assert engine._held is None
