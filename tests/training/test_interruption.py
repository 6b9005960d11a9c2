"""Pauses, sleep and updates in any order, of many callers at once: no request is lost."""

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

from nanovllm import AsyncLLM, RequestOutput, SamplingParams
from nanovllm.errors import InvalidRequestError
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
            if not call.cancelled() and (error := call.exception()) is not None:
                assert isinstance(error, InvalidRequestError), error
        for place, num_tokens, request in self._requests:
            try:
                output = await asyncio.wait_for(request, 30)
            except (asyncio.CancelledError, InvalidRequestError):
                continue  # or refused
            expected = self._whole[place][:num_tokens]
            if output.finish_reason == "abort":
                expected = expected[: len(output.token_ids)]
            assert output.token_ids == expected
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
            for seed in range(NUM_RUNS):
                callers = Callers(llm, random.Random(seed), whole)
                for _ in range(NUM_ACTIONS):
                    await callers.act()
                await callers.end()
        finally:
            llm.shutdown()

    asyncio.run(run())
