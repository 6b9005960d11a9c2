"""What other folders may add to an engine. It runs without: `assembly.make_engine` adds them."""

from typing import Protocol

from nanovllm.engine.request import Request
from nanovllm.options.structured_outputs import StructuredOutputsParams
from nanovllm.scheduler.messages import Schedule, StepResult
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.scheduler.sequence import Sequence


class Observer:
    """What an engine reports; this one takes no notice."""

    def add_request(self, request: Request) -> None:
        """Note a request that was queued."""

    def end(self, seq: Sequence) -> None:
        """Note that a sequence has finished; called once for each."""

    def begin_step(self) -> None:
        """Note that the engine's loop begins."""

    def scheduled(self, schedule: Schedule, scheduler: Scheduler) -> None:
        """Note a step that was scheduled, and is launched next."""

    def launched(self, schedule: Schedule) -> None:
        """Note that the step was launched; in this process on a CPU it is computed by then."""

    def waited(self, result: StepResult) -> None:
        """Note that a step's tokens have come."""

    def end_step(self, scheduler: Scheduler) -> None:
        """Note that the engine's loop has ended, without an error."""

    def close(self) -> None:
        """End the observation. May be called again."""


class Grammars(Protocol):
    """Compiles the grammars of structured_outputs, for several threads at the same time."""

    def compile(self, params: StructuredOutputsParams) -> object:
        """Compile a grammar, or find it compiled.

        Raises:
            InvalidRequestError: it cannot be compiled.
        """
        ...

    def is_compiled(self, params: StructuredOutputsParams) -> bool:
        """Return whether `compile` only has to find it. Never waits for another thread."""
        ...
