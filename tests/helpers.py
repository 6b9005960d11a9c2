"""What tests of the whole engine share: random prompts, arrival in random order, streams joined.

Makes no model: tests/checkpoints.py does. Holds no fixture: conftest.py does.
"""

import dataclasses
import importlib.util
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine.llm_engine import LLMEngine, Observer
from nanovllm.testing.invariants import check_scheduler
from tests.glossary import GREEDY

ROOT = Path(__file__).parent.parent
VOCAB = 1003
"""Tokens of the random model."""

Request = tuple[Any, SamplingParams]
"""A prompt and its parameters."""

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "languages": {"type": "array", "items": {"enum": ["C", "Python"]}, "maxItems": 2},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "languages", "age"],
    "additionalProperties": False,
}
COMPACT = {"json": PERSON, "disable_any_whitespace": True}
HAS_GRAMMARS = all(map(importlib.util.find_spec, ("llguidance", "nanovllm.features.structured")))
"""Without both, workloads leave out their structured outputs."""


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until `condition()` is true; fail if it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.001)


class SlowSteps(Observer):
    """Gives each step of an engine a least time, so that a test can act while a request runs."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def begin_step(self) -> None:
        time.sleep(self._seconds)


def in_threads(jobs: list[Callable[[], Any]], seconds: float = 60) -> list[Any]:
    """Run each job in a thread of its own, all at once; return the results in their order."""
    ready = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        ready.wait()
        return job()

    pool = ThreadPoolExecutor(len(jobs))
    try:
        futures = [pool.submit(run, job) for job in jobs]
        return [future.exception(seconds) or future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a thread that hangs fails the test above


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def generate_all(llm: LLM, requests: Seq[Request]) -> list[RequestOutput]:
    """Generate many requests in one call."""
    prompts, params = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(params), use_tqdm=False)


def generate(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> RequestOutput:
    """Generate one request."""
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def token_ids(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def parameter_requests() -> list[Request]:
    """Return 40 requests that combine filters, rules, ends, n and log-probabilities.

    Prompts have 1 to 24 tokens; many share a prefix.
    """
    rng = random.Random(5)
    shared = random_prompt(rng, 20)
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_k": 20},
        {"top_p": 0.7},
        {"temperature": 1.5, "min_p": 0.1},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0, "repetition_penalty": 1.4, "logit_bias": {7: 3.0, 11: 3.0}},
        {"frequency_penalty": 0.9, "presence_penalty": 0.6, "top_k": 50},
        {"logit_bias": {7: 6.0, 50: 8.0, 60: -100.0}, "temperature": 2.0},
        {"allowed_token_ids": list(range(0, VOCAB, 40)), "top_p": 0.95, "frequency_penalty": -0.5},
        {"min_tokens": 4, "stop_token_ids": list(range(0, VOCAB, 3)), "temperature": 1.2},
    ]
    requests = []
    for index in range(40):
        start = shared[: rng.choice([0, 4, 16, 20])]
        prompt = start + random_prompt(rng, rng.randint(1, 24 - len(start)))
        if index % 8 == 7:
            prompt = list(requests[-1][0])
        options = {"max_tokens": rng.randint(4, 10), **asked[index % 10]}
        if index % 4 == 1:
            options.setdefault("stop_token_ids", rng.sample(range(VOCAB), 150))
        params = SamplingParams(
            seed=1000 * index,
            n=(1, 2, 1, 3, 1)[index % 5] if index < 30 else 1 + index % 3,
            logprobs=(None, 2, None, 0)[index % 4],
            prompt_logprobs=3 if index % 6 == 5 else None,
            ignore_eos=index % 7 == 3,
            **options,
        )
        requests.append((prompt, params))
    return requests


def choices(outputs: Iterable[RequestOutput]) -> list[Any]:
    """Return the texts, tokens and ends of all continuations."""
    return [
        [(c.index, c.text, c.token_ids, *end_of(c)) for c in output.outputs] for output in outputs
    ]


def numbers(outputs: Iterable[RequestOutput]) -> list[float]:
    """Return all log-probabilities, also the cumulative ones, in order."""
    found: list[float] = []
    for output in outputs:
        for entries in (output.prompt_logprobs or [])[1:]:
            assert entries is not None
            found += [entry.logprob for entry in entries.values()]
        for completion in output.outputs:
            for entries in completion.logprobs or ():
                found += [entry.logprob for entry in entries.values()]
            if completion.cumulative_logprob is not None:
                found.append(completion.cumulative_logprob)
    return found


def assert_same_outputs(found: Seq[RequestOutput], expected: Seq[RequestOutput]) -> None:
    """Compare tokens and ends exactly, log-probabilities up to the rounding of float32."""
    assert choices(found) == choices(expected)
    assert numbers(found) == pytest.approx(numbers(expected), abs=1e-4, rel=0)


def generate_in_random_order(
    engine: LLMEngine, requests: Seq[Request], seed: int
) -> list[RequestOutput]:
    """Generate requests that arrive in random order while others run, with random priorities.

    Some are aborted on the way, and arrive again.
    """
    rng = random.Random(seed)
    waiting = rng.sample(range(len(requests)), len(requests))
    index_of: dict[int, int] = {}
    found: dict[int, RequestOutput] = {}
    while waiting or not engine.is_finished():
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 8]))):
            index = waiting.pop()
            prompt, params = requests[index]
            request = engine.add_request(prompt, params, priority=rng.randint(-1, 1))
            index_of[request] = index
        if index_of and rng.random() < 0.05:
            aborted = rng.choice(list(index_of))
            if engine.abort(aborted) is not None:
                waiting.append(index_of.pop(aborted))
        for output in engine.step():
            found[index_of[output.request_id]] = output
        check_scheduler(engine.scheduler)
    return [found[index] for index in range(len(requests))]


def assert_idle(llm: Any) -> None:
    """Check that no request is left and that every block of the KV pool is free."""
    engine = llm.engine
    thread = getattr(llm, "_thread", None)
    if thread is not None:  # what was closed just now ends with a command
        thread.submit(lambda: None).result(20)
    assert engine.is_finished()
    check_scheduler(engine.scheduler)
    assert engine.scheduler.block_manager.num_free_blocks == engine.worker_info.num_blocks


@dataclasses.dataclass
class Joined:
    """A continuation put together from a stream."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


def join(pieces: Iterable[RequestOutput]) -> list[Joined]:
    """Put a stream's pieces together, by continuation."""
    joined: dict[int, Joined] = {}
    for piece in pieces:
        for completion in piece.outputs:
            whole = joined.setdefault(completion.index, Joined())
            assert whole.finish_reason is None, "a piece of a continuation that had ended"
            whole.text += completion.text
            whole.token_ids += completion.token_ids
            whole.logprobs += completion.logprobs or []
            whole.finish_reason = completion.finish_reason
            whole.stop_reason = completion.stop_reason
            whole.cumulative_logprob = completion.cumulative_logprob
    return [joined[index] for index in sorted(joined)]


def whole(output: RequestOutput) -> list[Joined]:
    """Return what the pieces of a stream of this output must join to."""
    return [
        Joined(c.text, c.token_ids, c.logprobs or [], *end_of(c), c.cumulative_logprob)
        for c in output.outputs
    ]


def end_of(completion: Any) -> tuple[str | None, int | str | None]:
    return completion.finish_reason, completion.stop_reason


def cut(text: str, stop: Seq[str], include: bool = False) -> tuple[str, str | None]:
    """Return the text up to the stop string that is complete first, and that stop string; of
    several that end together it is the first listed.
    """
    found = [
        (start + len(string), place, start, string)
        for place, string in enumerate(stop)
        if (start := text.find(string)) >= 0
    ]
    if not found:
        return text, None
    end, _, start, string = min(found)
    return text[: end if include else start], string


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child Python that imports this tree's package."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **changes}


def shared_memory(processes: list[Any]) -> set[int]:
    """Return the inodes of the files in /dev/shm that `processes` map.

    Other processes have files there too. Names would not do: a semaphore is mapped under a name
    that is not its file's.
    """
    found = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps")
        lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else ()
        found |= {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
    return found
