"""`nanovllm lab calibrate`: measures an engine's steps on this machine, and fits their cost."""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from nanovllm.apps.plan.step_cost import MeasuredStep, StepCost, fit, work_of
from nanovllm.core.messages import Schedule, StepResult
from nanovllm.engine.llm_engine import LLMEngine, Observer
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.scheduler.scheduler import Scheduler

_OUTPUT_LEN = 16


class LoopTimer(Observer):
    """Notes each step's work, and how long the loop took for it. On a device that runs ahead a step
    takes from the end of the one before it, or from its launch.
    """

    def __init__(self, runs_ahead: bool) -> None:
        self.steps: list[MeasuredStep] = []
        self._runs_ahead = runs_ahead
        self._launched: deque[tuple[Schedule, float]] = deque()
        self._begin = self._last_end = 0.0
        self._done: Schedule | None = None

    def begin_step(self) -> None:
        self._begin = time.perf_counter()

    def scheduled(self, schedule: Schedule, scheduler: Scheduler) -> None:
        self._launched.append((schedule, time.perf_counter()))

    def waited(self, result: StepResult) -> None:
        self._done, launched = self._launched.popleft()
        if self._runs_ahead:
            begin = max(self._last_end, launched)
            self._last_end = time.perf_counter()
            self._note(self._last_end - begin)

    def end_step(self, scheduler: Scheduler) -> None:
        if self._done is not None and not self._runs_ahead:
            self._note(time.perf_counter() - self._begin)

    def _note(self, seconds: float) -> None:
        assert self._done is not None
        if self._done.rows:
            self.steps.append(MeasuredStep(work_of(self._done.rows), seconds))
        self._done = None


def calibrate(config: Config, seconds: float, tell: Callable[[str], object]) -> StepCost:
    """Return the cost of an engine's steps: loads the model, and measures for so many seconds."""
    engine = make_engine(config)
    try:
        info = engine.worker_info
        timer = LoopTimer(bool(engine.queue_depth))
        _run(engine, next(_waves(engine)))  # kernels are chosen, pages touched
        engine.observers.append(timer)
        end = time.monotonic() + seconds
        for wave in _waves(engine):
            left = end - time.monotonic()
            if left <= 0:
                break
            _run(engine, wave, end)
            tell(f"{seconds - left:.0f} of {seconds:.0f} s: {len(timer.steps)} steps")
        options = {name: getattr(config, name) for name in _OPTIONS}
        return fit(timer.steps, info, options, f"{config.model}, {len(timer.steps)} steps")
    finally:
        engine.shutdown()


_OPTIONS = (
    "model",
    "max_num_seqs",
    "enable_prefix_caching",
    "scheduling_policy",
    "eviction_policy",
)
"""Options of the engine that its scheduler reads."""


def _waves(engine: LLMEngine) -> Iterator[list[int]]:
    """Yield lengths of prompts that begin together, without end: few and many, short and long."""
    rng = random.Random(0)
    info = engine.worker_info
    room = info.num_blocks * info.block_size
    longest = min(info.max_model_len, room // 2) - _OUTPUT_LEN - 1
    for number in count():
        most = engine.config.max_num_seqs
        num_rows = min(1 << number % 8, most)
        top = max(16, min(longest, room // (2 * num_rows) - _OUTPUT_LEN, 32768 // num_rows))
        lengths = [int(2 ** rng.uniform(3, top.bit_length() - 1)) for _ in range(num_rows)]
        yield [min(max(length, 1), longest) for length in lengths]


def _run(engine: LLMEngine, lengths: list[int], end: float | None = None) -> None:
    """Run requests of random tokens, up to a moment."""
    rng = random.Random(len(lengths) + sum(lengths))
    vocab_size = engine.worker_info.vocab_size
    params: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0}
    ids = [
        engine.add_request(
            [rng.randrange(vocab_size) for _ in range(length)],
            SamplingParams(max_tokens=rng.randint(_OUTPUT_LEN // 2, _OUTPUT_LEN), **params),
        )
        for length in lengths
    ]
    while not engine.is_finished() and (end is None or time.monotonic() < end):
        engine.step()
    for request_id in ids:
        engine.abort(request_id)
