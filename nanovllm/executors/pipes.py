"""Ranks that are spawned processes of this machine, each with a pipe. Knows no schedule."""

import multiprocessing as mp
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nanovllm.executors.rank_process import RankJob, run_spawned
from nanovllm.executors.worker import num_threads, rank_device
from nanovllm.utils.distributed import LOOPBACK, make_store
from nanovllm.worker.model_loader import NetworkSpec

_EXIT_SECONDS = 5.0
"""How long `end` waits for the processes to exit before it kills them."""


class PipeRanks:
    """tensor_parallel_size child processes.

    All ranks are children. So this process joins no process group and may have several engines.
    """

    def __init__(self, target: NetworkSpec, draft: NetworkSpec | None = None) -> None:
        self.size = target.config.tensor_parallel_size
        self.processes: list[SpawnProcess] = []
        self._target, self._draft = target, draft
        self._pipes: list[Connection] = []
        self._store: TCPStore | None = None

    def start(self) -> None:
        config = self._target.config
        rank_device(config, self.size - 1)
        context = mp.get_context("spawn")
        self._store = make_store()
        store_at = (LOOPBACK, self._store.port)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            job = RankJob(rank, self.size, store_at, LOOPBACK, num_threads(config))
            process = context.Process(
                target=run_spawned,
                args=(job, theirs, self._target, self._draft),
                name=f"nanovllm-rank{rank}",
                daemon=True,
            )
            process.start()
            self.processes.append(process)
            # Else a process forked with os.fork() would end our ranks when it exits.
            mp.process._children.discard(process)  # type: ignore[attr-defined]
            theirs.close()  # so that `ours` reads end-of-file when the child dies

    def send(self, rank: int, message: Any) -> None:
        self._pipes[rank].send(message)

    def wait(self) -> list[int]:
        ready = wait([*self._pipes, *(process.sentinel for process in self.processes)])
        return [rank for rank, pipe in enumerate(self._pipes) if pipe in ready]

    def receive(self, rank: int) -> Any:
        return self._pipes[rank].recv()

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def endings(self) -> list[str]:
        # A pipe closes shortly before its process has an exit code; wait for the code.
        ended = wait([process.sentinel for process in self.processes], timeout=2.0)
        for process in self.processes:
            if process.sentinel in ended:
                process.join(1.0)
        return [
            f"{process.name} exited with {process.exitcode}"
            for process in self.processes
            if process.exitcode is not None
        ]

    def end(self, *, at_once: bool = False) -> None:
        if at_once:
            for process in self.processes:
                process.kill()
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for a message reads end-of-file and exits
        deadline = time.monotonic() + _EXIT_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._pipes, self.processes, self._store = [], [], None
