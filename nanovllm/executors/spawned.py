"""Runs each rank in a spawned process. A dead worker becomes an error within seconds, never a hang;
`shutdown` leaves no process behind. Knows no requests and no text.
"""

import logging
import multiprocessing as mp
import socket
import time
from collections import deque
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nanovllm.checkpoint.hub import Checkpoint
from nanovllm.errors import EngineDeadError, NanoVLLMError
from nanovllm.executors.worker import check_networks, num_threads, rank_device, run_worker
from nanovllm.options.config import Config
from nanovllm.scheduler.messages import Schedule, StepResult
from nanovllm.scheduler.worker_info import WorkerInfo
from nanovllm.worker.kv_cache import require_one_sequence

if TYPE_CHECKING:
    from nanovllm.structured.grammar import GrammarCompiler

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
"""How long `shutdown` waits for the workers to exit before it kills them."""


class SpawnedExecutor:
    """Runs tensor_parallel_size child processes, each with a pipe. Rank 0 returns the results.

    All ranks are children. So this process joins no process group and may have several engines.
    """

    def __init__(
        self, config: Config, checkpoint: Checkpoint, draft: Checkpoint | None = None
    ) -> None:
        self._config = config
        self._target, self._draft = check_networks(config, checkpoint, draft)
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._received: list[deque[Any]] = []  # by rank: messages that nobody has taken yet
        self._store: TCPStore | None = None
        self._dead: str | None = None
        self._grammars: GrammarCompiler | None = None  # not sent yet

    def start(self) -> WorkerInfo:
        size = self._config.tensor_parallel_size
        rank_device(self._config, size - 1)
        context = mp.get_context("spawn")
        try:
            self._store = _local_store()
            for rank in range(size):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                self._received.append(deque())
                process = context.Process(
                    target=run_worker,
                    args=(
                        rank,
                        self._store.port,
                        num_threads(self._config),
                        self._target,
                        self._draft,
                    ),
                    kwargs={"pipe": theirs},
                    name=f"nanovllm-rank{rank}",
                    daemon=True,
                )
                process.start()
                self._processes.append(process)
                # Else a process forked with os.fork() would end our ranks when it exits.
                mp.process._children.discard(process)  # type: ignore[attr-defined]
                theirs.close()  # so that `ours` reads end-of-file when the child dies
            infos: list[WorkerInfo] = [self._receive(rank) for rank in range(size)]
            info = min(infos, key=lambda found: found.num_blocks)
            require_one_sequence(info)
            self._send(info, self._pipes)
            infos = [self._receive(rank) for rank in range(size)]
        except BaseException:
            self.shutdown()
            raise
        return infos[0]

    def set_grammars(self, compiler: "GrammarCompiler") -> None:
        self._grammars = compiler  # a large message, which most engines never need

    def execute(self, schedule: Schedule) -> "_StepFuture":
        self.check_health()
        if self._grammars is not None and any(
            new.params.structured_outputs is not None for new in schedule.admissions
        ):
            self._send(self._grammars, self._pipes[:1])
            self._grammars = None
        self._send(schedule, self._pipes)
        return _StepFuture(self, schedule.step_id)

    def check_health(self) -> None:
        if self._dead is None and not all(process.is_alive() for process in self._processes):
            self._die("a worker process died")
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def shutdown(self) -> None:
        self._dead = self._dead or "the engine was shut down; make a new LLM"
        for pipe in self._pipes:
            pipe.close()  # a worker that waits for a schedule reads end-of-file and exits
        deadline = time.monotonic() + _EXIT_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._pipes, self._processes, self._store = [], [], None

    def wait_for(self, step_id: int) -> StepResult:
        """Return rank 0's result of step `step_id`; drop the results of earlier steps."""
        while True:
            result: StepResult = self._receive(0)
            if result.step_id == step_id:
                return result

    def _send(
        self, message: "WorkerInfo | Schedule | GrammarCompiler", pipes: list[Connection]
    ) -> None:
        try:
            for pipe in pipes:
                pipe.send(message)
        except OSError:
            self._die("a worker process died")
        except BaseException:  # Ctrl-C: some ranks have the message and some do not
            self._kill("interrupted while the ranks were being told what to do; make a new LLM")
            raise

    def _receive(self, rank: int) -> Any:
        """Return `rank`'s next message. Raise as soon as any rank reports an error or dies."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        while not self._received[rank]:
            ready = wait([*self._pipes, *(process.sentinel for process in self._processes)])
            heard = False
            for pipe, received in zip(self._pipes, self._received, strict=True):
                if pipe in ready:
                    try:
                        status, value = pipe.recv()
                    except (EOFError, OSError):
                        continue
                    except BaseException:  # Ctrl-C: half of the message may still be in the pipe
                        self._kill("interrupted while a rank answered; make a new LLM")
                        raise
                    if status == "error":
                        self._die(str(value), value)
                    received.append(value)
                    heard = True
            if not heard:
                self._die("a worker process died")
        return self._received[rank].popleft()

    def _die(self, reason: str, error: NanoVLLMError | None = None) -> NoReturn:
        """Kill all ranks and raise. When one rank is dead, the others would wait for it for ever.

        Raises:
            NanoVLLMError: `error`, if a rank reported a mistake of the user.
            EngineDeadError: otherwise.
        """
        # A pipe closes shortly before its process has an exit code; wait for the code.
        ended = wait([process.sentinel for process in self._processes], timeout=2.0)
        for process in self._processes:
            if process.sentinel in ended:
                process.join(1.0)
        exits = [
            f"{process.name} exited with {process.exitcode}"
            for process in self._processes
            if process.exitcode is not None
        ]
        self._kill("; ".join([reason, *exits]))
        logger.error("tensor-parallel workers ended: %s", self._dead)
        # A subclass is a user's mistake that a rank found; NanoVLLMError itself wraps a crash.
        if error is not None and type(error) is not NanoVLLMError:
            raise error
        raise EngineDeadError(self._dead)

    def _kill(self, reason: str) -> None:
        self._dead = reason
        for process in self._processes:
            process.kill()
        self.shutdown()


def _local_store() -> TCPStore:
    """Return a store for processes of this machine. By itself it would listen to every network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )


class _StepFuture(NamedTuple):
    executor: SpawnedExecutor
    step_id: int

    def result(self) -> StepResult:
        return self.executor.wait_for(self.step_id)
