"""What a load told of a server: the times of each request, and their statistics as text and JSON.

Names and meanings are those of vLLM's `bench serve`. Knows no connection.
"""

import collections
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nanovllm.loadtest.load_plan import LoadPlan

PERCENTILES = (90, 95, 99)
LATE_SECONDS = 0.01
BUSY = 0.9
"""From this lag of the event loop (99th percentile), or this share of a core on, the client itself
slows the answers down."""
MAX_ERRORS = 5
"""Different errors that the text shows."""
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2el": "whole request",
}


@dataclasses.dataclass(slots=True)
class Measurement:
    """One request. Times are seconds of time.perf_counter()."""

    arrival: float
    """When it was to be sent."""
    start: float = 0.0
    """When it was sent."""
    token_times: list[float] = dataclasses.field(default_factory=list)
    """When events with text came; an event may hold several tokens."""
    end: float = 0.0
    """When the last part of the answer came."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    has_usage: bool = False
    """Whether the server counted the tokens; else events are counted."""
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.start

    @property
    def e2el(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float:
        """Mean seconds of an output token after the first; 0 for one token."""
        more = self.num_output_tokens - 1
        return (self.end - self.token_times[0]) / more if more > 0 else 0.0

    @property
    def itls(self) -> list[float]:
        """Seconds between events."""
        return [after - before for before, after in itertools.pairwise(self.token_times)]


@dataclasses.dataclass(frozen=True)
class Client:
    """How the client fared: it must not be what is measured."""

    lag: float
    """Seconds that its event loop was late, 99th percentile."""
    busy: float
    """Share of a core that it took."""

    @property
    def warning(self) -> str | None:
        if self.lag < LATE_SECONDS and self.busy < BUSY:
            return None
        return (
            f"the client was late: its event loop by {1000 * self.lag:.0f} ms (p99), with "
            f"{self.busy:.0%} of a core; the times may be too long by as much. Give it a core of "
            "its own, or another machine"
        )


class Report:
    """The statistics of a load.

    Args:
        seconds: from the first request's beginning to the last one's end.
    """

    def __init__(
        self, plan: LoadPlan, measured: Sequence[Measurement], seconds: float, client: Client
    ) -> None:
        self.plan = plan
        self.measured = measured
        self.seconds = seconds
        self.client = client
        self.completed = [item for item in measured if item.error is None]
        self.errors = collections.Counter(item.error for item in measured if item.error is not None)
        self.times = {
            "ttft": [item.ttft for item in self.completed],
            "tpot": [item.tpot for item in self.completed if item.num_output_tokens > 1],
            "itl": [gap for item in self.completed for gap in item.itls],
            "e2el": [item.e2el for item in self.completed],
        }
        """Seconds, by latency."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(item.num_prompt_tokens for item in self.completed)

    @property
    def num_output_tokens(self) -> int:
        return sum(item.num_output_tokens for item in self.completed)

    @property
    def num_good(self) -> int:
        """Completed requests within all limits of the plan's goodput."""
        limits = self.plan.limits()
        return sum(
            all(1000 * getattr(item, name) <= limit for name, limit in limits.items())
            for item in self.completed
        )

    @property
    def peak(self) -> int:
        """Most requests at once."""
        changes = [(item.start, 1) for item in self.measured if item.start]
        changes += [(item.end, -1) for item in self.measured if item.start]
        return max(itertools.accumulate((step for _, step in sorted(changes)), initial=0))

    def as_text(self) -> str:
        rate = self._rate
        lines = [
            f"requests     {len(self.completed)} completed, {self.errors.total()} failed in "
            f"{self.seconds:.2f} s, at most {self.peak} at once",
            f"tokens       {self.num_prompt_tokens} in, {self.num_output_tokens} out",
            f"throughput   {rate(len(self.completed)):.2f} requests/s, "
            f"{rate(self.num_output_tokens):.1f} output tokens/s, "
            f"{rate(self.num_prompt_tokens + self.num_output_tokens):.1f} tokens/s",
        ]
        if self.plan.goodput:
            share = self.num_good / max(1, len(self.measured))
            lines.append(
                f"goodput      {rate(self.num_good):.2f} requests/s, {share:.1%} of all, within "
                + " ".join(self.plan.goodput)
            )
        columns = ("mean", "median", *(f"p{percent}" for percent in PERCENTILES))
        lines += ["", f"{'milliseconds':<29}" + "".join(f"{name:>10}" for name in columns)]
        for name, title in TITLES.items():
            row = self._spread(name)
            figures = "".join(f"{row[f'{column}_{name}_ms']:>10.2f}" for column in columns)
            lines.append(f"{name.upper():<5} {title:<23}{figures}")
        if self.completed and not all(item.has_usage for item in self.completed):
            lines += ["", "The server counts no tokens: the events are counted instead."]
        if self.plan.max_concurrency is not None and self.plan.request_rate < math.inf:
            waits = sorted(item.start - item.arrival for item in self.measured if item.start)
            wait = 1000 * percentile(waits, 99)
            lines += ["", f"Requests waited here for a place among them: {wait:.2f} ms (p99)."]
        for error, count in self.errors.most_common(MAX_ERRORS):
            lines.append(f"failed {count} times: {error}")
        return "\n".join(lines) + "\n"

    def as_json(self) -> dict[str, Any]:
        """Return the report by vLLM's names, with the times of each request in seconds."""
        plan, begin = self.plan, min((item.start for item in self.measured), default=0.0)
        rate = "inf" if plan.request_rate == math.inf else plan.request_rate
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": "openai-chat" if plan.is_chat else "openai",
            "model_id": plan.model,
            "num_prompts": plan.num_prompts,
            "request_rate": rate,
            "burstiness": plan.burstiness,
            "max_concurrency": plan.max_concurrency,
            "duration": self.seconds,
            "completed": len(self.completed),
            "failed": self.errors.total(),
            "total_input_tokens": self.num_prompt_tokens,
            "total_output_tokens": self.num_output_tokens,
            "request_throughput": self._rate(len(self.completed)),
            "request_goodput": self._rate(self.num_good) if plan.goodput else None,
            "goodput_limits_ms": plan.limits(),
            "output_throughput": self._rate(self.num_output_tokens),
            "total_token_throughput": self._rate(self.num_prompt_tokens + self.num_output_tokens),
            "max_concurrent_requests": self.peak,
            "client_lag_p99_ms": 1000 * self.client.lag,
            "client_busy": self.client.busy,
            **{key: value for name in TITLES for key, value in self._spread(name).items()},
            "input_lens": [item.num_prompt_tokens for item in self.measured],
            "output_lens": [item.num_output_tokens for item in self.measured],
            "start_times": [item.start - begin for item in self.measured],
            "ttfts": [item.ttft if item.token_times else 0.0 for item in self.measured],
            "itls": [item.itls for item in self.measured],
            "latencies": [item.e2el for item in self.measured],
            "errors": [item.error or "" for item in self.measured],
        }

    def _rate(self, count: int) -> float:
        return count / max(self.seconds, 1e-9)

    def _spread(self, name: str) -> Mapping[str, float]:
        """Return mean, median and percentiles of a latency in milliseconds; 0 without any."""
        times = self.times[name]
        found = {"mean": statistics.fmean(times) if times else 0.0, "median": percentile(times, 50)}
        found |= {f"p{percent}": percentile(times, percent) for percent in PERCENTILES}
        return {f"{key}_{name}_ms": 1000 * seconds for key, seconds in found.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between the two nearest values; 0 of none."""
    return float(np.percentile(values, percent)) if values else 0.0
