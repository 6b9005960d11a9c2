"""The values that cross between the engine and its workers: plain Python, picklable, never changed
once made.

A step names slots, the rows of the tables that each worker keeps; it carries only what changed.
"""

import dataclasses
from typing import NamedTuple


class Admission(NamedTuple):
    """A sequence takes a slot, for the first time or again after a preemption; the slot's row is
    overwritten.
    """

    slot: int
    token_ids: list[int]
    """Every token known so far: the prompt and what was generated."""
    block_ids: list[int]
    temperature: float
    seed: int


class NewBlocks(NamedTuple):
    """Blocks appended to a slot's block table, from index `start` on."""

    slot: int
    start: int
    block_ids: list[int]


class Row(NamedTuple):
    """The tokens of one sequence in this step: positions [num_computed_tokens, +
    num_scheduled_tokens).
    """

    seq_id: int
    slot: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool
    """The row reaches the end of its sequence, so its last hidden state gives the next token."""
    draft_token_ids: tuple[int, ...] = ()
    """Guesses at the last tokens of the row, which the step verifies."""


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """One step of work."""

    step_id: int
    admissions: list[Admission]
    new_blocks: list[NewBlocks]
    rows: list[Row]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_scheduled_tokens for row in self.rows)

    @property
    def num_samples(self) -> int:
        return sum(row.samples for row in self.rows)


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced."""

    step_id: int
    token_ids: list[list[int]]
    """For each row that samples, in order: the drafts that held, then one token more."""
    draft_token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    """For each row that samples, in order: guesses at what comes next; empty without a proposer."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheInfo:
    """What starting the workers found out."""

    num_blocks: int
    """The smallest number of KV blocks that any rank can hold."""
    block_size: int
    max_model_len: int
    """Config's, cut to the positions that the model has."""
    vocab_size: int
