"""Runs each rank in a separate process. A dead rank becomes an error within seconds, never a hang;
`shutdown` leaves no process behind.
"""

import logging
from collections import deque
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from nanovllm.core.messages import Schedule, StepResult
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.errors import EngineDeadError, NanoVLLMError
from nanovllm.parallel.rank_process import Command, CommandResult
from nanovllm.worker.kv_cache import require_one_sequence

if TYPE_CHECKING:
    from nanovllm.features.structured.grammar import GrammarCompiler

logger = logging.getLogger(__name__)


class Ranks(Protocol):
    """The processes of ranks 0 to size - 1, each with a way for messages in both directions.
    pipes.py spawns processes of this machine; ray_ranks.py has Ray place actors.

    A rank first sends what it can hold. Every message of a rank is ("ok", value), ("log", record)
    or ("error", exception).
    """

    size: int

    def start(self) -> None:
        """Start all ranks; call `end` even if this raises.

        Raises:
            NanoVLLMError: the ranks cannot be started with these options.
        """
        ...

    def send(self, rank: int, message: memoryview) -> None:
        """Send a pickled `message` to `rank`. OSError: the rank has ended."""
        ...

    def wait(self) -> list[int]:
        """Wait until a rank has sent a message or has ended. Return the ranks to receive from."""
        ...

    def receive(self, rank: int) -> Any:
        """Return the next message of `rank`. EOFError, OSError: the rank has ended."""
        ...

    def alive(self) -> bool:
        """Return whether no rank has ended."""
        ...

    def endings(self) -> list[str]:
        """Say of each rank that has ended which it was and how, for an error's message. Wait up to
        two seconds: messages stop shortly before a process is gone.
        """
        ...

    def end(self, *, at_once: bool = False) -> None:
        """End all ranks, within five seconds or at once; give back what they hold. Repeated calls
        do nothing.
        """
        ...


class RankExecutor:
    """Gives all of `ranks` the same schedules. Rank 0 returns the results."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._all = range(ranks.size)
        # By rank: messages not yet taken.
        self._received: list[deque[Any]] = [deque() for _ in self._all]
        self._dead: str | None = None
        self._grammars: GrammarCompiler | None = None  # not sent yet

    def start(self) -> WorkerInfo:
        try:
            self.ranks.start()
            infos: list[WorkerInfo] = [self._receive(rank) for rank in self._all]
            info = min(infos, key=lambda found: found.num_blocks)
            require_one_sequence(info)
            self._send(info, self._all)
            infos = [self._receive(rank) for rank in self._all]
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
            self._send(self._grammars, self._all[:1])
            self._grammars = None
        self._send(schedule, self._all)
        return _StepFuture(self, schedule.step_id)

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.check_health()
        self._send(Command(function, arguments), self._all)
        try:
            results = [self._command_result(rank) for rank in self._all]
        except BaseException:  # Ctrl-C: a later command would take the answers to this one
            if self._dead is None:
                self._kill("interrupted while the ranks answered; make a new LLM")
            raise
        for result in results:
            if result.error is not None:
                raise result.error
        return [result.value for result in results]

    def _command_result(self, rank: int) -> CommandResult:
        """Return what `rank` says of the command; keep the results of steps before it."""
        steps: list[StepResult] = []
        message: StepResult | CommandResult = self._receive(rank)
        while not isinstance(message, CommandResult):
            steps.append(message)
            message = self._receive(rank)
        self._received[rank].extendleft(reversed(steps))
        return message

    def check_health(self) -> None:
        if self._dead is None and not self.ranks.alive():
            self._die("a worker process died")
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def shutdown(self, reason: str = "the engine was shut down; make a new LLM") -> None:
        self._dead = self._dead or reason
        self.ranks.end()

    def wait_for(self, step_id: int) -> StepResult:
        """Return rank 0's result of step `step_id`; drop earlier results, which are not read."""
        while True:
            result: StepResult = self._receive(0)
            if result.step_id == step_id:
                return result

    def _send(
        self, message: "WorkerInfo | Schedule | GrammarCompiler | Command", ranks: range
    ) -> None:
        pickled = [ForkingPickler.dumps(message) for _ in ranks]  # on an error, no rank has any
        try:
            for rank, content in zip(ranks, pickled, strict=True):
                self.ranks.send(rank, content)
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
            heard = False
            for other in self.ranks.wait():
                try:
                    status, value = self.ranks.receive(other)
                except (EOFError, OSError):
                    continue
                except BaseException:  # Ctrl-C: half of the message may still be on its way
                    self._kill("interrupted while a rank answered; make a new LLM")
                    raise
                heard = True
                if status == "error":
                    self._die(str(value), value)
                if status == "log":
                    _log(value)
                else:
                    self._received[other].append(value)
            if not heard:
                self._die("a worker process died")
        return self._received[rank].popleft()

    def _die(self, reason: str, error: NanoVLLMError | None = None) -> NoReturn:
        """Kill all ranks, which would wait for a dead one for ever. Raise `error` if it is a
        mistake of the user, else EngineDeadError.
        """
        self._kill("; ".join([reason, *self.ranks.endings()]))
        logger.error("workers ended: %s", self._dead)
        # A subclass is a user's mistake that a rank found; NanoVLLMError itself wraps a crash.
        if error is not None and type(error) is not NanoVLLMError:
            raise error
        raise EngineDeadError(self._dead)

    def _kill(self, reason: str) -> None:
        self._dead = reason
        self.ranks.end(at_once=True)


def _log(record: logging.LogRecord) -> None:
    """Log what a rank has logged, where this process logs such records."""
    log = logging.getLogger(record.name)
    if log.isEnabledFor(record.levelno):
        log.handle(record)


class _StepFuture(NamedTuple):
    executor: RankExecutor
    step_id: int

    def result(self) -> StepResult:
        return self.executor.wait_for(self.step_id)
