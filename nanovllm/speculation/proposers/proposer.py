"""The contract of a proposer: it guesses the next tokens of a row.

A proposer reads the device tables and writes its guesses there. It knows no acceptance: the model
draws its own tokens, and a guess stands if it equals the one drawn.
"""

from typing import Protocol

from nanovllm.scheduler.messages import Row, Schedule
from nanovllm.worker.device_tables import DeviceTables


class Proposer(Protocol):
    """Proposes draft tokens. Every rank has one, and all write the same drafts."""

    block_bytes: int
    """Bytes that the proposer itself needs for each KV block on this rank."""

    follows_drafts: bool
    """Whether `propose` takes rows with `num_unverified_tokens`, whose first position is
    `DeviceTables.last_positions`. It may be set in `allocate`."""

    def warm_up(self, tables: DeviceTables, num_blocks: int, rows: list[Row]) -> int:
        """Reach the peak of memory, on pools of `num_blocks` blocks that do not stay; return the
        bytes that CUDA graphs will take in addition.

        Called before `allocate`, and only where the KV pool takes what memory is left.

        Args:
            rows: the longest prompts of a step.
        """
        ...

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        """Prepare for the target's `tables` and KV blocks 0 to num_blocks - 1. Called once."""
        ...

    def admit(self, schedule: Schedule) -> None:
        """Note which table rows and blocks have new owners. Called before each step, after
        `DeviceTables.apply`.
        """
        ...

    def propose(self, rows: list[Row]) -> list[int]:
        """Write drafts for `rows`, and return how many each row got.

        Row r gets up to `r.num_draft_tokens` tokens, at its positions from `r.num_known_tokens` on;
        that is at least 1. The tokens before them are in the tables, and their KV is written,
        except for the last one's.
        """
        ...
