"""Does KV that outlives its process ever give a wrong token, or an error?

`crashes`: an engine is killed with SIGKILL while it writes prompts to its kv_cache_dir, at a random
time. `corruptions`: files of the directory are damaged, or replaced by another model's. After each,
a fresh engine answers the same prompts from the directory, and its tokens must be those of an
engine without one. Then several engines at once on one directory, a full disk and a read-only one.
"""

import argparse
import contextlib
import dataclasses
import functools
import logging
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence as Seq
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.features.tiers.traffic import TierTraffic

OPTIONS: dict[str, Any] = {"max_model_len": 256, "kvcache_block_size": 32}
LIMIT_GIB = 1 / 64
"""Little enough that entries are evicted."""
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OTHER_MODEL = {"hf_overrides": {"rope_theta": 77_777.0}}
"""Makes another model of the shipped one, whose entries have the same keys and sizes."""
SECONDS = 120.0
Tokens = list[list[int]]


@dataclasses.dataclass
class Tally:
    """What was observed in all rounds of a part."""

    rounds: int = 0
    wrong: int = 0
    """Rounds with a token that an engine without a directory does not give."""
    errors: int = 0
    """Rounds in which a user got an exception."""
    warnings: int = 0
    store_tokens: int = 0
    """Tokens whose KV came from the directory: if there are none, the part shows nothing."""
    failed_loads: int = 0
    torn: int = 0
    """Files that a killed process left half written."""
    kinds: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def passed(self) -> bool:
        """Whether users noticed nothing."""
        return self.wrong == self.errors == 0 and self.store_tokens > 0


def make_prompts(seed: int, count: int = 5) -> Tokens:
    """Return prompts of 40 to 200 tokens; many share their beginning, even across seeds."""
    rng, common = random.Random(seed), random.Random(0)
    shared = [common.randint(100, 900) for _ in range(120)]
    starts = [shared[: rng.choice([0, 48, 120])] for _ in range(count)]
    return [
        [*start, *(rng.randint(100, 900) for _ in range(rng.randint(40, 80)))] for start in starts
    ]


def answers(llm: LLM, prompts: Tokens) -> Tokens:
    """Return the tokens after each prompt."""
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [list(output.token_ids) for output in outputs]


class Checker:
    """Answers prompts with a fresh engine, and compares."""

    def __init__(self) -> None:
        self._reference = LLM(demo_model.MODEL, **OPTIONS)
        # The shipped model computes a token faster than a file is read: load anyway.
        TierTraffic.pays = lambda self, *_: True  # type: ignore[method-assign]

    def check(self, tally: Tally, directory: Path, prompts: Tokens) -> None:
        """Add what a fresh engine on `directory` does with `prompts` to `tally`."""
        tally.rounds += 1
        expected = answers(self._reference, prompts)
        with counted_warnings(tally):
            try:
                llm = LLM(demo_model.MODEL, kv_cache_dir=str(directory), **OPTIONS)
                for _ in range(2):  # the second time from the pool
                    tally.wrong += answers(llm, prompts) != expected
                stats = llm.engine.stats.tiers
                llm.shutdown()
            except Exception as error:
                tally.errors += 1
                tqdm.write(f"{type(error).__name__}: {error}")
                return
        assert stats is not None
        tally.store_tokens += stats.num_store_tokens
        tally.failed_loads += stats.num_failed_loads


@contextlib.contextmanager
def counted_warnings(tally: Tally) -> Iterator[None]:
    """Count what nanovllm warns of inside."""

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tally.warnings += 1

    handler, log = Counting(logging.WARNING), logging.getLogger("nanovllm")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def write_on(directory: str, seed: int, num_rounds: int, begun: Connection) -> None:
    """Answer new prompts forever, or `num_rounds` times; send a message before the first."""
    tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore, which outlives a killed process
    llm = LLM(demo_model.MODEL, kv_cache_dir=directory, kv_cache_dir_gib=LIMIT_GIB, **OPTIONS)
    begun.send("begun")
    number = 0
    while number != num_rounds:
        answers(llm, make_prompts(1000 * seed + number))
        number += 1
    llm.shutdown()


@functools.cache
def processes() -> Any:
    """Return a context whose processes start with torch already imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nanovllm.llm", "nanovllm.features.tiers.rank_tiers"])
    return context


def start_writer(directory: Path, seed: int, num_rounds: int = -1) -> Any:
    """Return a process that has begun `write_on`."""
    begun, sender = processes().Pipe(duplex=False)
    process = processes().Process(target=write_on, args=(str(directory), seed, num_rounds, sender))
    process.start()
    if not begun.poll(SECONDS):
        raise TimeoutError("an engine does not start")
    return process


def temporary(directory: Path) -> list[Path]:
    """Return the files that are being written."""
    return list(directory.glob("*/rank*/tmp-*"))


def crashes(checker: Checker, rounds: int, work: Path) -> Tally:
    """Kill an engine that writes, and let a fresh one answer; all rounds share a directory."""
    tally, rng, directory = Tally(), random.Random(1), work / "crashes"
    for seed in tqdm(range(rounds), desc="crashes", disable=rounds < 10):
        process = start_writer(directory, seed)
        time.sleep(rng.uniform(0.0, 0.15))
        deadline = time.monotonic() + 0.5
        while seed % 4 and not temporary(directory) and time.monotonic() < deadline:
            pass  # three times in four: during a write
        process.kill()
        process.join()
        tally.torn += len(temporary(directory))
        prompts = [prompt for number in range(3) for prompt in make_prompts(1000 * seed + number)]
        checker.check(tally, directory, prompts)
    return tally


def flip(file: Path, rng: random.Random, others: Seq[Path]) -> None:
    """Flip a bit; more often in the header than a random position would be."""
    content = bytearray(file.read_bytes())
    offset = rng.randrange(rng.choice([160, len(content)]))
    content[offset] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random, others: Seq[Path]) -> None:
    """Cut a file short; sometimes to nothing."""
    os.truncate(file, rng.choice([0, rng.randrange(file.stat().st_size)]))


def append(file: Path, rng: random.Random, others: Seq[Path]) -> None:
    """Make a file longer."""
    with file.open("ab") as opened:
        opened.write(rng.randbytes(rng.randint(1, 5000)))


def hole(file: Path, rng: random.Random, others: Seq[Path]) -> None:
    """Zero a part, as a power failure does to data that had not reached the disk."""
    size = file.stat().st_size
    start = rng.randrange(size)
    with file.open("r+b") as opened:
        opened.seek(start)
        opened.write(bytes(min(4096, size - start)))


def swap(file: Path, rng: random.Random, others: Seq[Path]) -> None:
    """Exchange two files of the same model."""
    other = rng.choice(others)
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def foreign(file: Path, rng: random.Random, others: Seq[Path]) -> None:
    """Replace this file with another model's of the same tokens and size."""
    other = file.parents[4] / "other"
    (found,) = other.glob(f"*/rank0/*/{file.name}")
    shutil.copy(found, file)


def no_file(file: Path, rng: random.Random, others: Seq[Path]) -> None:
    """Put something else in a file's place."""
    file.unlink()
    kind = rng.randrange(3)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        os.mkfifo(file)
    else:
        file.symlink_to(rng.choice(others))


DAMAGES: tuple[Callable[[Path, random.Random, Seq[Path]], None], ...] = (
    flip,
    truncate,
    append,
    hole,
    swap,
    foreign,
    no_file,
)


def corruptions(checker: Checker, rounds: int, work: Path) -> Tally:
    """Damage some or all files of a directory, and let a fresh engine answer."""
    tally, rng, prompts = Tally(), random.Random(2), make_prompts(0, 10)
    for name, options in (("right", {}), ("other", OTHER_MODEL)):
        llm = LLM(demo_model.MODEL, kv_cache_dir=str(work / name), **OPTIONS, **options)
        answers(llm, prompts)
        llm.shutdown()
    for number in tqdm(range(rounds), desc="corruptions", disable=rounds < 10):
        shutil.rmtree(work / "damaged", ignore_errors=True)
        shutil.copytree(work / "right", work / "damaged")
        files = sorted((work / "damaged").glob("*/rank0/??/*"))
        damage = DAMAGES[number % len(DAMAGES)]
        tally.kinds[damage.__name__] += 1
        for file in rng.sample(files, rng.choice([1, 3, len(files) // 2, len(files)])):
            if file.is_file() and not file.is_symlink():
                damage(file, rng, [other for other in files if other.is_file()])
        checker.check(tally, work / "damaged", prompts)
    return tally


def together(checker: Checker, rounds: int, work: Path) -> Tally:
    """Let two engines write the same prompts while fresh ones read them."""
    tally, directory = Tally(), work / "together"
    writers = [start_writer(directory, 0, 10 * rounds) for _ in range(2)]
    for number in range(rounds):
        checker.check(tally, directory, make_prompts(number))
    for writer in writers:
        writer.join(SECONDS)
        tally.errors += writer.exitcode != 0
    return tally


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """Mount a file system of 1 MiB at `path`; return False if this process may not."""
    path.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(path)]
    is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


def full_disk(checker: Checker, rounds: int, work: Path) -> Tally | None:
    """Write more than the disk holds."""
    tally = Tally()
    with small_disk(work / "full") as is_mounted:
        if not is_mounted:
            return None
        for number in range(rounds):
            checker.check(tally, work / "full", make_prompts(number, 20))
    return tally


def read_only_disk(checker: Checker, rounds: int, work: Path) -> Tally:
    """Look for prompts in a directory that cannot be written: some are there, others are not."""
    tally, path = Tally(), work / "read_only"
    with small_disk(path) as is_mounted:
        checker.check(Tally(), path, make_prompts(0))
        directories = [path, *(found for found in path.rglob("*") if found.is_dir())]
        if is_mounted:
            subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
        else:
            for directory in directories:
                directory.chmod(0o500)
        for _ in range(rounds):
            checker.check(tally, path, make_prompts(0) + make_prompts(1))
        if not is_mounted:
            for directory in directories:  # so that they can be removed
                directory.chmod(0o700)
    return tally


PARTS: dict[str, tuple[Callable[[Checker, int, Path], Tally | None], int]] = {
    "crashes": (crashes, 200),
    "corruptions": (corruptions, 200),
    "together": (together, 20),
    "full disk": (full_disk, 5),
    "read-only disk": (read_only_disk, 5),
}
"""Each part, and its rounds. A part returns None where it cannot run."""


def main() -> None:
    """Run the parts and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, help="rounds of each part; default: its own")
    args = parser.parse_args()
    checker, passed = Checker(), True
    for name in args.parts:
        run, rounds = PARTS[name]
        with tempfile.TemporaryDirectory() as work:
            tally = run(checker, args.rounds or rounds, Path(work))
        if tally is None:
            print(f"{name}: skipped, this process may not mount a file system")
            continue
        print(f"{name}: {'passed' if tally.passed else 'FAILED'}: {tally}", flush=True)
        passed &= tally.passed
    sys.exit(not passed)


if __name__ == "__main__":
    main()
