"""A process of `nanovllm lab bench`: has an engine, and plays the workload that each line of
standard input names.
"""

import gc
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
    """What a workload took, in this process's seconds of processor time."""

    seconds: float
    latency: float
    """Mean seconds from a request's arrival to its end."""
    counts: dict[str, int]


class Player:
    """Plays workloads with an engine.

    Args:
        options: of the engine.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._llm = LLM(model, **options)  # without it the engine ends
        self.engine = self._llm.engine

    def play(self, name: str) -> Round:
        """Play a workload with an empty prefix cache."""
        requests = make(name, self.engine.worker_info.vocab_size)
        self.engine.reset_prefix_cache()
        before = self._counts()
        gc.collect()
        start = time.process_time()
        latencies = self._run(requests)
        seconds = time.process_time() - start
        counts = {key: value - before[key] for key, value in self._counts().items()}
        return Round(seconds, statistics.fmean(latencies), counts)

    def _run(self, requests: list[WorkloadRequest]) -> list[float]:
        """Run all requests and their later turns; return the latency of each."""
        begun: dict[int | str, tuple[WorkloadRequest, float]] = {}
        latencies = []

        def add(request: WorkloadRequest) -> None:
            params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
            request_id = self.engine.add_request(request.prompt, params)
            begun[request_id] = request, time.process_time()

        for request in requests:
            add(request)
        while begun:
            for output in self.engine.step():
                request, start = begun.pop(output.request_id)
                latencies.append(time.process_time() - start)
                if request.questions:
                    question, *later = request.questions
                    prompt = [*request.prompt, *output.outputs[0].token_ids, *question]
                    add(WorkloadRequest(prompt, request.max_tokens, tuple(later)))
        return latencies

    def _counts(self) -> dict[str, int]:
        stats = self.engine.stats
        return {
            "prompt tokens computed": stats.num_prefill_tokens,
            "prompt tokens cached": stats.num_cached_tokens,
            "steps": stats.step_sizes.total(),
            "preemptions": stats.num_preemptions,
        }


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
            reply(player.play(json.loads(line))._asdict())
    except NanoVLLMError as error:
        reply({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
