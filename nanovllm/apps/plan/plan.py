"""Runs a plan: the same requests against one or more sets of replicas."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nanovllm.apps.plan.options import (
    OF_WORKERS,
    MadeRequests,
    Objective,
    PlanOptions,
    option_of,
)
from nanovllm.apps.plan.planned_requests import PlannedRequest, made, read_trace
from nanovllm.apps.plan.replica import Replica, run
from nanovllm.apps.plan.report import Answers
from nanovllm.apps.plan.step_cost import StepCost
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.factory import make_scheduler
from nanovllm.options.config import Config
from nanovllm.utils.affinity import order


class ReplicaPlan:
    """One set of options for the replicas, and the requests that they get.

    Args:
        options: engine options that differ from the calibrated engine's.
        requests: returns the requests, anew each time.
        tell: is told how far a run is, in words.
    """

    def __init__(
        self,
        cost: StepCost,
        options: Mapping[str, Any],
        how: PlanOptions,
        objective: Objective,
        requests: Callable[[], Iterable[PlannedRequest]],
        tell: Callable[[str], object],
    ) -> None:
        self._cost = cost
        self._how = how
        self._objective = objective
        self._requests = requests
        self._tell = tell
        of_workers = {name: options[name] for name in OF_WORKERS if name in options}
        own = {name: value for name, value in options.items() if name not in of_workers}
        self._info: WorkerInfo = dataclasses.replace(cost.info, **of_workers)
        self._config = Config(**{**cost.options, **own})

    def outcome(self, num_replicas: int) -> dict[str, Any]:
        """Return what so many replicas answer; see `Answers.outcome`."""
        answers = Answers(self._objective)
        depth = int(self._info.runs_ahead)
        replicas = [
            Replica(
                make_scheduler(self._config, self._info),
                self._cost,
                answers.add,
                queue_depth=depth,
                acceptance=self._how.acceptance,
            )
            for _ in range(num_replicas)
        ]
        start = time.monotonic()
        run(self._told(num_replicas), replicas, lambda key, loads: order(key, loads)[0])
        return {**answers.outcome(replicas), "simulated_in": time.monotonic() - start}

    def fewest(self, least: int, most: int) -> list[dict[str, Any]]:
        """Return the outcomes of the numbers of replicas that were tried, the fewest that meet the
        objective among them; if none does, the last is `most`.
        """
        found = {most: self.outcome(most)}
        high = most
        while found[most]["meets_slo"] and least < high:
            middle = (least + high) // 2
            found[middle] = self.outcome(middle)
            if found[middle]["meets_slo"]:
                high = middle
            else:
                least = middle + 1
        return [found[number] for number in sorted(found)]

    def _told(self, num_replicas: int) -> Iterator[PlannedRequest]:
        last = time.monotonic()
        for number, request in enumerate(self._requests(), 1):
            if time.monotonic() - last > 0.5:
                last = time.monotonic()
                self._tell(f"{num_replicas} replicas: {number} requests, {request.arrival:.0f} s")
            yield request


def plan(
    how: PlanOptions,
    made_requests: MadeRequests,
    objective: Objective,
    tell: Callable[[str], object],
) -> list[dict[str, Any]]:
    """Return the outcomes, those of the options beside at the end; each says its options.

    Raises:
        ConfigError: an option, the cost or the trace is wrong.
    """
    cost = StepCost.load(Path(how.cost))

    def requests() -> Iterator[PlannedRequest]:
        if how.trace is not None:
            return read_trace(Path(how.trace), how.trace_form, how.speed)
        return made(made_requests)

    least, most = how.range_of_replicas()
    outcomes = []
    base = dict(map(option_of, how.option))
    for options in (base, {**base, **dict(map(option_of, how.beside))})[: 1 + bool(how.beside)]:
        found = ReplicaPlan(cost, options, how, objective, requests, tell).fewest(least, most)
        outcomes += [{"options": options, **outcome} for outcome in found]
    return outcomes
