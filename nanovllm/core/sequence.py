"""A sequence: its tokens and how many of them are computed.

Only the scheduler changes it, with its block manager and what adds drafts. It has no phases such as
prefill and decode.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from nanovllm.core.messages import (
    AdapterSlot,
    Admission,
    Extras,
    InputSpan,
    NewTokens,
    Row,
    RowDetails,
    TokenLogprobs,
)
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import DraftCounts


@dataclass(slots=True, eq=False, repr=False)
class KVState:
    """What a sequence has of the KV pool. Only the block manager changes it."""

    parent_uid: int | str | None
    """`Block.uid` of the last published block, or the root; None after a hash collision."""
    block_table: list[int] = field(default_factory=list)
    block_keys: list[tuple[bytes, bytes]] = field(default_factory=list)  # of each full block
    num_published_blocks: int = 0


@dataclass(slots=True, eq=False, repr=False)
class OutputState:
    """What an output says of a sequence besides its tokens."""

    finish_reason: str | None = None
    stop_reason: int | str | None = None  # stop token or string, or an error's reason
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of output tokens, if requested
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position
    draft_counts: DraftCounts | None = None  # set by `AdaptiveDrafting`
    extras: dict[str, list[tuple[int, Any]]] | None = None
    """By name, what each row's `RowDetails.extras` had, with the row's first position."""


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A prompt and the tokens generated for it.

    Invariants:
    - `num_tokens` is the number of known, pending and draft tokens. Launched steps verify the
      drafts. Until a result is there, all of its drafts count as accepted.
    - `num_computed_tokens <= num_tokens`; the difference is what is left to compute.
    - A sequence owns KV blocks only while it owns a table row, that is, while it is running.
    """

    seq_id: int  # increases with arrival, so it orders arrivals
    token_ids: list[int]  # known tokens: the prompt, of which this is a copy, then output
    params: SamplingParams
    _: KW_ONLY
    seed: int = 0
    priority: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    user: str = ""  # users take turns, see FairPolicy
    cache_salt: str | None = None  # only sequences of the same salt and adapter share blocks
    adapter: AdapterSlot | None = None
    generates: bool = True  # False: it ends with its prompt, and samples no token
    skips_prefix_cache: bool = False  # each token of its prompt is computed
    extras: Extras | None = None  # what features ask of the workers
    inputs: tuple[InputSpan, ...] = ()  # what is no token: sequences share blocks with equal ones
    rope_offset: int = 0  # see `Admission`

    # Set by `Scheduler.add`:
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()  # these and its own
    max_num_tokens: int = 0
    # Set by the scheduler, of its policy and its hooks:
    is_queued: bool = False  # the policy holds it: it waits, or its prompt is not computed
    is_held: bool = False  # a hook holds it while it runs: it gets no rows
    # Set by `FairPolicy`:
    turn: int = 0
    has_turn: bool = False  # for good: it has advanced

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0  # tokens with KV written, or being written by a launched step
    num_pending_tokens: int = 0  # tokens that launched steps will sample
    num_in_flight_steps: int = 0  # launched steps with a row of this sequence
    num_draft_tokens: int = 0  # that launched steps verify
    num_unsent_tokens: int = 0  # last known tokens, which the workers' table row lacks
    num_cached_tokens: int | None = None  # prefix hit at the first admission; None before
    table_idx: int | None = None  # row in the workers' tables; None while waiting
    kv: KVState = field(init=False)
    output: OutputState = field(default_factory=OutputState, init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.kv = KVState(self.root_uid)

    @property
    def num_tokens(self) -> int:
        """Number of known, pending and draft tokens: all those that may be computed."""
        return len(self.token_ids) + self.num_pending_tokens + self.num_draft_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens whose values are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def was_admitted(self) -> bool:
        """Whether it is running or was before; if it waits, it was preempted."""
        return self.num_cached_tokens is not None

    @property
    def longest_hit(self) -> int:
        """Most tokens that a prefix hit may cover: the next one's hidden state is needed, for its
        log-probability, for a vector or to sample.
        """
        if self.skips_prefix_cache:
            return 0
        last = len(self.token_ids) - 1
        if self.params.prompt_logprobs is None:
            return last
        return min(last, self.params.prompt_logprob_start)

    @property
    def root_uid(self) -> str:
        """Parent of the first block: each (adapter, salt) is the root of a trie of its own."""
        digest = "" if self.adapter is None else self.adapter.digest
        return f"{digest}{self.cache_salt!r}"  # a digest has no quote, and no N of None

    def admission(self, block_ids: list[int]) -> Admission:
        """Return how the sequence enters its table row, with the blocks of its block table."""
        assert self.table_idx is not None
        self.num_unsent_tokens = 0
        return Admission(
            self.seq_id,
            self.table_idx,
            list(self.token_ids),  # a copy: the sequence grows while the step is in flight
            self.num_prompt_tokens,
            block_ids,
            self.params,
            self.seed,
            self.stop_token_ids,
            self.bad_words,
            self.adapter,
            self.extras,
            self.rope_offset,
        )

    def next_row(self, num_scheduled: int, *, is_last: bool) -> Row:
        """Return a row of the next tokens, and count them as computed. If it `is_last`, none is
        missing then, so that a token may be sampled.
        """
        assert self.table_idx is not None
        samples = is_last and self.generates
        start = self.num_computed_tokens
        self.num_computed_tokens = start + num_scheduled
        self.num_in_flight_steps += 1
        self.num_pending_tokens += samples
        unverified = self.num_draft_tokens
        return Row(self.seq_id, self.table_idx, start, num_scheduled, samples, 0, unverified)

    def take_result(self, row: Row, tokens: list[int], details: RowDetails) -> None:
        """Append the tokens of a row that samples, and subtract its rejected drafts."""
        num_rejected = row.num_draft_tokens + 1 - len(tokens)
        assert 0 <= num_rejected <= row.num_draft_tokens
        self.num_pending_tokens -= 1
        if self.table_idx is not None:  # else a preemption has set both to 0
            self.num_computed_tokens -= num_rejected
            self.num_draft_tokens -= row.num_draft_tokens
        self.append(tokens)
        if details.jump_forward:
            self.jump_forward(details.jump_forward)
        if details.logprobs:
            num_missing = self.num_output_tokens - len(self.output.logprobs)
            self.output.logprobs += details.logprobs[:num_missing]

    def take_extras(self, row: Row, extras: Extras) -> None:
        """Keep what features found out about a row's tokens."""
        if self.output.extras is None:
            self.output.extras = {}
        for name, value in extras.items():
            self.output.extras.setdefault(name, []).append((row.num_computed_tokens, value))

    def append(self, tokens: list[int]) -> None:
        """Append tokens up to the first that finishes the sequence."""
        output = self.output
        for token in tokens:
            if output.finish_reason is not None:
                return
            self.token_ids.append(token)
            if token in self.stop_token_ids and self.num_output_tokens >= self.params.min_tokens:
                output.finish_reason = "stop"
                output.stop_reason = None if token in self.eos_token_ids else token
            elif len(self.token_ids) >= self.max_num_tokens:
                output.finish_reason = "length"

    def jump_forward(self, tokens: list[int]) -> None:
        """Append tokens that no step has sampled: the next one computes them as one chunk."""
        num_known = len(self.token_ids)
        self.append(tokens)
        if self.table_idx is not None:  # else its next admission brings all tokens
            self.num_unsent_tokens += len(self.token_ids) - num_known

    def take_unsent(self) -> NewTokens:
        """Return the tokens that the workers' table row lacks, and count them as sent."""
        assert self.table_idx is not None
        start = len(self.token_ids) - self.num_unsent_tokens
        self.num_unsent_tokens = 0
        return NewTokens(self.table_idx, start, self.token_ids[start:])
