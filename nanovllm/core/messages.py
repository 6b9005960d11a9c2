"""The messages between the engine and its workers: plain Python values, picklable, never changed.

Each worker keeps tables with one row for each running sequence. A `Schedule` names a table row by
its `table_idx` and carries, besides its rows, only what changed since the previous step.
"""

import dataclasses
from typing import Any, NamedTuple

from nanovllm.options.sampling_params import SamplingParams

Extras = dict[str, Any]
"""What features have to say, by name: plain values. None where none has anything to say."""
HOST = "host"
STORE = "store"
"""The tiers that keep copies of entries: host memory, in slots of one page each; a byte store."""
MAX_SAMPLES = 256
"""Drafts are added to a step up to so many positions that sample: logits take memory."""


class AdapterSlot(NamedTuple):
    """A LoRA adapter, and the slot that holds it on the workers while its sequences run."""

    slot: int  # -1 before the first admission
    path: str  # a worker loads it if its slot holds another digest
    digest: str  # of the adapter's files, in hexadecimal


class LowDetail(NamedTuple):
    """A picture of a prompt of which the model need not see more than 512 x 512 pixels."""

    content: Any


class InputSpan(NamedTuple):
    """Tokens of a prompt that stand for something else than their ids say, such as a picture."""

    start: int  # position of the first
    length: int
    digest: bytes  # of what they stand for, 32 bytes: other digests, other prefixes
    offset: int = 0  # of the first in what they stand for, if that has several spans
    content: object = None  # what they stand for; workers get it as the feature sends it

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.length


class Admission(NamedTuple):
    """A sequence takes a table row, whose old contents are overwritten.

    This happens at its first admission and at each resumption after a preemption.
    """

    seq_id: int
    table_idx: int
    token_ids: list[int]  # all that are known: the prompt and the generated tokens
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # not to be sampled before params.min_tokens
    bad_words: tuple[tuple[int, ...], ...]  # params.bad_words as token ids
    adapter: AdapterSlot | None = None
    extras: Extras | None = None  # what features know of the sequence: see `Sequence.extras`
    rope_offset: int = 0  # added to the position of each token, to find its angles


class NewBlocks(NamedTuple):
    """Blocks appended to the block tables of a table row, which lie end to end, from `start` on."""

    table_idx: int
    start: int
    block_ids: list[int]


class NewTokens(NamedTuple):
    """Tokens of a table row that no step samples: its grammar forces them."""

    table_idx: int
    start: int
    token_ids: list[int]


class PageCopy(NamedTuple):
    """Page sources[i] of the pool is copied to page targets[i], for each i; none is in both."""

    sources: list[int]
    targets: list[int]


class TierEntry(NamedTuple):
    """An entry of the prefix cache (a KV block, a window block or a state snapshot) in a tier."""

    tier: str  # `HOST` or `STORE`
    key: bytes
    pages: list[int]  # of the pool, in the entry's order
    slots: list[int]  # of host memory: slots[i] is the copy of pages[i]; empty for a store


class Load(NamedTuple):
    """Entries that a sequence waits for. They are copied from their tiers to the pool's pages."""

    load_id: int
    parts: list[TierEntry]  # in the order in which they are needed


class Transfers(NamedTuple):
    """What a step moves, in the order of the fields, before its copies, zeroing and rows."""

    released: list[int]  # about to be reused: their writes and loads end, or are given up, first
    stores: list[TierEntry]  # to host: copied before all else; to a store: queued for writing
    loads: list[Load]  # they begin now, and a later step's result says that they have ended
    awaited: bool = False  # the step has no rows, and ends when the oldest load has ended


class Loaded(NamedTuple):
    """How a load ended."""

    load_id: int
    num_parts: int  # how many of its first parts are right: on all ranks, in a result
    seconds: float  # from the begin of its first part to the end of its last


class Row(NamedTuple):
    """One sequence's part of a step.

    It computes positions num_computed_tokens to num_computed_tokens + num_scheduled_tokens - 1.
    """

    seq_id: int
    table_idx: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool  # whether its last hidden state gives a token: it reaches the sequence's end
    num_draft_tokens: int = 0
    """How many of the row's last tokens are drafts. The worker proposes at most as many, and
    verifies them in this step. Before them the row has one token, known or pending."""
    num_unverified_tokens: int = 0
    """How many drafts of the sequence are in flight. The row's position counts all of them as
    accepted. The device, which knows how many were rejected, moves the row back by as many."""

    @property
    def end(self) -> int:
        """The position after the row's last token."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def sample_position(self) -> int:
        """The position of the row's first sample, and of its first draft; `end` if it has none."""
        return self.end - self.num_draft_tokens

    def begun_blocks(self, block_size: int) -> range:
        """Return which blocks the row begins and may not fill: some drafts may be missing."""
        begun = -(-self.num_computed_tokens // block_size)
        return range(max(begun, self.sample_position // block_size), -(-self.end // block_size))


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """One step: which sequences enter the tables, and which tokens to compute."""

    step_id: int
    admissions: list[Admission]
    new_blocks: list[NewBlocks]
    rows: list[Row]
    blocks_to_zero: list[int] = dataclasses.field(default_factory=list)
    """Blocks that a row begins in this step and does not fill.

    Attention may read their other slots as masked keys, whose values it multiplies by 0. So NaN and
    inf that an earlier sequence left there must go.
    """
    new_tokens: list[NewTokens] = dataclasses.field(default_factory=list)
    may_draft: bool = False  # whether rows may have drafts: the step's durations are measured
    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    """Made one after the other, before blocks are zeroed and before the rows."""
    transfers: Transfers | None = None  # between the pool and the tiers below it
    extras: Extras | None = None  # what features of the scheduler tell those of the workers

    @property
    def num_tokens(self) -> int:
        return sum(row.num_scheduled_tokens for row in self.rows)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the actual token first, then the most likely tokens."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # rank of the actual token in the whole vocabulary; 1 is the most likely


class FinishInfo(NamedTuple):
    """Why a sequence ends, if no token says so."""

    finish_reason: str  # "error" if it cannot go on, "stop" if its output is complete
    stop_reason: str | None = None
    kv_invalid: bool = False  # the model's logits are not finite, so its KV may be wrong


class RowDetails(NamedTuple):
    """What the result of a row has besides its tokens."""

    num_draft_tokens: int = 0  # that were proposed
    finish_info: FinishInfo | None = None  # why the row got no token
    jump_forward: list[int] | None = None  # what its grammar forces after the sampled tokens
    logprobs: list[TokenLogprobs] | None = None
    """With params.logprobs: those of the row's tokens, in order. There may be more of them, of
    samples after a rejected draft."""
    prompt_logprobs: list[tuple[int, TokenLogprobs]] | None = None  # with their positions
    extras: Extras | None = None  # what features found out about the row's tokens


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced."""

    step_id: int
    token_ids: list[list[int]]
    """For each row of the step: the accepted draft tokens, then one sampled token. Empty if the row
    does not sample, or failed."""
    details: dict[int, RowDetails] = dataclasses.field(default_factory=dict)
    """By sequence id, of the rows that have any: in most steps none."""
    seconds: float = 0.0  # of the step without proposing; 0.0 if the step may not draft
    draft_seconds: float = 0.0  # of proposing
    loaded: list[Loaded] = dataclasses.field(default_factory=list)
    """The loads from tiers that had ended when the step was launched."""
