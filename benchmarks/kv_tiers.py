"""What do the tiers below the KV pool gain, and what do they cost?

`restart`: the time to the first token of a prompt that an earlier process has seen, against
computing it; each in a fresh process. `swap`: the same for a prompt whose KV went to host memory
and comes back. `writing`: the nano case of benchmarks.versus with and without a kv_cache_dir, in
turns, with new prompts each time.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from benchmarks.shapes import checkpoint, described
from benchmarks.versus import CASES

_MARK = "kv_tiers "
"""Prefix of the line in which a child process answers."""


def timed(llm: Any, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Return the seconds to a prompt's first token, its tokens, their logprobs and its hits."""
    from nanovllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=4)
    start, first, cached = time.perf_counter(), 0.0, 0
    token_ids: list[int] = []
    logprobs: list[dict[int, float]] = []
    for output in llm.stream(prompt, params):
        first = first or time.perf_counter() - start
        cached = max(cached, output.num_cached_tokens or 0)
        completion = output.outputs[0]
        token_ids += completion.token_ids
        for entries in completion.logprobs:
            logprobs.append({token: entry.logprob for token, entry in entries.items()})
    return {"first": first, "token_ids": token_ids, "logprobs": logprobs, "cached": cached}


def random_tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(100, 900) for _ in range(length)]


def child(model: str, load_format: str, directory: str, prompts: Seq[int]) -> dict[str, Any]:
    """Time a prompt of each length in this process, which uses the directory."""
    from nanovllm import LLM

    start = time.perf_counter()
    longest = max(prompts) + 64
    llm = LLM(model, load_format=load_format, max_model_len=longest, kv_cache_dir=directory)
    seconds = time.perf_counter() - start
    timed(llm, random_tokens(os.getpid(), 40), 4)  # warm-up; shorter than a block
    found = [timed(llm, random_tokens(length, length), 8) for length in prompts]
    llm.shutdown()
    return {"start": seconds, "found": found}


def in_new_process(*args: object) -> dict[str, Any]:
    """Return what `child` returns in a separate process."""
    command = [sys.executable, "-m", "benchmarks.kv_tiers", "child", json.dumps(args)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    return found


def leave_page_cache(directory: str) -> None:
    """Drop the files from the page cache, so that they are read from the disk."""
    os.sync()
    for path in Path(directory).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def restart(model: str, load_format: str, lengths: Seq[int], rounds: int) -> None:
    """Print a row for each length: computed, loaded from memory, loaded from the disk."""
    print("| prompt | computed, s | loaded, s | from the disk, s | hits | same tokens, logprobs |")
    print("| --- | --- | --- | --- | --- | --- |")
    for length in lengths:
        times: list[list[float]] = [[], [], []]
        same, hits = True, 0
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as directory:
                first = in_new_process(model, load_format, directory, [length])["found"][0]
                second = in_new_process(model, load_format, directory, [length])["found"][0]
                leave_page_cache(directory)
                third = in_new_process(model, load_format, directory, [length])["found"][0]
            for found, row in zip((first, second, third), times, strict=True):
                row.append(found["first"])
                same &= all(found[name] == first[name] for name in ("token_ids", "logprobs"))
            hits = min(second["cached"], third["cached"])
        cells = [f"{statistics.median(row):.3f}" for row in times]
        print(f"| {length} | {' | '.join(cells)} | {hits} | {same} |", flush=True)


def swap(model: str, load_format: str, lengths: Seq[int], rounds: int) -> None:
    """Print a row for each length. Two prompts take turns in a pool that holds one."""
    from nanovllm import LLM

    print("| prompt | computed, s | swapped, s | of computing | hits |")
    print("| --- | --- | --- | --- | --- |")
    for length in lengths:
        blocks = -(-(length + 64) // 64) + 1
        sizes = {"max_model_len": length + 64, "num_kvcache_blocks": blocks}
        llm = LLM(model, load_format=load_format, kv_offload_gib=8, **sizes)
        timed(llm, random_tokens(0, 40), 4)
        times: list[list[float]] = [[], []]
        hits = length
        for number in range(rounds):
            pair = [random_tokens(10 * length + 2 * number + i, length) for i in (0, 1)]
            computed = [timed(llm, prompt, 4) for prompt in pair]
            # The first goes back in while the second goes out.
            swapped = timed(llm, pair[0], 4)
            assert swapped["token_ids"] == computed[0]["token_ids"]
            times[0].append(computed[0]["first"])
            times[1].append(swapped["first"])
            hits = min(hits, swapped["cached"])
        llm.shutdown()
        whole, part = map(statistics.median, times)
        print(f"| {length} | {whole:.3f} | {part:.3f} | {part / whole:.1%} | {hits} |", flush=True)


def writing(model: str, load_format: str, rounds: int) -> None:
    """Print the seconds of the nano case, without a directory and with one, in turns."""
    from nanovllm import LLM, SamplingParams

    case = CASES["nano"]
    with tempfile.TemporaryDirectory() as directory:
        options: list[dict[str, Any]] = [{}, {"kv_cache_dir": directory}]
        llms = [LLM(model, load_format=load_format, **given) for given in options]
        ratios = []
        for number in range(-1, rounds):  # the first round warms up
            seconds = []
            prompts, lengths = case.requests(number + 1000)
            temperature = case.sampling["temperature"]
            params = [
                SamplingParams(ignore_eos=True, max_tokens=length, temperature=temperature)
                for length in lengths
            ]
            for llm in llms if number % 2 else llms[::-1]:
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                seconds.append(time.perf_counter() - start)
                settle(directory)
            without, with_directory = seconds if number % 2 else seconds[::-1]
            if number >= 0:
                ratios.append(with_directory / without)
                size = directory_bytes(directory) / 2**20
                print(
                    f"round {number}: {without:.2f} s without, {with_directory:.2f} s with; "
                    f"{size:.0f} MiB written so far",
                    flush=True,
                )
        for llm in llms:
            llm.shutdown()
    print(f"writing costs {statistics.median(ratios) - 1:.1%}")


def directory_bytes(directory: str) -> int:
    """Return the bytes of the files below a directory."""
    return sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())


def settle(directory: str) -> None:
    """Wait until writing has stopped, so that the next run has the disk to itself."""
    before = -1
    while before != (before := directory_bytes(directory)):
        time.sleep(0.5)
    os.sync()


def main() -> None:
    """Run a measurement and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_tiers", description=__doc__)
    parser.add_argument("what", choices=("restart", "swap", "writing", "child"))
    parser.add_argument("given", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--model", help="as for benchmarks.versus")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.what == "child":
        print(_MARK + json.dumps(child(*json.loads(args.given))))
        return
    print(f"{described(args.model)}\n")
    with tempfile.TemporaryDirectory() as directory:
        model, load_format = checkpoint(args.model, directory)
        if args.what == "writing":
            writing(model, load_format, args.rounds)
        else:
            run = restart if args.what == "restart" else swap
            run(model, load_format, args.lengths, args.rounds)


if __name__ == "__main__":
    main()
