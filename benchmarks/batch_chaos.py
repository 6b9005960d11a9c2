"""Kill the workers, a node and the driver of a batch, and check each byte of its output.

A job of the shipped model runs in one process, then on 1, 2 and 4 workers of a Ray cluster of four
nodes on this machine. At random points of its progress a worker or a node is killed, and the driver
once; the same command is then run again. Each output must equal the first one, byte for byte.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from ray.cluster_utils import Cluster

from nanovllm import demo_model

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
NUM_NODES = 4
NUM_WORKER_KILLS = 4
SECONDS = 500
"""Seconds after which a job counts as failed."""
FLAGS = ["--max-tokens", "16", "--temperature", "2", "--max-num-seqs", "16"]
FLAGS += ["--max-model-len", "256", "--num-kvcache-blocks", "512", "--device", "cpu"]
BAD = ["{bad", '{"prompt": 5}', '{"id": "x"}', '{"prompt": "x", "sampling_params": {"top_p": 7}}']


def write_rows(path: Path, number: int) -> int:
    """Write rows, one in a hundred of them bad; return the number of bad ones."""
    questions = [question for question, _ in demo_model.entries()]
    rng, num_bad = random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        for index in range(number):
            is_bad = index % 100 == 50
            num_bad += is_bad
            row = {"id": f"row-{index}", "prompt": rng.choice(questions)}
            file.write((BAD[index // 100 % len(BAD)] if is_bad else json.dumps(row)) + "\n")
    return num_bad


class Job:
    """A driver, and what it has done."""

    def __init__(self, source: Path, output: Path, *flags: str) -> None:
        self._output = output
        self._command = [sys.executable, "-m", "nanovllm.apps.cli.main", "batch"]
        self._command += [str(source), str(output), "--model", demo_model.MODEL, *FLAGS, *flags]
        self.driver = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        """Run the command, again if it was killed."""
        self.driver = subprocess.Popen(self._command)
        return self.driver

    @property
    def num_done(self) -> int:
        """Return the number of rows in its journal."""
        path = self._output.with_name(self._output.name + ".parts") / "rows.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


def engines() -> list[Any]:
    """Return the processes of the actors that have an engine, on the nodes of this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ray::RowActor" in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill_worker(rng: random.Random) -> bool:
    """Kill an actor that has an engine; return whether there was one."""
    found = engines()
    if found:
        rng.choice(found).kill()
    return bool(found)


def kill_node(rng: random.Random, cluster: Cluster) -> bool:
    """Kill a node that has such an actor, and add a new node; return whether there was one."""
    parents = {process.ppid() for process in engines()}
    nodes = [
        node
        for node in cluster.list_all_nodes()[1:]
        if node.all_processes["raylet"][0].process.pid in parents
    ]
    if nodes:
        cluster.remove_node(rng.choice(nodes), allow_graceful=False)
        cluster.add_node(wait=False, **NODE)
    return bool(nodes)


def run(job: Job, cluster: Cluster, num_rows: int, seed: int) -> list[str]:
    """Run a job to its end while killing; return what was killed."""
    rng = random.Random(seed)
    kills: list[tuple[int, str]] = [
        (rng.randrange(num_rows // 20, num_rows * 9 // 10), "worker")
        for _ in range(NUM_WORKER_KILLS)
    ]
    kills.append((rng.randrange(num_rows // 4, num_rows // 2), "node"))
    kills.append((rng.randrange(num_rows // 3, num_rows * 2 // 3), "driver"))
    waiting, done, deadline = sorted(kills, reverse=True), [], time.monotonic() + SECONDS

    def kill_driver() -> bool:
        job.driver.send_signal(signal.SIGKILL)
        job.driver.wait()
        job.start()
        return True

    kill: dict[str, Callable[[], bool]] = {
        "worker": lambda: kill_worker(rng),
        "node": lambda: kill_node(rng, cluster),
        "driver": kill_driver,
    }
    while job.driver.poll() is None:
        if time.monotonic() > deadline:
            job.driver.kill()
            raise SystemExit(f"the job was not done after {SECONDS} s: {job.num_done} rows")
        if waiting and job.num_done >= waiting[-1][0] and kill[waiting[-1][1]]():
            done.append(f"{waiting.pop()[1]} at {job.num_done}")
        time.sleep(0.02)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batch") as name:
        directory = Path(name)
        source, first = directory / "in.jsonl", directory / "first.jsonl"
        num_bad = write_rows(source, args.rows)
        start = time.monotonic()
        status = Job(source, first).driver.wait()
        expected = first.read_bytes()
        rows = [json.loads(line) for line in expected.splitlines()]
        assert status == 1  # some rows are bad
        assert len(rows) == args.rows
        assert sum(row["error"] is not None for row in rows) == num_bad
        print(f"in one process: {time.monotonic() - start:.0f} s, {num_bad} bad rows", flush=True)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        head = {"num_cpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(NUM_NODES):
            cluster.add_node(wait=False, **NODE)
        cluster.wait_for_nodes()
        try:
            for workers in args.workers:
                output, start = directory / f"{workers}.jsonl", time.monotonic()
                flags = ["--workers", str(workers), "--ray-address", cluster.address]
                job = Job(source, output, *flags)
                killed = run(job, cluster, args.rows, args.seed + workers)
                same = output.exists() and output.read_bytes() == expected
                seconds = time.monotonic() - start
                result = "identical" if same else "DIFFERENT"
                print(
                    f"{workers} workers: {seconds:.0f} s, {result}; {', '.join(killed)}", flush=True
                )
                if not same or len(killed) < NUM_WORKER_KILLS + 2:
                    raise SystemExit(1)
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
