"""Part `speculation`: the shipped model with each method of drafting gives the tokens of none."""

import functools
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.engines import release
from benchmarks.gpu.part import Part, Record
from benchmarks.gpu.tables import table
from nanovllm.outputs import DraftCounts

REQUESTS = 24
TOKENS = 120
DTYPES = ("bfloat16", "float32")


def methods() -> dict[str, dict[str, Any] | None]:
    """Return the options of each method by its name."""
    from nanovllm import demo_model

    return {
        "none": None,
        "ngram": {"method": "ngram"},
        "draft_model": {"method": "draft_model", "model": demo_model.DRAFT_MODEL},
        "eagle3": {"method": "eagle3", "model": demo_model.EAGLE3},
    }


def speculation(record: Record) -> None:
    """Run the same requests with each method, in each dtype."""
    for dtype in DTYPES:
        expected: list[list[int]] = []
        for name, options in methods().items():
            if not record.has_time(10, f"{name} in {dtype}"):
                continue
            label = {"dtype": dtype, "method": name}
            record.attempt("rows", label, functools.partial(run, options, dtype, expected))
            release()


def run(options: dict[str, Any] | None, dtype: str, expected: list[list[int]]) -> dict[str, Any]:
    """Generate with one method; return how many outputs are as `expected`, and the time.

    Args:
        expected: the outputs without speculation; the call without fills it.
    """
    if options is not None and not expected:
        raise ValueError("there are no outputs without speculation to compare with")
    from nanovllm import LLM, SamplingParams, demo_model

    questions = [question for question, _ in demo_model.entries()]
    prompts = [questions[index % len(questions)] for index in range(REQUESTS)]
    params = [
        SamplingParams(temperature=float(index % 2), seed=index, max_tokens=TOKENS, ignore_eos=True)
        for index in range(REQUESTS)
    ]
    llm = LLM(
        demo_model.MODEL,
        dtype=dtype,
        max_num_seqs=REQUESTS,
        max_model_len=512,
        enable_prefix_caching=False,
        speculative_config=options,
    )
    try:
        llm.generate(prompts, params, use_tqdm=False)  # compiles what was not compiled at start
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        drafts = sum((output.metrics.drafts for output in outputs), DraftCounts())
    finally:
        llm.shutdown()
    tokens = [output.outputs[0].token_ids for output in outputs]
    expected[:] = expected or tokens
    same = sum(found == right for found, right in zip(tokens, expected, strict=True))
    return {
        "same": same,
        "requests": REQUESTS,
        "seconds": seconds,
        "drafted": drafts.num_draft_tokens,
        "accepted": drafts.num_accepted_tokens,
    }


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of the methods."""
    rows = []
    for row in figures.get("rows", []):
        cells = [row["dtype"], row["method"]]
        if "error" in row:
            rows.append([*cells, row["error"], "", "", ""])
            continue
        same = f"{row['same']} of {row['requests']}"
        rows.append([*cells, same, row["drafted"], row["accepted"], f"{row['seconds']:.2f}"])
    head = ["dtype", "method", "outputs as without", "tokens drafted", "accepted", "seconds"]
    return table(head, rows)


PART = Part(speculation, 70, "Speculation", lines)
