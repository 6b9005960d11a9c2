"""The engine's loop over a scheduler and whatever executes its steps."""

from collections import deque
from collections.abc import Callable

from nanovllm.core.messages import Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.scheduler.scheduler import Scheduler


class StepLoop:
    """Launches steps, and gives the scheduler their results in the same order.

    Args:
        execute: runs a step; returns its result, or None if it failed.
        queue_depth: as `LLMEngine.queue_depth`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        execute: Callable[[Schedule], StepResult | None],
        queue_depth: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.in_flight: deque[tuple[Schedule, StepResult | None]] = deque()  # oldest first
        self._execute = execute
        self._queue_depth = queue_depth

    def launch(self, schedule: Schedule) -> None:
        """Execute a step that was scheduled."""
        self.in_flight.append((schedule, self._execute(schedule)))

    def is_due(self, launched: Schedule | None) -> bool:
        """Return whether the oldest step's result is taken now, after a launch."""
        return len(self.in_flight) > (0 if launched is None else self._queue_depth)

    def retire(self, elapsed: float | None = None) -> list[Sequence]:
        """Take the oldest step's result; return the sequences that advanced: `Scheduler.update`.
        If the step failed, it and all steps launched after it are abandoned.

        Args:
            elapsed: seconds of the loop, if it ran no other step.
        """
        schedule, result = self.in_flight.popleft()
        if result is None:
            self.scheduler.abandon(schedule)
            while self.in_flight:
                self.scheduler.abandon(self.in_flight.popleft()[0])
            return []
        advanced = self.scheduler.update(schedule, result)
        if self.scheduler.drafting is not None:
            self.scheduler.drafting.settle(schedule, result, elapsed)
        return advanced
