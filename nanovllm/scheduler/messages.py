"""The values that cross between the engine and its workers: plain Python, picklable, never changed
once made.

Each worker keeps tables with one row for each running sequence. A step names rows by `table_idx`
and carries only what changed.
"""

import dataclasses
from typing import NamedTuple

from nanovllm.sampling_params import SamplingParams


class Admission(NamedTuple):
    """A sequence takes a table row: at its first admission, or again after a preemption.

    The row is overwritten.
    """

    seq_id: int
    table_idx: int
    token_ids: list[int]
    """Every token known so far: the prompt and what was generated."""
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    """Tokens that end the sequence; not to be sampled before params.min_tokens."""
    bad_words: tuple[tuple[int, ...], ...]
    """params.bad_words as tokens."""


class NewBlocks(NamedTuple):
    """Blocks appended to a table row's block table, from index `start` on."""

    table_idx: int
    start: int
    block_ids: list[int]


class Row(NamedTuple):
    """The tokens of one sequence in this step: positions [num_computed_tokens, +
    num_scheduled_tokens).
    """

    seq_id: int
    table_idx: int
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


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token that is there, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Of the token that is there, among the whole vocabulary; 1 is the most likely."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced."""

    step_id: int
    token_ids: list[list[int]]
    """For each row that samples, in order: the drafts that held, then one token more."""
    draft_token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    """For each row that samples, in order: guesses at what comes next; empty without a proposer."""
    logprobs: dict[int, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    """By sequence id, for those that ask: log-probabilities of the tokens in `token_ids`."""
    prompt_logprobs: dict[int, list[tuple[int, TokenLogprobs]]] = dataclasses.field(
        default_factory=dict
    )
    """By sequence id, for those that ask: log-probabilities of prompt tokens, by position."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheInfo:
    """What starting the workers found out."""

    num_blocks: int
    """The smallest number of KV blocks that any rank can hold."""
    block_size: int
    max_model_len: int
    """Config's, cut to the positions that the model has."""
    vocab_size: int
    max_num_batched_tokens: int
    """Config's, or what suits the device."""
    runs_ahead: bool = False
    """Steps run beside the host, so launching one before the last one's tokens are known pays."""
