"""Part `nano`: nano-vllm's workload, three times."""

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.gpu.engines import model_path
from benchmarks.gpu.floors import tokens_read, workload, workload_floor
from benchmarks.gpu.part import Part, Record, percent, table
from benchmarks.shapes import CONFIGS, SMALL, kv_bytes


def nano(record: Record) -> None:
    """Record three runs' seconds."""
    from nanovllm import LLM, SamplingParams

    prompts, output_lens = workload()
    llm = LLM(
        model_path(record, SMALL),
        load_format="dummy",
        enable_prefix_caching=False,
        max_model_len=4096,
    )
    record.figures |= {
        "model": SMALL,
        "prompt_lens": [len(prompt) for prompt in prompts],
        "output_lens": output_lens,
    }
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length)
        for length in output_lens
    ]

    def run() -> float:
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    llm.generate(prompts[:32], params[0], use_tqdm=False)
    for number in range(3):
        if record.has_time(8, f"run {number + 1}"):
            record.add("runs", run())


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return the throughput, and a table of the floor."""
    prompt_lens, output_lens = figures["prompt_lens"], figures["output_lens"]
    config, tokens = CONFIGS[figures["model"]], sum(output_lens)
    if "runs" not in figures:
        return ["No run ended."]
    moved = tokens_read(prompt_lens, output_lens) * kv_bytes(config)
    seconds = median(figures["runs"])
    runs = ", ".join(f"{run:.2f}" for run in figures["runs"])
    text = [
        f"{len(prompt_lens)} requests, {sum(prompt_lens):,} tokens in, {tokens:,} out; "
        f"{moved / 1e12:.2f} TB of KV to read. Runs of {runs} s; the median is "
        f"**{tokens / seconds:,.0f} output tokens/s**.",
        "",
    ]
    if "copy" in bandwidth:
        floor = workload_floor(
            config, prompt_lens, output_lens, bandwidth["copy"], bandwidth["matmul"]
        )
        rows = [[name, f"{s:.2f}", f"{tokens / s:,.0f}"] for name, s in floor.items()]
        rows.append(["measured", f"{seconds:.2f}", f"{tokens / seconds:,.0f}"])
        text += table(["floor", "seconds", "tokens/s"], rows)
        text += ["", f"{percent(floor['all'] / seconds)} of the floor."]
    return text


PART = Part(nano, 60, "nano-vllm's workload, Qwen3-0.6B's shape", lines)
