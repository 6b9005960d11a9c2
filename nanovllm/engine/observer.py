"""`Observer`: what is told of each request and step of an engine, such as a trace of them."""

from typing import TYPE_CHECKING

from nanovllm.core.messages import Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from nanovllm.engine.request import Request


class Observer:
    """Is told what an engine does, in its thread. By default it does nothing.

    `LLMEngine.observers` holds those that listen; one may be added or removed between two steps. An
    observer changes nothing that it is given. A loop of the engine may launch one step and take the
    result of an earlier one; in this process on a CPU both are the same step.
    """

    def add_request(self, request: "Request") -> None:
        """Note a request that was queued."""

    def end(self, seq: Sequence) -> None:
        """Note that a sequence has finished; called once for each."""

    def begin_step(self) -> None:
        """Note that the engine's loop begins."""

    def scheduled(self, schedule: Schedule, scheduler: Scheduler) -> None:
        """Note a step that was scheduled, and is launched next. Its blocks are allocated."""

    def launched(self, schedule: Schedule) -> None:
        """Note that the step was launched; in this process on a CPU it is computed by then."""

    def waited(self, result: StepResult) -> None:
        """Note that a step's tokens have come. The sequences do not have them yet."""

    def end_step(self, scheduler: Scheduler) -> None:
        """Note that the engine's loop has ended, without an error. Sequences have their tokens."""

    def close(self) -> None:
        """Note that the engine ends. May be called again."""
