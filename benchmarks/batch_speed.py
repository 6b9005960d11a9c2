"""What a batch costs compared with `LLM.generate`, and whether its driver grows with its rows.

`speed`: the same requests by LLM.generate, by a batch in one process, and by one Ray worker, in
turns. If other programs are running, processor seconds say more than wall-clock seconds.
`memory`: the driver's resident memory over rows of one token, read as they are needed.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import ray

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.apps.batch.batch_options import RowOptions
from nanovllm.apps.batch.job import Finished, Pool, Progress, answer_rows, run_job
from nanovllm.apps.batch.job_files import Journal
from nanovllm.apps.batch.row_engine import RowEngine
from nanovllm.apps.batch.sources import open_source
from nanovllm.apps.ray.row_pool import RayPool

MB = 10**6


class Kept:
    """A pool that several jobs use, one after another."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._is_started = False

    @property
    def capacity(self) -> int:
        """The pool's."""
        return self._pool.capacity

    async def start(self) -> None:
        """Make the engines, on the first call."""
        if not self._is_started:
            await self._pool.start()
        self._is_started = True

    async def answer(self, row: Any) -> bytes:
        """Return the pool's answer."""
        return await self._pool.answer(row)

    def close(self) -> None:
        """Keep the engines."""


def speed(args: argparse.Namespace) -> None:
    """Print the tokens a second of each way, and their ratios."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(1000, 30_000) for _ in range(args.input)] for _ in range(args.requests)
    ]
    params = {"max_tokens": args.output, "ignore_eos": True, "temperature": 0.0}
    engine = {"max_model_len": 4096, "enable_prefix_caching": False}
    options = RowOptions(args.model, engine, params)
    tokens = args.requests * args.output
    found: dict[str, list[Times]] = {}
    for turn in range(args.rounds):
        for name, times in _turn(prompts, params, options, args.ways):
            found.setdefault(name, []).append(times)
            rate = tokens / times.clock
            print(f"round {turn}: {name} {rate:.1f} tokens/s, CPU {times.cpu:.1f} s", flush=True)
    clock, cpu = _medians(found["LLM.generate"])
    for name, given in found.items():
        own_clock, own_cpu = _medians(given)
        print(
            f"{name}: {tokens / own_clock:.1f} tokens/s, {clock / own_clock:.1%} of "
            f"LLM.generate's; by seconds of the processors {cpu / own_cpu:.1%}"
        )


class Times(NamedTuple):
    """What a run took, in seconds."""

    clock: float
    cpu: float
    """Processor seconds of this process and all that it started, including Ray's own."""


class Timer:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._clock, self._cpu = time.perf_counter(), self._cpu_now()

    def read(self) -> Times:
        """Return the times since then."""
        return Times(time.perf_counter() - self._clock, self._cpu_now() - self._cpu)

    @staticmethod
    def _cpu_now() -> float:
        process, seconds = psutil.Process(), 0.0
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                seconds += times.user + times.system
        return seconds


def _medians(times: list[Times]) -> Times:
    return Times(
        statistics.median(one.clock for one in times), statistics.median(one.cpu for one in times)
    )


def _turn(
    prompts: list[list[int]], params: dict[str, Any], options: RowOptions, ways: list[str]
) -> Any:
    """Yield each way and its seconds. Each has an engine of its own, alone, and a warm-up."""
    llm = LLM(options.model, **options.engine_options)
    given = SamplingParams(**params)
    llm.generate(prompts[:4], given, use_tqdm=False)
    timer = Timer()
    llm.generate(prompts, given, use_tqdm=False)
    yield "LLM.generate", timer.read()
    llm.shutdown()
    del llm
    pools: dict[str, Callable[[], Pool]] = {
        "here": lambda: RowEngine(options),
        "ray": lambda: RayPool(options, 1),
    }
    for way in ways:
        with tempfile.TemporaryDirectory(prefix="batch") as name:
            yield f"batch {way}", _batch_times(Path(name), prompts, options, pools[way])


def _batch_times(
    directory: Path, prompts: list[list[int]], options: RowOptions, make_pool: Callable[[], Pool]
) -> Times:
    warm, whole = directory / "warm.jsonl", directory / "in.jsonl"
    for path, some in ((warm, prompts[:4]), (whole, prompts)):
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in some))
    return asyncio.run(_jobs_times(directory, options, make_pool))


async def _jobs_times(directory: Path, options: RowOptions, make_pool: Callable[[], Pool]) -> Times:
    """Run both files with one pool, in one event loop; return the times of the second."""
    pool, times = Kept(make_pool()), Times(0, 0)
    for name in ("warm", "in"):
        source = open_source(directory / f"{name}.jsonl")
        journal = Journal(directory / f"{name}.rows")
        timer = Timer()
        await answer_rows(source, lambda: pool, journal, lambda progress: None)
        times = timer.read()
        journal.close()
    pool._pool.close()
    return times


def memory(args: argparse.Namespace) -> None:
    """Print the driver's memory by rows done; its engines are actors."""
    options = RowOptions(
        demo_model.MODEL,
        {"max_model_len": 128, "num_kvcache_blocks": 1024, "max_num_seqs": 64, "device": "cpu"},
        {"max_tokens": 1},
    )
    process, seen, following = psutil.Process(), [], 0

    def look(progress: Progress) -> None:
        nonlocal following
        if progress.num_done >= following:
            seen.append((progress.num_done, process.memory_info().rss / MB))
            print(f"{progress.num_done} rows: {seen[-1][1]:.0f} MB", flush=True)
            following = progress.num_done + args.rows // 20

    with tempfile.TemporaryDirectory(prefix="batch") as name:
        source, output = Path(name, "in.jsonl"), Path(name, "out.jsonl")
        with source.open("w") as file:
            for index in range(args.rows):
                file.write(json.dumps({"id": index, "prompt": f"What is number {index}?"}) + "\n")
        done: Finished = run_job(
            open_source(source), output, options, lambda: RayPool(options, args.workers), look
        )
        with output.open() as file:
            numbers = [json.loads(line)["id"] for line in file]
    assert numbers == list(range(args.rows))
    rate, after = done.num_rows / done.seconds, process.memory_info().rss / MB
    tenth = next(size for rows, size in seen if rows >= args.rows // 10)
    print(f"{done.num_rows} rows, {rate:.0f} a second; {tenth:.0f} MB after a tenth, ", end="")
    print(f"{seen[-1][1]:.0f} MB at the end, {after:.0f} MB with the output written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    fast = commands.add_parser("speed")
    fast.set_defaults(function=speed)
    fast.add_argument("--model", required=True)
    fast.add_argument("--requests", type=int, default=64)
    fast.add_argument("--input", type=int, default=64)
    fast.add_argument("--output", type=int, default=32)
    fast.add_argument("--rounds", type=int, default=3)
    fast.add_argument("--ways", nargs="+", default=["here", "ray"], choices=["here", "ray"])
    large = commands.add_parser("memory")
    large.set_defaults(function=memory)
    large.add_argument("--rows", type=int, default=100_000)
    large.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    args.function(args)
    if ray.is_initialized():
        ray.shutdown()


if __name__ == "__main__":
    main()
