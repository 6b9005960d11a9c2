"""Part `arrival`: what an arriving prompt adds to the others' time between tokens."""

import itertools
import random
import time
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.engines import decoding, make_engine, pool_bytes
from benchmarks.gpu.part import Part, Record
from benchmarks.gpu.tables import table
from benchmarks.shapes import SMALL

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

CONTEXT = 512
CASES = ((16, 128), (16, 1024), (64, 128), (64, 1024))
"""Rows that decode after CONTEXT tokens, and the length of the prompt that arrives."""
_ARRIVALS = 5
_STEPS = 10
"""Steps from an arrival on that are timed."""


def arrival(record: Record) -> None:
    """Time each case: the prompt alone, then beside rows that decode."""
    rows = max(batch for batch, _ in CASES)
    pool = pool_bytes(SMALL, 2 * rows, CONTEXT)
    engine = make_engine(record, SMALL, max_num_seqs=2 * rows, kv_cache_memory_bytes=pool)
    rng = random.Random(1)
    for batch, length in CASES:
        if not record.has_time(5, f"{length} tokens beside {batch} rows"):
            continue
        prompts = [[rng.randint(0, 10000) for _ in range(length)] for _ in range(_ARRIVALS + 1)]
        alone = median([alone_seconds(engine, prompt) for prompt in prompts][1:])
        with decoding(engine, batch, CONTEXT):
            usual = median(step_times(engine, 40))
            times = [arrival_times(engine, prompt) for prompt in prompts][1:]
        row = {
            "batch": batch,
            "length": length,
            "usual": usual,
            "longest": median(map(max, times)),
            "added": median(sum(steps) - _STEPS * usual for steps in times),
            "alone": alone,
        }
        record.add("rows", row)


def alone_seconds(engine: "LLMEngine", prompt: list[int]) -> float:
    """Return the seconds from a request to its only token, in an idle engine."""
    start = time.perf_counter()
    add(engine, prompt)
    while not engine.is_finished():
        engine.step()
    return time.perf_counter() - start


def arrival_times(engine: "LLMEngine", prompt: list[int]) -> list[float]:
    """Return the seconds of each of _STEPS steps, before the first of which a prompt arrives."""
    add(engine, prompt)
    return step_times(engine, _STEPS)


def add(engine: "LLMEngine", prompt: list[int]) -> None:
    """Queue a request for one token."""
    from nanovllm import SamplingParams

    engine.add_request(prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1))


def step_times(engine: "LLMEngine", steps: int) -> list[float]:
    """Return the seconds of each step, by the host's clock."""
    times = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        times.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(times)]


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of the cases."""
    rows = [
        [row["batch"], row["length"]]
        + [f"{1e3 * row[name]:.2f}" for name in ("usual", "longest", "added", "alone")]
        for row in figures.get("rows", [])
    ]
    head = ["rows that decode", "prompt", "ms a step", "longest step", "added", "the prompt alone"]
    return table(head, rows)


PART = Part(arrival, 40, "A prompt arrives", lines)
