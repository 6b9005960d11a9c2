"""The hook by which adapters and loads from lower tiers hold sequences back."""

from typing import TYPE_CHECKING

from nanovllm.core.messages import Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.trie import Hit

if TYPE_CHECKING:
    from nanovllm.scheduler.scheduler import Scheduler


class AdmissionHook:
    """Sees each sequence on its way through the scheduler, and may hold it back.

    The scheduler asks its hooks in order. Default methods are no-ops.
    """

    scheduler: "Scheduler"

    def attach(self, scheduler: "Scheduler") -> None:
        """Receive the scheduler, which calls this once, first of all."""
        self.scheduler = scheduler

    @property
    def has_work(self) -> bool:
        """Whether work is left that belongs to no unfinished sequence."""
        return False

    def begin_step(self) -> None:
        """Prepare for a step that is about to be scheduled."""

    def holds(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence whose turn has come must go on waiting.

        Others may then go first. The hook has called `Scheduler.suspend` for it, and calls
        `Scheduler.resume` when it may go.
        """
        return False

    def prepare(self, seq: Sequence, hit: Hit) -> Hit | None:
        """Prepare an admission; return the prefix with which the sequence begins. None: it must go
        on waiting, and the hook has called `Scheduler.suspend` for it.

        Next comes `admitted`, or `cancel` if too few pages are free, or if a hook returns None.
        """
        return hit

    def cancel(self, seq: Sequence) -> None:
        """Undo `prepare`."""

    def admitted(self, seq: Sequence, hit: Hit) -> None:
        """Handle a sequence that was given a table row and its pages."""

    def needs_step(self) -> bool:
        """Return whether a step without rows and admissions must run."""
        return False

    def fill_step(self, schedule: Schedule) -> Schedule:
        """Return the step with what the hook adds to it."""
        return schedule

    def update(self, schedule: Schedule, result: StepResult) -> None:
        """Handle the result of a step, after its tokens were taken."""

    def abandon(self, schedule: Schedule) -> None:
        """Handle a failed step, before its sequences lose their KV."""

    def forget(self) -> None:
        """Forget what depends on the weights: they may have changed, and no sequence runs."""

    def release(self, seq: Sequence) -> None:
        """Handle a sequence that is about to lose its table row and its pages."""

    def remove(self, seq: Sequence) -> None:
        """Handle a sequence that has ended."""
