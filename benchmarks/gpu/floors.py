"""Floors: the time below which no engine can go, from the bytes and products that a workload needs.

Pure: imports no torch and needs no GPU.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import bench
from benchmarks.shapes import BFLOAT16_BYTES, kv_bytes, weight_bytes


def workload(num_seqs: int = 256) -> tuple[list[list[int]], list[int]]:
    """Return the prompts and output lengths of nano-vllm's benchmark, from seed 0."""
    return bench.workload(num_seqs, (100, 1024), (100, 1024), seed=0)


def step_bytes(config: Mapping[str, Any], batch: int, length: float) -> float:
    """Return the bytes that a decode step reads for `batch` rows of `length` tokens each."""
    return weight_bytes(config) + batch * length * kv_bytes(config)


def tokens_read(prompt_lens: Iterable[int], output_lens: Iterable[int]) -> int:
    """Return the number of tokens whose keys and values decoding reads, summed over its steps.

    The prompt's step gives the first output token. The step of each further token reads the prompt
    and the output so far, including the token that it takes as input.
    """
    lens = zip(prompt_lens, output_lens, strict=True)
    return sum((out - 1) * prompt + (out - 1) * out // 2 for prompt, out in lens)


def workload_floor(
    config: Mapping[str, Any],
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    bandwidth: float,
    flops: float,
) -> dict[str, float]:
    """Return the least seconds for all requests in one batch, by cause, and their sum as "all".

    Decoding reads the weights once for each step of the longest output, and the keys and values.
    The prompts are multiplied with all weights except the head. Activations and the attention
    within prompts are not counted.
    """
    head = BFLOAT16_BYTES * config["vocab_size"] * config["hidden_size"]
    multiplied = (weight_bytes(config) - head) / BFLOAT16_BYTES
    parts = {
        "weights": (max(output_lens) - 1) * weight_bytes(config) / bandwidth,
        "KV": tokens_read(prompt_lens, output_lens) * kv_bytes(config) / bandwidth,
        "prompts": 2 * multiplied * sum(prompt_lens) / flops,
    }
    return {**parts, "all": sum(parts.values())}
