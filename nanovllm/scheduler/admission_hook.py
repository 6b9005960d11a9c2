"""What may hold a sequence back: the seam of adapters and of loads from lower tiers."""

from typing import TYPE_CHECKING

from nanovllm.core.messages import Schedule, StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.trie import Hit

if TYPE_CHECKING:
    from nanovllm.scheduler.scheduler import Scheduler


class AdmissionHook:
    """Sees each sequence on its way through the scheduler, and may hold it back.

    A scheduler asks its hooks in order. By default a hook holds nothing and does nothing.
    """

    scheduler: "Scheduler"

    def attach(self, scheduler: "Scheduler") -> None:
        """Get the scheduler. It calls this once, before all else."""
        self.scheduler = scheduler

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do that belongs to no unfinished sequence."""
        return False

    def begin_step(self) -> None:
        """Do what comes before a step is scheduled."""

    def holds(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence, whose turn has come, must wait on.

        Others may then go first. The hook has called `Scheduler.suspend` for it, and calls
        `Scheduler.resume` when it may go.
        """
        return False

    def prepare(self, seq: Sequence, hit: Hit) -> Hit:
        """Prepare an admission; return the prefix with which the sequence begins.

        Next comes `admitted`, or `cancel` if too few pages are free.
        """
        return hit

    def cancel(self, seq: Sequence) -> None:
        """Undo `prepare`."""

    def admitted(self, seq: Sequence, hit: Hit) -> None:
        """Learn that a sequence has a table row and its pages."""

    def needs_step(self) -> bool:
        """Return whether a step without rows and admissions must run."""
        return False

    def fill_step(self, schedule: Schedule) -> Schedule:
        """Return a step with what it carries for the hook."""
        return schedule

    def update(self, schedule: Schedule, result: StepResult) -> None:
        """Learn what a step gave, after its tokens were taken."""

    def abandon(self, schedule: Schedule) -> None:
        """Learn that a step failed, before its sequences lose their KV."""

    def release(self, seq: Sequence) -> None:
        """Learn that a sequence is about to lose its table row and its pages."""

    def remove(self, seq: Sequence) -> None:
        """Learn that a sequence has ended."""
