"""What another folder may add to a scheduler. It runs without."""

from collections.abc import Mapping
from typing import Protocol

from nanovllm.outputs import DraftCounts
from nanovllm.scheduler.messages import NewBlocks, Row, RowDetails, Schedule, StepResult
from nanovllm.scheduler.sequence import Sequence

MAX_SAMPLES = 256
"""Drafts are added to a step up to so many positions that sample: logits take memory."""


class Drafting(Protocol):
    """Adds draft tokens to the rows of a step, and learns how they fared."""

    counts: DraftCounts
    """Of all sequences. `Sequence.draft_counts` has those of one."""

    def may_follow(self, seq: Sequence) -> bool:
        """Return whether a sequence with drafts in flight may get another row: see
        `Row.num_unverified_tokens`.
        """
        ...

    def extend(
        self, rows: list[Row], new_blocks: list[NewBlocks], sequences: Mapping[int, Sequence]
    ) -> tuple[list[Row], list[NewBlocks], bool]:
        """Return a step's rows and new blocks with drafts, and whether the step may have any.

        Args:
            sequences: by id.
        """
        ...

    def record(
        self, seq: Sequence, row: Row, details: RowDetails, num_accepted: int, num_appended: int
    ) -> None:
        """Learn how the drafts of a row fared.

        Args:
            num_appended: tokens that the row added: fewer than were accepted if the output ends.
        """
        ...

    def settle(self, schedule: Schedule, result: StepResult, elapsed: float | None) -> None:
        """Learn what a step cost, when its tokens are processed.

        Args:
            elapsed: seconds of the engine's loop, from scheduling the step on; None if the host
                works beside the device.
        """
        ...
