"""Where a decode step's time goes on a CPU: products, attention, glue, sampler and Python.

Times are medians over the steps. The reading limit is the weights' bytes divided by the memory
bandwidth measured in the same run. The parts are timed with enforce_eager, the whole step and
Python's share of it without. Without --model: random weights in the shape of Qwen3-0.6B.
"""

import argparse
import contextlib
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.comparison import processor_name
from benchmarks.harness import Table, loadable, make_parser
from benchmarks.rates import RateMeter
from benchmarks.shapes import described, read_config, weight_bytes
from nanovllm import LLM, SamplingParams
from nanovllm.kernels.cpu import library
from nanovllm.worker.step_sampler import StepSampler

PARTS = {
    "nv_linear": "products",
    "nv_linear_int": "products",
    "nv_attention": "attention",
    "nv_store": "glue",
    "nv_add_rms_norm": "glue",
    "nv_add_layer_norm": "glue",
    "nv_mul_act": "glue",
    "nv_scale": "glue",
    "nv_copy_rows": "glue",
    "nv_gather": "glue",
    "nv_gather_int": "glue",
}
"""The part of each C kernel."""
COLUMNS = ("products", "attention", "glue", "sampler")


class Clock:
    """Adds up the time spent in watched functions, by part.

    The time of a watched function called by another one counts towards the caller.
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

    @contextlib.contextmanager
    def watch_engine(self) -> Iterator[None]:
        """Watch the C kernels and the sampler inside `with`."""
        call, run, sample = library.call, library.run, StepSampler.sample
        library.call = self.watch(PARTS.get, call)
        library.run = self.watch(lambda _: "recorded", run)
        StepSampler.sample = self.watch(lambda _: "sampler", sample)  # type: ignore[method-assign]
        try:
            yield
        finally:
            library.call, library.run = call, run
            StepSampler.sample = sample  # type: ignore[method-assign]


def medians(llm: LLM, clock: Clock, batch: int, context: int, num_steps: int) -> dict[str, float]:
    """Return the median milliseconds of a step of `batch` sequences, by part.

    "step" is the whole step, and "rest" the time outside watched functions.
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


def measure(args: argparse.Namespace) -> None:
    """Measure each batch size, and print a row for it.

    The rate is the best of three measurements, before, between and after the steps, because a
    machine's speed changes within minutes.
    """
    with loadable(args.model) as (model, load_format):
        nbytes = weight_bytes(read_config(model), args.quantization)
        meter = RateMeter()
        rates = meter.measure()
        found: list[list[dict[str, float]]] = []
        for enforce_eager in (True, False):  # each kernel as a separate call, then recorded
            clock = Clock()
            with clock.watch_engine():
                llm = LLM(
                    model,
                    load_format=load_format,
                    quantization=args.quantization,
                    kv_cache_dtype=args.kv_cache_dtype,
                    enforce_eager=enforce_eager,
                )
                found.append([medians(llm, clock, n, args.context, args.steps) for n in args.batch])
                llm.shutdown()
            rates = rates.best(meter.measure())
    rate = f"{rates.bytes_per_second / 1e9:.1f} GB/s by {torch.get_num_threads()} threads"
    print(f"{described(args.model)}; {processor_name()}; memory is read at {rate}\n")
    table = Table("batch", "step, ms", "reading limit", *COLUMNS, "Python")
    limit = 1e3 * nbytes / rates.bytes_per_second
    for batch, parts, whole in zip(args.batch, *found, strict=True):
        table.row(batch, whole["step"], limit, *(parts[name] for name in COLUMNS), whole["rest"])


def main() -> None:
    """Measure each batch size and print a table."""
    parser = make_parser("step", __doc__, rounds=None)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=24)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
