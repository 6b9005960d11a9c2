"""How much of `LLM.generate`'s speed does a server keep, while its client shares the cores?

Each round measures `generate`, then each server with a client that reads streams. All have the same
options and the same prompts, which are new in each round. Processes that are not being measured are
stopped. A server is NAME or NAME=PYTHON: an interpreter that has nanovllm.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import option
from benchmarks.harness import Table, loadable, make_parser
from benchmarks.load_client import random_prompts
from benchmarks.shapes import described

COLUMNS = ("tokens/s", "of generate", "event loop, ms/token", "client, ms/token")


class Process:
    """A process that runs only while it is measured."""

    def __init__(self, command: list[str], **pipes: Any) -> None:
        self.child = subprocess.Popen(command, text=True, **pipes)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.child.send_signal(signal.SIGCONT)
        yield
        self.child.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        self.child.kill()
        self.child.wait()


class Generate(Process):
    """A process that answers with `LLM.generate`."""

    def __init__(self, args: argparse.Namespace, model: str) -> None:
        command = [sys.executable, "-m", "benchmarks.saturation", "--model", model, "--generate"]
        command += [f"--option={name}={json.dumps(value)}" for name, value in args.option]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._args = args
        self.run(1, -1)
        self.child.send_signal(signal.SIGSTOP)

    def run(self, num_prompts: int, seed: int) -> float:
        """Return output tokens a second."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        args = self._args
        prompts = random_prompts(num_prompts, args.input_len, seed)
        with self.running():
            print(json.dumps([prompts, args.output_len]), file=self.child.stdin)
            self.child.stdin.flush()
            seconds = float(self.child.stdout.readline())
        return float(num_prompts * args.output_len / seconds)


class Server(Process):
    """A process that serves, and its client."""

    def __init__(self, given: str, args: argparse.Namespace, model: str) -> None:
        self.name, _, python = given.partition("=")
        self._args = args
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        flags = ["--port", str(port)]
        for name, value in args.option:
            flags += [f"--{name.replace('_', '-')}", str(value)]
        command = [python or sys.executable, "-m", "nanovllm", "serve", model, *flags]
        super().__init__(command, stderr=subprocess.DEVNULL)
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self._url}/ready").close()
                break
            if self.child.poll() is not None:
                sys.exit(f"saturation.py: the server {self.name} ended: {' '.join(command)}")
            time.sleep(0.1)
        self.child.send_signal(signal.SIGSTOP)

    def run(self, num_prompts: int, seed: int) -> tuple[float, float, float]:
        """Return output tokens a second; CPU milliseconds a token of event loop and of client."""
        args = self._args
        command = [sys.executable, "-m", "benchmarks.load_client", self._url]
        for flag, value in (
            ("--num-prompts", num_prompts),
            ("--input-len", args.input_len),
            ("--output-len", args.output_len),
            ("--seed", seed),
        ):
            command += [flag, str(value)]
        pid = self.child.pid  # also the id of the thread of the event loop
        schedule = Path(f"/proc/{pid}/task/{pid}/schedstat")
        with self.running():
            before = int(schedule.read_text().split()[0])
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            busy = int(schedule.read_text().split()[0]) - before
        found = json.loads(done.stdout)
        num_tokens = found["tokens"]
        client = 1000 * found["busy"] / num_tokens
        return num_tokens / found["seconds"], busy / 1e6 / num_tokens, client


def generate(args: argparse.Namespace) -> None:
    """Run the prompts of each line of standard input, and print the seconds that they took."""
    from nanovllm import LLM, SamplingParams

    llm = LLM(args.model, **dict(args.option))
    for line in sys.stdin:
        prompts, length = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - start, flush=True)


def measure(args: argparse.Namespace, model: str) -> None:
    """Print a row for each round, and one with the medians."""
    processes: list[Process] = []
    try:
        processes.append(base := Generate(args, model))
        servers = []
        for given in args.servers:
            servers.append(Server(given, args, model))
            processes.append(servers[-1])
            servers[-1].run(2, -1)
        headings = [f"{s.name}: {column}" for s in servers for column in COLUMNS]
        table = Table("round", "generate, tokens/s", *headings)
        rows = []
        for number in range(args.rounds):
            speed = base.run(args.num_prompts, number)
            rows.append([speed])
            for server in servers:
                tokens, *busy = server.run(args.num_prompts, number)
                rows[-1] += [tokens, tokens / speed, *busy]
            table.row(number + 1, *rows[-1])
        table.row("median", *(statistics.median(column) for column in zip(*rows, strict=True)))
    finally:
        for process in processes:
            process.stop()


def main() -> None:
    """Start all processes, run the rounds and stop the processes."""
    parser = make_parser("saturation", __doc__, rounds=6)
    parser.add_argument("servers", nargs="*", metavar="NAME[=PYTHON]", default=["server"])
    parser.add_argument("--option", type=option, action="append", default=[], help="NAME=VALUE")
    parser.add_argument("--num-prompts", type=int, default=128, help="requests at once")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--generate", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generate:
        generate(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `finally` stops the processes
    with loadable(args.model) as (model, load_format):
        args.option.append(("load_format", load_format))
        print(f"{described(args.model)}: {args.num_prompts} requests at once, {args.input_len}")
        print(f"tokens in, {args.output_len} out, on {os.cpu_count()} cores.\n")
        measure(args, model)


if __name__ == "__main__":
    main()
