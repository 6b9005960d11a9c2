"""The queue of a scheduler with tiers: a prompt whose prefix another one loads waits for it.

Knows no blocks.
"""

from collections.abc import Callable

from nanovllm.scheduler.prompt_queue import PromptQueue
from nanovllm.scheduler.sequence import Sequence
from nanovllm.scheduler.stateful import StepQueue


class LoadingQueue(PromptQueue):
    """Without it, many prompts with a common prefix would each load it, and hold its blocks.

    Args:
        park: takes a sequence without a table row whose turn has come. It lets the sequence
            `leave`, and returns True, if the sequence needs what is being loaded.
    """

    def __init__(self, park: Callable[[Sequence], bool]) -> None:
        super().__init__()
        self._park = park

    def first(self) -> Sequence | None:
        """Return the sequence whose prompt comes next. Those that must wait leave the queue."""
        seq = super().first()
        while seq is not None and seq.table_idx is None and self._park(seq):
            seq = super().first()
        return seq


class LoadingStepQueue(LoadingQueue, StepQueue):
    """The same with states."""
