"""The interface of what proposes draft tokens for rows of the device tables.

A proposer knows no acceptance: the model runner verifies its drafts, and the scheduler decides how
many it may propose.
"""

from typing import Protocol

from nanovllm.scheduler.messages import Row, Schedule
from nanovllm.worker.device_tables import DeviceTables


class Proposer(Protocol):
    """Writes draft tokens into the device tables.

    With tensor parallelism each rank has one. It gets the same rows on each rank, and must write
    the same drafts.
    """

    block_bytes: int
    """Bytes that it needs itself for each KV block on this rank; known before `allocate`."""

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        """Allocate its memory, once, before any step. `tables` are the target model's."""
        ...

    def admit(self, schedule: Schedule) -> None:
        """Take note of the table rows and blocks that `schedule` gives to new owners.

        It is called before each step, after `tables.apply(schedule)`.
        """
        ...

    def propose(self, rows: list[Row]) -> list[int]:
        """Write drafts for `rows`, and return how many each row got.

        A row gets up to `num_draft_tokens` drafts, from position `num_known_tokens` of its table
        row on. The tokens before that position are right. What stands behind is garbage, which may
        be overwritten.

        Args:
            rows: all of them with num_draft_tokens > 0.
        """
        ...
