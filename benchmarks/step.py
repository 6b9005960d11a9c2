"""Where a decode step's time goes on a CPU: products, attention, glue, sampler and Python.

Without --model: random weights in the shape of Qwen3-0.6B. Times are medians over the steps; the
reading limit is the bytes of the weights over the speed at which memory is read in the same run.
The parts are timed with enforce_eager, the whole step and Python's share of it without.
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.cpu import library
from nanovllm.worker.sampling import SamplingRows

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench import QWEN3_06B

PARTS = {
    "nv_linear": "products",
    "nv_linear_int": "products",
    "nv_attention": "attention",
    "nv_store": "glue",
    "nv_add_rms_norm": "glue",
    "nv_silu_and_mul": "glue",
    "nv_gather": "glue",
    "nv_gather_int": "glue",
    "nv_run": "recorded",
}
TABLE = ("products", "attention", "glue", "sampler")


class Clock:
    """Adds up the time spent inside some functions, by part; what they call is theirs."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.inside = False

    def watch(self, part: Any, function: Any) -> Any:
        """Return `function`, timed as `part` (a name, or a function of the first argument)."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            name = part if isinstance(part, str) else part(args[0])
            if self.inside or name is None:
                return function(*args, **kwargs)
            self.inside, start = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[name] += time.perf_counter() - start
                self.inside = False

        return timed


def read_bandwidth() -> float:
    """Bytes a second at which all threads together read memory."""
    memory = torch.ones(2**27)  # 512 MiB
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        memory.sum()
        best = max(best, memory.nbytes / (time.perf_counter() - start))
    return best


def checkpoint(model: str | None, directory: str) -> tuple[str, str, dict[str, Any]]:
    """Return where the model is, its load_format and its config; without a model Qwen3-0.6B's
    shape, written to `directory`.
    """
    if model is None:
        Path(directory, "config.json").write_text(json.dumps(QWEN3_06B))
        return directory, "dummy", QWEN3_06B
    return model, "auto", json.loads(Path(model, "config.json").read_text())


def weight_bytes(config: dict[str, Any], quantization: str | None) -> float:
    """Bytes of the weights that a decode step reads; scales included."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    attention = (2 * heads + 2 * config["num_key_value_heads"]) * head_dim * hidden
    layer = attention + 3 * hidden * config["intermediate_size"]
    bits = {None: 16, "int8": 8 + 16 / 128, "int4": 4 + 16 / 32}[quantization]
    weights: int = config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
    return weights * bits / 8


def medians(llm: LLM, clock: Clock, batch: int, context: int, num_steps: int) -> dict[str, float]:
    """Return the milliseconds of a step of `batch` sequences, by part; "step" is the whole."""
    params = SamplingParams(temperature=0, max_tokens=num_steps + 8, ignore_eos=True)
    for index in range(batch):
        llm.engine.add_request([1 + index] * context, params)
    generated = llm.engine.stats.num_decode_tokens
    while llm.engine.stats.num_decode_tokens < generated + 3 * batch:
        llm.engine.step()
    steps: list[dict[str, float]] = []
    for _ in range(num_steps):
        clock.spent.clear()
        start = time.perf_counter()
        llm.engine.step()
        seconds = time.perf_counter() - start
        steps.append({**clock.spent, "step": seconds, "rest": seconds - sum(clock.spent.values())})
    while not llm.engine.is_finished():
        llm.engine.step()
    return {name: 1e3 * statistics.median(step[name] for step in steps) for name in steps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    directory = tempfile.TemporaryDirectory()
    args.model, load_format, config = checkpoint(args.model, directory.name)
    limit = 1e3 * weight_bytes(config, args.quantization) / bandwidth
    clock = Clock()
    library.call = clock.watch(PARTS.get, library.call)
    SamplingRows.sample = clock.watch("sampler", SamplingRows.sample)  # type: ignore[method-assign]
    found: list[list[dict[str, float]]] = []
    for enforce_eager in (True, False):  # call by call for the parts, then as it is
        llm = LLM(
            args.model,
            load_format=load_format,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            enforce_eager=enforce_eager,
        )
        found.append([medians(llm, clock, n, args.context, args.steps) for n in args.batch])
        llm.shutdown()
    print(f"memory is read at {bandwidth / 1e9:.1f} GB/s by {torch.get_num_threads()} threads")
    print("| batch | step, ms | reading limit | products | attention | glue | sampler | Python |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for batch, parts, whole in zip(args.batch, *found, strict=True):
        row = [whole["step"], limit, *(parts[name] for name in TABLE), whole["rest"]]
        print(f"| {batch} | {' | '.join(f'{cell:.2f}' for cell in row)} |")


if __name__ == "__main__":
    main()
