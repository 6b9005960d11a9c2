"""`Story`: what an engine did, step by step, as plain values that `dataclasses.asdict` makes JSON.

Sequences have numbers, from 0 in order of arrival.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Stage:
    """What the logits of a sample say at one point between the model and the token."""

    name: str
    """"model", then the names of the rules and filters that the request has, in order."""
    num_left: int
    """Tokens with a probability above 0."""
    probabilities: list[float]
    """Of each of `Sample.candidates`."""


@dataclass(slots=True)
class Sample:
    """How one token was chosen."""

    position: int
    """Of the token in its sequence."""
    token_id: int
    """Negative: no token could be chosen."""
    candidates: list[int]
    """The likeliest tokens at the last stage, then those of the model; with the one that was chosen
    and the draft."""
    stages: list[Stage]
    uniform: float | None
    """The number in [0, 1) that drew the token; None: the likeliest was taken."""
    draft_id: int | None = None
    """The draft that this sample verifies, if there is one: it stands if it is the same token."""
    counts: bool = True
    """False behind a rejected draft: the sample follows a token that is not there."""


@dataclass(slots=True)
class RowStory:
    """One sequence's part of a step."""

    sequence: int
    table_idx: int
    kind: str
    """"prefill" or "decode"."""
    why: str
    start: int
    """Position of the first token that it computes."""
    num_tokens: int
    """How many it computes, without drafts."""
    num_missing: int
    """How many were left to compute before."""
    num_cached_tokens: int | None
    """If the row is the first one after an admission: what the prefix cache had."""
    block_table: list[int]
    new_blocks: list[int]
    """The end of `block_table` that this step added; all of it but the hits after an admission."""
    slots: list[int]
    """Where the KV of each token goes, drafts included: block * block_size + place in the block."""
    token_ids: list[int] = field(default_factory=list)
    """What it computes, without drafts."""
    output: list[int] = field(default_factory=list)
    """The tokens that it gave: accepted drafts, then the sampled one."""
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True)
class Note:
    """Something about a sequence that has no row."""

    sequence: int
    text: str


@dataclass(slots=True)
class Step:
    """One step of the engine."""

    number: int
    budget: int
    """max_num_batched_tokens."""
    num_used_blocks: int
    """Of the KV pool, when the step was scheduled."""
    rows: list[RowStory]
    waiting: list[Note]
    """Sequences without a row, and why."""
    preempted: list[Note]
    ended: list[Note] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: schedule, launch, wait and process. In one process on a CPU the step is computed in
    launch."""


@dataclass(slots=True)
class SequenceStory:
    """A prompt, and what became of it."""

    number: int
    num_prompt_tokens: int
    token_ids: list[int]
    """The prompt's, and the output's once it has ended."""
    finish_reason: str | None = None


@dataclass(slots=True)
class Story:
    """What an engine did."""

    model: str
    facts: dict[str, str]
    """How the engine was set up."""
    block_size: int
    num_blocks: int
    sequences: list[SequenceStory] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    """Of each token that is named."""
