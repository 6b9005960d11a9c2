"""What a plan answers: how long requests wait, and how many replicas an objective takes."""

from array import array
from typing import Any, NamedTuple

import numpy as np

from nanovllm.apps.plan.options import Objective
from nanovllm.apps.plan.replica import Answered, Replica


class Spread(NamedTuple):
    """The median and two high percentiles, in seconds."""

    p50: float
    p90: float
    p99: float


def spread_of(values: "array[float]") -> Spread:
    """Return the percentiles of some seconds; 0 if there are none."""
    found = np.quantile(np.frombuffer(values), (0.5, 0.9, 0.99)) if values else np.zeros(3)
    return Spread(*found.tolist())


class Answers:
    """Collects what the requests of a run got."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.ttft = array("d")
        self.tpot = array("d")
        self.e2e = array("d")
        self.num_good = self.num_tokens = self.num_cached = self.num_prompt = 0
        self.end = 0.0

    def add(self, answered: Answered) -> None:
        """Note a request that has ended."""
        request, first, end, num_output, num_cached = answered
        ttft = first - request.arrival
        self.ttft.append(ttft)
        self.e2e.append(end - request.arrival)
        tpot = 0.0
        if num_output > 1:
            tpot = (end - first) / (num_output - 1)
            self.tpot.append(tpot)
        self.num_good += ttft <= self.objective.slo_ttft and tpot <= self.objective.slo_tpot
        self.num_tokens += num_output
        self.num_cached += num_cached
        self.num_prompt += sum(run.length for run in request.prompt)
        self.end = max(self.end, end)

    def outcome(self, replicas: list[Replica]) -> dict[str, Any]:
        """Return the answers as plain values."""
        num_requests = len(self.ttft)
        seconds = max(self.end, 1e-9)
        blocks = sum(len(each.scheduler.block_manager.blocks) for each in replicas)
        good = self.num_good / max(num_requests, 1)
        return {
            "replicas": len(replicas),
            "requests": num_requests,
            "seconds": seconds,
            "requests_per_second": num_requests / seconds,
            "output_tokens_per_second": self.num_tokens / seconds,
            "ttft": spread_of(self.ttft)._asdict(),
            "tpot": spread_of(self.tpot)._asdict(),
            "e2e": spread_of(self.e2e)._asdict(),
            "good_share": good,
            "goodput": self.num_good / seconds,
            "meets_slo": good >= self.objective.slo_share,
            "busy": sum(each.busy_seconds for each in replicas) / seconds / len(replicas),
            "kv_used": sum(each.block_seconds for each in replicas) / seconds / blocks,
            "cached_share": self.num_cached / max(self.num_prompt, 1),
            "preemptions": sum(each.scheduler.stats.num_preemptions for each in replicas),
        }
