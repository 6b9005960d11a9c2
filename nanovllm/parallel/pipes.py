"""Ranks that are spawned processes on this machine, each with a pipe."""

import logging
import multiprocessing as mp
import os
import sys
import time
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nanovllm.errors import ConfigError
from nanovllm.parallel.rank_process import RankJob, run_spawned
from nanovllm.parallel.rank_setup import num_threads, platform_class
from nanovllm.utils.distributed import LOOPBACK, make_store
from nanovllm.utils.process import call_in_forked
from nanovllm.worker.model_loader import NetworkSpec

_GUARD = 'make the LLM below `if __name__ == "__main__":`, or in a function that is called there'
_EXIT_SECONDS = 5.0  # how long `end` waits for the processes to exit before it kills them


class PipeRanks:
    """tensor_parallel_size child processes.

    All ranks are children. So this process joins no process group and may have several engines.
    """

    def __init__(self, target: NetworkSpec, draft: NetworkSpec | None = None) -> None:
        self.size = target.config.tensor_parallel_size
        self.processes: list[SpawnProcess] = []
        self._target = target
        self._draft = draft
        self._pipes: list[Any] = []  # connections, whose class differs by system
        self._store: TCPStore | None = None
        self._begun: set[int] = set()  # ranks that have sent a message
        call_in_forked(self._close_pipes)

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            pipe.close()

    def start(self) -> None:
        config = self._target.config
        _check_may_spawn(self.size)
        platform_class(config).find(config.device, self.size - 1, self.size)
        context = mp.get_context("spawn")
        self._store = make_store()
        store_at = (LOOPBACK, self._store.port)
        level = logging.getLogger("nanovllm").getEffectiveLevel()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            job = RankJob(rank, self.size, store_at, LOOPBACK, num_threads(config), level)
            process = context.Process(
                target=run_spawned,
                args=(job, theirs, self._target, self._draft),
                name=f"nanovllm-rank{rank}",
                daemon=True,
            )
            process.start()
            self.processes.append(process)
            # Otherwise a process forked with os.fork() would end our ranks when it exits.
            mp.process._children.discard(process)  # type: ignore[attr-defined]
            theirs.close()  # so that `ours` reads end-of-file when the child dies

    def send(self, rank: int, message: memoryview) -> None:
        self._pipes[rank].send_bytes(message)

    def wait(self) -> list[int]:
        ready = wait([*self._pipes, *(process.sentinel for process in self.processes)])
        return [rank for rank, pipe in enumerate(self._pipes) if pipe in ready]

    def receive(self, rank: int) -> Any:
        message = self._pipes[rank].recv()
        self._begun.add(rank)
        return message

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def endings(self) -> list[str]:
        # A pipe closes shortly before its process has an exit code; wait for the code.
        ended = wait([process.sentinel for process in self.processes], timeout=2.0)
        for process in self.processes:
            if process.sentinel in ended:
                process.join(1.0)
        found = []
        for rank, process in enumerate(self.processes):
            if process.exitcode is not None:
                found.append(f"{process.name} exited with {process.exitcode}")
                if process.exitcode == 1 and rank not in self._begun:
                    found[-1] += f" while it imported your program, as its output says: {_GUARD}"
        return found

    def end(self, *, at_once: bool = False) -> None:
        processes = self.processes
        self.processes = []
        if at_once:
            for process in processes:
                process.kill()
        self._close_pipes()  # a rank that waits for a message reads end-of-file and exits
        deadline = time.monotonic() + _EXIT_SECONDS
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:  # also after Ctrl-C
            for process in processes:
                process.kill()
                process.join()
                process.close()
            self._pipes = []
            self._store = None


def _check_may_spawn(size: int) -> None:
    """Raise ConfigError if this process cannot start others, which import its program again."""
    if sys.platform == "win32":
        raise ConfigError(
            f"tensor_parallel_size={size} is not supported on Windows, where torch's processes do "
            "not find each other in the same way: leave it at 1, or use WSL"
        )
    what = f"tensor_parallel_size={size} starts {size} processes, which import your program again"
    if getattr(mp.current_process(), "_inheriting", False):
        raise ConfigError(f"{what}, and that made another LLM: {_GUARD}")
    if mp.current_process().daemon:
        raise ConfigError(
            f"tensor_parallel_size={size} starts {size} processes, and a daemonic process, such as "
            "one of multiprocessing's Pool, may start none: make the LLM in a Process with "
            "daemon=False, or in one of concurrent.futures.ProcessPoolExecutor"
        )
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and file is not None and not os.path.exists(file):
        raise ConfigError(f"{what}, but there is no file {file}: save it as one, and {_GUARD}")
