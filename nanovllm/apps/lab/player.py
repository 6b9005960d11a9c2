"""A process of `nanovllm lab bench`: has an engine, and plays a workload for each line of standard
input.
"""

import contextlib
import gc
import heapq
import json
import os
import statistics
import sys
import time
from typing import Any, NamedTuple

from nanovllm.apps.lab.workloads import WorkloadRequest, make
from nanovllm.errors import NanoVLLMError
from nanovllm.llm import LLM
from nanovllm.options.sampling_params import SamplingParams


class Round(NamedTuple):
    """What a workload took. Seconds are those that the process had a core or waited by itself."""

    seconds: float
    latency: float
    """Mean seconds from a request's arrival to its end."""
    first_token: float
    """Mean seconds from a request's arrival to its first token."""
    next_token: float
    """Mean seconds between two tokens of a request."""
    wall_seconds: float
    counts: dict[str, int]


class Clock:
    """Seconds of this thread, without those in which it waited for a core that others had.

    Others change how long that is, and nothing that is measured does. Where the system does not say
    it, these are seconds as they pass.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def now(self) -> float:
        waited = 0
        if self._file is not None:
            waited = int(os.pread(self._file, 99, 0).split()[1])
        return time.perf_counter() - waited * 1e-9


class Player:
    """Plays workloads with an engine.

    Args:
        options: of the engine.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.engine = LLM(model, **options).engine
        self._clock = Clock()

    def play(self, name: str, gap: float) -> Round:
        """Play a workload with an empty prefix cache.

        Args:
            gap: mean seconds between two arrivals.
        """
        requests = make(name, self.engine.worker_info.vocab_size)
        self.engine.reset_prefix_cache()
        before = self._counts()
        gc.collect()
        wall = time.perf_counter()
        play = _Play(self, [(r.at * gap, number, r) for number, r in enumerate(requests)])
        seconds = play.run()
        counts = {key: value - before[key] for key, value in self._counts().items()}
        wall = time.perf_counter() - wall
        mean = statistics.fmean
        latency, first, following = map(mean, (play.latencies, play.first_tokens, play.next_tokens))
        return Round(seconds, latency, first, following, wall, counts)

    def now(self) -> float:
        """Return the seconds of `Clock`."""
        return self._clock.now()

    def _counts(self) -> dict[str, int]:
        stats = self.engine.stats
        return {
            "prompt tokens computed": stats.num_prefill_tokens,
            "prompt tokens cached": stats.num_cached_tokens,
            "steps": stats.step_sizes.total(),
            "preemptions": stats.num_preemptions,
        }


class _Play:
    """One round: requests arrive when the clock says so; it skips the time in which none runs.

    Args:
        arrivals: (seconds, number, request), in order.
    """

    def __init__(self, player: Player, arrivals: list[tuple[float, int, WorkloadRequest]]) -> None:
        self._player = player
        self._arrivals = arrivals
        self._number = len(arrivals)
        self._running: dict[int | str, _Running] = {}
        self.latencies: list[float] = []
        self.first_tokens: list[float] = []
        self.next_tokens: list[float] = []

    def run(self) -> float:
        """Run all requests; return the seconds in which one of them ran."""
        start = self._player.now()
        skipped = 0.0
        while self._arrivals or self._running:
            now = self._player.now() - start + skipped
            if not self._running and self._arrivals[0][0] > now:
                skipped += self._arrivals[0][0] - now
                now = self._arrivals[0][0]
            while self._arrivals and self._arrivals[0][0] <= now:
                self._add(*heapq.heappop(self._arrivals))
            outputs = self._player.engine.step()
            now = self._player.now() - start + skipped
            for output in outputs:
                completion = output.outputs[0]
                self._take(output.request_id, completion.token_ids, now)
                if completion.finish_reason is not None:
                    self._end(output.request_id, now)
        return self._player.now() - start

    def _add(self, at: float, _: int, request: WorkloadRequest) -> None:
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        request_id = self._player.engine.add_request(request.prompt, params, stream=True)
        self._running[request_id] = _Running(request, at, [])

    def _take(self, request_id: int | str, token_ids: list[int], now: float) -> None:
        running = self._running[request_id]
        if not running.token_ids:
            self._running[request_id] = running._replace(first=now)
        running.token_ids.extend(token_ids)

    def _end(self, request_id: int | str, now: float) -> None:
        request, at, token_ids, first = self._running.pop(request_id)
        self.latencies.append(now - at)
        self.first_tokens.append(first - at)
        self.next_tokens.append((now - first) / (len(token_ids) - 1))
        if request.questions:
            question, *later = request.questions
            prompt = [*request.prompt, *token_ids, *question]
            following = WorkloadRequest(prompt, request.max_tokens, questions=tuple(later))
            heapq.heappush(self._arrivals, (now, self._number, following))
            self._number += 1


class _Running(NamedTuple):
    request: WorkloadRequest
    at: float
    token_ids: list[int]
    first: float = 0.0


def main() -> int:
    """Play what the lines of standard input say, and write a line of JSON for each."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed goes to standard error

    def reply(found: Any) -> None:
        replies.write(json.dumps(found) + "\n")
        replies.flush()

    job = json.loads(sys.stdin.readline())
    try:
        player = Player(job["model"], job["options"])
        reply({})
        for line in sys.stdin:
            reply(player.play(**json.loads(line))._asdict())
    except NanoVLLMError as error:
        reply({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
