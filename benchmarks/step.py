"""Where a decode step's time goes on a CPU: products, attention, glue, sampler and Python.

Times are medians over the steps. The reading limit is the weights' bytes divided by the memory
bandwidth measured in the same run. The parts are timed with enforce_eager, the whole step and
Python's share of it without. Without --model: random weights in the shape of Qwen3-0.6B.
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.shapes import checkpoint, read_config, weight_bytes
from nanovllm import LLM, SamplingParams
from nanovllm.kernels.cpu import library
from nanovllm.worker.sampling import SamplingRows

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
"""The part of each C kernel."""
COLUMNS = ("products", "attention", "glue", "sampler")


class Clock:
    """Adds up the time spent in watched functions, by part.

    A watched function that another one calls counts for the caller.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.inside = False

    def watch(self, part_of: Callable[[Any], str | None], function: Any) -> Any:
        """Return a timed `function`. `part_of` maps its first argument to the part that a call
        counts for, or to None if the call is not timed.
        """

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            part = part_of(args[0])
            if self.inside or part is None:
                return function(*args, **kwargs)
            self.inside, start = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[part] += time.perf_counter() - start
                self.inside = False

        return timed


def read_bandwidth() -> float:
    """Return the bytes per second at which all threads together read memory."""
    memory = torch.ones(2**27)  # 512 MiB
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        memory.sum()
        best = max(best, memory.nbytes / (time.perf_counter() - start))
    return best


def medians(llm: LLM, clock: Clock, batch: int, context: int, num_steps: int) -> dict[str, float]:
    """Return the median milliseconds of a step of `batch` sequences, by part.

    "step" is the whole step, and "rest" the time in no watched function.
    """
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
    """Measure each batch size and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a checkpoint's directory")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    bandwidth = read_bandwidth()
    directory = tempfile.TemporaryDirectory()
    model, load_format = checkpoint(args.model, directory.name)
    limit = 1e3 * weight_bytes(read_config(model), args.quantization) / bandwidth
    clock = Clock()
    library.call = clock.watch(PARTS.get, library.call)
    sample = clock.watch(lambda _: "sampler", SamplingRows.sample)
    SamplingRows.sample = sample  # type: ignore[method-assign]
    found: list[list[dict[str, float]]] = []
    for enforce_eager in (True, False):  # each kernel a call of its own, then the recorded step
        llm = LLM(
            model,
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
        row = [whole["step"], limit, *(parts[name] for name in COLUMNS), whole["rest"]]
        print(f"| {batch} | {' | '.join(f'{cell:.2f}' for cell in row)} |")


if __name__ == "__main__":
    main()
