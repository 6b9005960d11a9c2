"""An engine in virtual time, and many of them behind the frontend's choice of a replica.

The scheduler, its pool and its policies are the engine's own objects. The worker is a `StepCost`,
and the tokens are what the request says. So a simulated engine schedules what a real one does, step
for step, and only the time is an estimate.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

from nanovllm.apps.plan.planned_requests import PlannedRequest
from nanovllm.apps.plan.step_cost import StepCost
from nanovllm.core.messages import Loaded, RowDetails, Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.errors import ConfigError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.scheduler.scheduler import Scheduler

_NO_TOKENS: list[int] = []


class Answered(NamedTuple):
    """A request that has ended; times are in seconds from the first arrival."""

    request: PlannedRequest
    first: float
    """When its first token came."""
    end: float
    num_output: int
    num_cached: int
    """Tokens of its prompt that were in the prefix cache."""


class _Running(NamedTuple):
    request: PlannedRequest
    output: Iterator[list[int]]
    """What its steps sample, a token each."""


class Replica:
    """An engine's loop in virtual time.

    Args:
        scheduler: the engine's, which nothing else calls.
        queue_depth: as `LLMEngine.queue_depth`.
        acceptance: how likely a draft token is right, behind those before it.
        ended: is told of each request that has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: StepCost,
        ended: Callable[[Answered], object],
        *,
        queue_depth: int = 0,
        acceptance: float = 0.0,
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
        self._queue_depth = queue_depth
        self._acceptance = acceptance
        self._random = random.Random(0)
        self._in_flight: deque[tuple[Schedule, float]] = deque()  # with the steps' ends
        self._inbox: deque[tuple[PlannedRequest, Iterator[list[int]] | None]] = deque()
        self._running: dict[int, _Running] = {}
        self._firsts: dict[int, float] = {}
        self._loads: list[tuple[float, Loaded]] = []  # in flight, with their ends
        self._num_added = 0
        self._device_free = 0.0

    def add(self, request: PlannedRequest, output: Iterable[int] | None = None) -> None:
        """Give the engine a request, which it sees in its next turn.

        Args:
            output: its tokens, if they count.
        """
        tokens = None if output is None else ([token] for token in output)
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
            self._launch(schedule)
        if self._in_flight and (schedule is None or len(self._in_flight) > self._queue_depth):
            self._retire(*self._in_flight.popleft())
        elif schedule is None:
            self.clock = self._inbox[0][0].arrival if self._inbox else math.inf
            return None
        manager = self.scheduler.block_manager
        used = len(manager.blocks) - manager.num_free_blocks
        self.busy_seconds += self.clock - begin
        self.block_seconds += used * (self.clock - begin)
        return schedule

    def _queue(self, request: PlannedRequest, output: Iterator[list[int]] | None) -> None:
        token_ids = request.token_ids
        limit = self.scheduler.max_model_len
        if len(token_ids) + request.num_output > limit:
            raise ConfigError(
                f"the request at {request.arrival:g} s has {len(token_ids)} + {request.num_output} "
                f"tokens, and max_model_len is {limit}: calibrate with a larger one, or leave the "
                "request out"
            )
        params = SamplingParams(max_tokens=request.num_output, ignore_eos=True)
        seq = Sequence(self._num_added, token_ids, params)
        self._running[seq.seq_id] = _Running(request, output or repeat([request.output_token]))
        self._num_added += 1
        self.scheduler.add(seq)

    def _launch(self, schedule: Schedule) -> None:
        begin = max(self.clock, self._device_free)
        end = begin + self._cost.of_schedule(schedule)
        if schedule.transfers is not None:
            for load in schedule.transfers.loads:
                seconds = self._load_seconds(sum(len(part.pages) for part in load.parts))
                loaded = Loaded(load.load_id, len(load.parts), seconds)
                self._loads.append((begin + seconds, loaded))
            if schedule.transfers.awaited and self._loads:
                end = max(end, self._loads[0][0])
        self._device_free = end
        self._in_flight.append((schedule, end))

    def _load_seconds(self, num_pages: int) -> float:
        tiers = self._cost.info.tiers
        return 0.0 if tiers is None else num_pages * tiers.page_seconds

    def _retire(self, schedule: Schedule, end: float) -> None:
        begin = self.clock
        self.clock = max(begin, end)
        running = self._running
        token_ids = [
            next(running[row.seq_id].output) if row.samples else _NO_TOKENS for row in schedule.rows
        ]
        result = StepResult(schedule.step_id, token_ids, seconds=self.clock - begin)
        if schedule.may_draft:
            self._accept(schedule, result)
        while self._loads and self._loads[0][0] <= self.clock:
            result.loaded.append(self._loads.pop(0)[1])
        firsts = self._firsts
        for seq in self.scheduler.update(schedule, result):
            if seq.seq_id not in firsts:
                firsts[seq.seq_id] = self.clock
            if seq.output.finish_reason is not None:
                self._end(seq)
        if self.scheduler.drafting is not None:
            elapsed = None if self._queue_depth else self.clock - begin
            self.scheduler.drafting.settle(schedule, result, elapsed)

    def _accept(self, schedule: Schedule, result: StepResult) -> None:
        """Draw how many drafts of each row are right."""
        for index, row in enumerate(schedule.rows):
            tokens = result.token_ids[index]
            if row.num_draft_tokens:
                output = self._running[row.seq_id].output
                for _ in range(row.num_draft_tokens):
                    if self._random.random() >= self._acceptance:
                        break
                    tokens = tokens + next(output)
                result.token_ids[index] = tokens
                result.details[row.seq_id] = RowDetails(row.num_draft_tokens)

    def _end(self, seq: Sequence) -> None:
        first = self._firsts.pop(seq.seq_id)
        request = self._running.pop(seq.seq_id).request
        self.num_requests -= 1
        cached = seq.num_cached_tokens or 0
        self._ended(Answered(request, first, self.clock, seq.num_output_tokens, cached))


def run(
    requests: Iterable[PlannedRequest],
    replicas: list[Replica],
    choose: Callable[[str, dict[str, int]], str],
) -> None:
    """Let the replicas answer the requests, each where `choose` says; it gets the conversation and
    how many requests each replica has, by its name, which is its place in the list.
    """
    turns: list[tuple[float, int]] = []  # of the replicas that have something to do
    loads = {str(number): 0 for number in range(len(replicas))}

    def advance(until: float) -> None:
        while turns and turns[0][0] < until:
            number = turns[0][1]
            replica = replicas[number]
            replica.turn()
            loads[str(number)] = replica.num_requests
            if replica.clock == math.inf:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (replica.clock, number))

    for request in requests:
        advance(request.arrival)
        name = choose(request.conversation, loads) if len(replicas) > 1 else "0"
        replica = replicas[int(name)]
        was_idle = replica.clock == math.inf
        replica.add(request)
        loads[name] += 1
        if was_idle:
            heapq.heappush(turns, (replica.clock, int(name)))
    advance(math.inf)
