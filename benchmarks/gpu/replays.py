"""Part `replays`: 100,000 decode steps with CUDA graphs; each run must give the same tokens."""

import random
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.engines import model_path
from benchmarks.gpu.part import Part, Record
from benchmarks.gpu.tables import table
from benchmarks.shapes import CONFIGS, SMALL, kv_bytes

REPLAYS = 100_000
ROWS = 8
PROMPT = 90
OUTPUT = 4000
"""Tokens of a row and a run: a replay each, except the first, which the prompt's step gives."""


def replays(record: Record) -> None:
    """Repeat a run until there are REPLAYS replays, or the time is over."""
    from nanovllm import LLM, SamplingParams

    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(PROMPT)] for _ in range(ROWS)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.6, 1.0)[row % 3],
            top_p=0.9 if row % 2 else 1.0,
            seed=row,
            ignore_eos=True,
            max_tokens=OUTPUT,
        )
        for row in range(ROWS)
    ]
    llm = LLM(
        model_path(record, SMALL),
        load_format="dummy",
        enable_prefix_caching=False,
        max_num_seqs=ROWS,
        max_model_len=PROMPT + OUTPUT,
        kv_cache_memory_bytes=2 * ROWS * (PROMPT + OUTPUT) * kv_bytes(CONFIGS[SMALL]),
    )
    first: list[list[int]] = []
    figures = record.figures
    figures |= {"replays": 0, "runs": 0, "different": [], "seconds_of_runs": []}
    while figures["replays"] < REPLAYS:
        longest = max(figures["seconds_of_runs"], default=0.0)
        if not record.has_time(1.2 * longest, f"{REPLAYS - figures['replays']:,} replays"):
            break
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        figures["seconds_of_runs"].append(time.perf_counter() - start)
        tokens = [output.outputs[0].token_ids for output in outputs]
        first = first or tokens
        figures["different"] += differences(figures["runs"], first, tokens)
        figures["runs"] += 1
        figures["replays"] += OUTPUT - 1
        record.save()


def differences(run: int, first: list[list[int]], tokens: list[list[int]]) -> list[dict[str, int]]:
    """Return for each row of `tokens` that is not as in `first` where it begins to differ."""
    found = []
    for row, (expected, got) in enumerate(zip(first, tokens, strict=True)):
        if expected != got:
            pairs = zip(expected, got, strict=False)
            at = next((index for index, (a, b) in enumerate(pairs) if a != b), len(got))
            found.append({"run": run, "row": row, "token": at})
    return found


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return how many replays there were, and the rows that differed."""
    different = figures["different"]
    text = [
        f"{figures['replays']:,} replays in {figures['runs']} runs of {ROWS} rows, greedy and "
        f"seeded; rows that differed from the first run: {len(different)}.",
    ]
    if different:
        text += ["", *table(["run", "row", "token"], (row.values() for row in different[:20]))]
    return text


PART = Part(replays, 100, "The same tokens again and again", lines)
