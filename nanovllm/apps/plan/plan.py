"""Runs a plan: the same requests against one or more sets of replicas."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanovllm.apps.plan.fleet import Fleet
from nanovllm.apps.plan.options import MadeRequests, Objective, PlanOptions, option_of
from nanovllm.apps.plan.planned_requests import PlannedRequest, made, read_trace
from nanovllm.apps.plan.report import Outcome
from nanovllm.apps.plan.step_cost import StepCost


def plan(
    how: PlanOptions,
    made_requests: MadeRequests,
    objective: Objective,
    tell: Callable[[str], object],
) -> list[Outcome]:
    """Return the outcomes, those of the options beside at the end; each says its options.

    Args:
        tell: is told how far a run is, in words.

    Raises:
        ConfigError: an option, the cost or the trace is wrong.
    """
    cost = StepCost.load(Path(how.cost))

    def requests(num_replicas: int) -> Iterator[PlannedRequest]:
        last = time.monotonic()
        trace = made(made_requests) if how.trace is None else read_trace(Path(how.trace), how.speed)
        for number, request in enumerate(trace, 1):
            if time.monotonic() - last > 0.5:
                last = time.monotonic()
                tell(f"{num_replicas} replicas: {number} requests, {request.arrival:.0f} s")
            yield request

    def outcome(options: dict[str, Any], num_replicas: int) -> Outcome:
        fleet = Fleet(cost.with_options(options), objective, how.acceptance)
        return {"options": options, **fleet.outcome(requests(num_replicas), num_replicas)}

    least, most = how.range_of_replicas()
    base = dict(map(option_of, how.option))
    outcomes = _fewest(lambda number: outcome(base, number), least, most)
    if how.beside:
        beside = base | dict(map(option_of, how.beside))
        outcomes += _fewest(lambda number: outcome(beside, number), least, most)
    return outcomes


def _fewest(outcome: Callable[[int], Outcome], least: int, most: int) -> list[Outcome]:
    """Return the outcomes of the numbers of replicas that were tried, the fewest that meet the
    objective among them; if none does, the last is `most`.
    """
    found = {most: outcome(most)}
    high = most
    while found[most]["meets_slo"] and least < high:
        middle = (least + high) // 2
        found[middle] = outcome(middle)
        if found[middle]["meets_slo"]:
            high = middle
        else:
            least = middle + 1
    return [found[number] for number in sorted(found)]
