"""`nanovllm lab calibrate`: measures an engine's steps on this machine, and fits their cost."""

import dataclasses
import random
import time
from collections import deque
from collections.abc import Callable, Iterator

from nanovllm.apps.plan.step_cost import StepCost, StepWork, fit, work_of
from nanovllm.core.messages import Schedule, StepResult
from nanovllm.engine.llm_engine import LLMEngine, Observer
from nanovllm.factory import make_engine
from nanovllm.options.config import Config
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.scheduler.scheduler import Scheduler

_OUTPUT_LEN = 32
_SHARE = 0.05
"""Of the time to measure that the prompts of one wave may take."""


class LoopTimer(Observer):
    """Notes each step's work, and its seconds: from the loop that launched it, or from the end of
    the step before it, to the end of the loop that took its result.
    """

    def __init__(self) -> None:
        self.works: list[StepWork] = []
        self.seconds: list[float] = []
        self._launched: deque[tuple[Schedule, float]] = deque()
        self._done: tuple[Schedule, float] | None = None
        self._begin = self._last_end = 0.0

    def begin_step(self) -> None:
        self._begin = time.perf_counter()

    def scheduled(self, schedule: Schedule, scheduler: Scheduler) -> None:
        self._launched.append((schedule, self._begin))

    def waited(self, result: StepResult) -> None:
        self._done = self._launched.popleft()

    def end_step(self, scheduler: Scheduler) -> None:
        if self._done is None:
            return
        schedule, begin = self._done
        self._done = None
        end = time.perf_counter()
        if schedule.rows:
            self.works.append(work_of(schedule.rows))
            self.seconds.append(end - max(begin, self._last_end))
        self._last_end = end


def calibrate(config: Config, seconds: float, tell: Callable[[str], object]) -> StepCost:
    """Return the cost of an engine's steps: loads the model, and measures for so many seconds."""
    engine = make_engine(config)
    try:
        _run(engine, [64, 8, 1], random.Random(0))  # kernels are chosen, pages touched
        timer = LoopTimer()
        engine.observers.append(timer)
        start = time.monotonic()
        for wave in _waves(engine, timer, seconds):
            _run(engine, wave, random.Random(len(timer.works)), start + seconds)
            passed = time.monotonic() - start
            tell(f"{passed:.0f} of {seconds:.0f} s: {len(timer.works)} steps")
            if passed >= seconds:
                break
        options = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if field.init and getattr(config, field.name) != field.default
        }
        source = f"{config.model}, {len(timer.works)} steps"
        return fit(timer.works, timer.seconds, engine.worker_info, options, source)
    finally:
        engine.shutdown()


def _waves(engine: LLMEngine, timer: LoopTimer, seconds: float) -> Iterator[list[int]]:
    """Yield lengths of prompts that come together, without end: few and many, short and long."""
    rng = random.Random(0)
    info = engine.worker_info
    room = info.num_blocks * info.block_size
    longest = min(info.max_model_len, room // 2) - _OUTPUT_LEN - 1
    speed = 0.0  # tokens a second of the largest steps so far
    while True:
        num_rows = min(int(2 ** rng.uniform(0, 8)), engine.config.max_num_seqs)
        most = max(256, int(_SHARE * seconds * speed)) / num_rows
        top = min(longest, room // (2 * num_rows) - _OUTPUT_LEN, most)
        yield [max(1, min(longest, int(rng.uniform(0, 1) ** 2 * top))) for _ in range(num_rows)]
        sizes = sorted(zip(timer.works, timer.seconds, strict=True))[-8:]
        speed = max([work.tokens / took for work, took in sizes], default=0.0)


def _run(engine: LLMEngine, lengths: list[int], rng: random.Random, end: float = 1e30) -> None:
    """Run requests of random tokens, up to a moment. Half of them come while others run."""
    vocab_size = engine.worker_info.vocab_size
    ids = []
    while (lengths or not engine.is_finished()) and time.monotonic() < end:
        while lengths:
            prompt = [rng.randrange(vocab_size) for _ in range(lengths.pop())]
            max_tokens = rng.randint(_OUTPUT_LEN // 4, _OUTPUT_LEN)
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            ids.append(engine.add_request(prompt, params))
            if rng.random() < 0.5:
                break
        engine.step()
    for request_id in ids:
        engine.abort(request_id)
