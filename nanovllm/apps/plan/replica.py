"""An engine in virtual time.

The scheduler, its pool and its policies are the engine's own objects. What a step costs is an
estimate, and its tokens are what the request says. So a simulated engine schedules what a real one
does, step for step.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

from nanovllm.apps.plan.planned_requests import PlannedRequest
from nanovllm.apps.plan.step_cost import StepCost, work_of
from nanovllm.core.messages import Loaded, Row, RowDetails, Schedule, StepResult, Transfers
from nanovllm.core.sequence import Sequence
from nanovllm.core.worker_info import TierInfo, pages_for
from nanovllm.errors import ConfigError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.scheduler.step_loop import StepLoop

_NO_TOKENS: list[int] = []


@dataclass(slots=True, eq=False)
class Answering:
    """A request that runs; times are in seconds from the first arrival."""

    request: PlannedRequest
    output: Iterator[list[int]]
    """What its steps sample, a token each."""
    first: float | None = None
    """When its first token came."""


class Replica:
    """An engine's loop in virtual time.

    Args:
        scheduler: the engine's, which nothing else calls.
        ended: is told of each request that has ended, with its sequence and the time.
        queue_depth: as `LLMEngine.queue_depth`.
        drafts: how many drafts are proposed for a row, and how many of them are right.
        loads: given what a step moves and when it begins, which loads have ended, and when the step
            may end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: StepCost,
        ended: Callable[[Answering, Sequence, float], object],
        *,
        queue_depth: int = 0,
        drafts: Callable[[Row], tuple[int, int]] | None = None,
        loads: Callable[[Transfers, float], tuple[list[Loaded], float]] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.clock = math.inf
        """When the loop's next turn begins; inf while there is nothing to do."""
        self.num_requests = 0
        """Those that have come and not ended."""
        self.busy_seconds = 0.0
        self.block_seconds = 0.0
        """Blocks in use, times seconds."""
        self._cost = cost
        self._ended = ended
        self._runs_ahead = queue_depth > 0
        self._drafts = drafts or random_drafts(0.0)
        self._loads = loads or timed_loads(cost.info.tiers)
        self._loop = StepLoop(scheduler, self._execute, queue_depth)
        self._ends: deque[float] = deque()  # of the steps in flight
        self._device_free = 0.0
        self._inbox: deque[tuple[PlannedRequest, Iterator[list[int]]]] = deque()
        self._running: dict[int, Answering] = {}
        self._num_added = 0

    def add(self, request: PlannedRequest, output: Iterable[int] | None = None) -> None:
        """Give the engine a request, which it sees in its next turn.

        Args:
            output: its tokens, if they count.
        """
        tokens = repeat([request.output_token]) if output is None else ([t] for t in output)
        self._inbox.append((request, tokens))
        self.num_requests += 1
        if self.clock == math.inf:
            self.clock = request.arrival

    def turn(self) -> Schedule | None:
        """Run the loop once: launch a step and take the result of the oldest one. Return the step.

        Raises:
            ConfigError: a request fits no engine of this kind.
        """
        while self._inbox and self._inbox[0][0].arrival <= self.clock:
            self._queue(*self._inbox.popleft())
        begin = self.clock
        schedule = self.scheduler.schedule()
        if schedule is not None:
            self._loop.launch(schedule)
        if self._loop.is_due(schedule):
            self.clock = max(begin, self._ends.popleft())
            self._retire(self.clock - begin)
        elif schedule is None:
            self.clock = self._inbox[0][0].arrival if self._inbox else math.inf
            return None
        manager = self.scheduler.block_manager
        used = len(manager.blocks) - manager.num_free_blocks
        self.busy_seconds += self.clock - begin
        self.block_seconds += used * (self.clock - begin)
        return schedule

    def _queue(self, request: PlannedRequest, output: Iterator[list[int]]) -> None:
        token_ids = request.token_ids
        info = self._cost.info
        num_tokens = len(token_ids) + request.num_output
        sizes = info.block_size, info.kv.windows, info.max_num_batched_tokens
        num_pages = pages_for(num_tokens, *sizes) + info.kv.state_pages
        for name, needed in (("max_model_len", num_tokens), ("num_blocks", num_pages)):
            if needed > getattr(info, name):
                raise ConfigError(
                    f"the request at {request.arrival:g} s has {len(token_ids)} + "
                    f"{request.num_output} tokens and needs {name}={needed}, but it is "
                    f"{getattr(info, name)}: calibrate with more, or leave the request out"
                )
        params = SamplingParams(max_tokens=request.num_output, ignore_eos=True)
        seq = Sequence(self._num_added, token_ids, params)
        self._running[seq.seq_id] = Answering(request, output)
        self._num_added += 1
        self.scheduler.add(seq)

    def _execute(self, schedule: Schedule) -> StepResult:
        begin = max(self.clock, self._device_free)
        loaded, end = self._loads(schedule.transfers, begin) if schedule.transfers else ([], begin)
        end = max(end, begin + self._cost.seconds(work_of(schedule.rows)))
        self._device_free = end
        self._ends.append(end)
        running = self._running
        token_ids = [
            next(running[row.seq_id].output) if row.samples else _NO_TOKENS for row in schedule.rows
        ]
        result = StepResult(schedule.step_id, token_ids, seconds=end - begin, loaded=loaded)
        if schedule.may_draft:
            self._verify_drafts(schedule, result)
        return result

    def _verify_drafts(self, schedule: Schedule, result: StepResult) -> None:
        for index, row in enumerate(schedule.rows):
            if row.num_draft_tokens:
                num_proposed, num_right = self._drafts(row)
                output = self._running[row.seq_id].output
                more = [next(output)[0] for _ in range(num_right)]
                result.token_ids[index] = result.token_ids[index] + more
                result.details[row.seq_id] = RowDetails(num_proposed)

    def _retire(self, elapsed: float) -> None:
        for seq in self._loop.retire(None if self._runs_ahead else elapsed):
            answering = self._running[seq.seq_id]
            if answering.first is None:
                answering.first = self.clock
            if seq.output.finish_reason is not None:
                del self._running[seq.seq_id]
                self.num_requests -= 1
                self._ended(answering, seq, self.clock)


def random_drafts(acceptance: float, seed: int = 0) -> Callable[[Row], tuple[int, int]]:
    """Return what proposes all drafts that a row may have, each right with a probability, if those
    before it are.
    """
    rng = random.Random(seed)

    def drafts(row: Row) -> tuple[int, int]:
        most = row.num_draft_tokens
        return most, next((n for n in range(most) if rng.random() >= acceptance), most)

    return drafts


def timed_loads(tiers: TierInfo | None) -> Callable[[Transfers, float], tuple[list[Loaded], float]]:
    """Return what loads pages one after the other, from host memory."""
    page_seconds = 0.0 if tiers is None else tiers.page_seconds
    in_flight: deque[tuple[float, Loaded]] = deque()  # with their ends

    def loads(transfers: Transfers, begin: float) -> tuple[list[Loaded], float]:
        for load in transfers.loads:
            seconds = page_seconds * sum(len(part.pages) for part in load.parts)
            start = max(begin, in_flight[-1][0]) if in_flight else begin
            in_flight.append((start + seconds, Loaded(load.load_id, len(load.parts), seconds)))
        end = max(begin, in_flight[0][0]) if transfers.awaited and in_flight else begin
        loaded = []
        while in_flight and in_flight[0][0] <= end:
            loaded.append(in_flight.popleft()[1])
        return loaded, end

    return loads
