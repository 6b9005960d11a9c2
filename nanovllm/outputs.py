"""The outputs of a request, readable as nano-vllm's dictionaries and as vLLM's objects."""

import dataclasses
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model (before temperature, penalties and filters)."""

    logprob: float
    rank: int
    """Rank of the token in the whole vocabulary; 1 is the most likely."""
    decoded_token: str | None
    """The token's text, decoded alone; None with detokenize=False, and without a tokenizer."""


@dataclasses.dataclass(slots=True)
class DraftCounts:
    """Counts of speculation; all 0 without it."""

    num_drafts: int = 0
    """Number of steps of a sequence in which at least one token was proposed."""
    num_draft_tokens: int = 0
    """Number of proposed tokens."""
    num_accepted_tokens: int = 0
    """Number of proposed tokens that were right, except those after a stop token or the last token.
    """
    num_accepted_tokens_per_pos: list[int] = dataclasses.field(default_factory=list)
    """For each position in the draft, from the first: how many were accepted."""

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens from a step with a draft: the accepted ones plus one; 1 without drafts."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        positions = (self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos)
        return DraftCounts(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            [sum(pair) for pair in zip_longest(*positions, fillvalue=0)],
        )

    def add(self, num_proposed: int, num_accepted: int) -> None:
        """Count one draft of `num_proposed` tokens; an empty draft is not counted."""
        if num_proposed == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_proposed
        self.num_accepted_tokens += num_accepted
        positions = self.num_accepted_tokens_per_pos
        positions.extend([0] * (num_proposed - len(positions)))
        for position in range(num_accepted):
            positions[position] += 1


@dataclasses.dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds of time.monotonic() (None before the event), and
    counts over all its continuations.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_output_tokens: int = 0
    drafts: DraftCounts = dataclasses.field(default_factory=DraftCounts)
    """Counts of speculation over all continuations."""

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until the request was first scheduled."""
        return _difference(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return _difference(self.arrival_time, self.first_token_time)

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between output tokens after the first; None for fewer than two."""
        seconds = _difference(self.first_token_time, self.last_token_time)
        if seconds is None or self.num_output_tokens < 2:
            return None
        return seconds / (self.num_output_tokens - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A number about the engine: a count since its start, or a state now."""

    name: str
    value: float


@dataclasses.dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A count since the engine's start."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A state now."""


@dataclasses.dataclass(frozen=True, slots=True)
class Vector:
    """Counts since the engine's start, one for each position in a draft; as in vLLM."""

    name: str
    values: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram:
    """How values since the engine's start are distributed; as in vLLM."""

    name: str
    count: int
    sum: float
    buckets: dict[str, int]
    """For each upper bound, and "+Inf": how many values are not above it."""


@dataclasses.dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Output tokens `start` to `end` - 1 were sampled with the weights `version`."""

    version: int | str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a request; in a stream, its delta since the previous output, unless
    `SamplingParams.output_kind` asks for all so far.
    """

    index: int
    """Index of the continuation, from 0 to n - 1."""
    text: str
    """The decoded output, in a stream the new text. The stop string or stop token is left out
    unless include_stop_str_in_output is set.
    """
    token_ids: list[int]
    """The output tokens, in a stream the new ones; a stop token is included."""
    finish_reason: str | None
    """"stop" (end-of-sequence token, stop token or stop string), "length" (max_tokens or
    max_model_len), "abort" or "error"; None while the continuation is running.
    """
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the output, or the error's message; None for an
    end-of-sequence token and for other finish reasons.
    """
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the whole output; None unless logprobs was set."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of token_ids, log-probabilities by token id: the token's own first, then those of
    the most likely tokens. None unless logprobs was set.
    """
    weight_versions: list[WeightVersionSpan] | None = None
    """Which weights sampled which of all its tokens; several if weights came in a pause. None while
    the continuation is running.
    """
    routed_experts: Any = None
    """With enable_return_routed_experts: which experts the tokens had, those of the prompt first, a
    numpy array [tokens - 1, layers with experts, experts of a token]. The last token has none: it
    was not computed. None while the continuation is running.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput(dict[str, Any]):
    """The output of a request, with its prompt: nano-vllm's dictionary and vLLM's object in one.

    `output["text"]` and `output["token_ids"]` are `output.outputs[0].text` and
    `output.outputs[0].token_ids`. The dictionary has what JSON can hold.
    """

    request_id: int | str
    prompt: str | None
    """The prompt's text; None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """All n continuations by index; in a stream, those with a delta."""
    finished: bool
    num_cached_tokens: int
    """Number of prompt tokens whose KV came from the prefix cache."""
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, log-probabilities by token id; None for the first token, which has no
    prediction. None unless prompt_logprobs was set. A stream has them in its first output only.
    """
    weight_version: int | str = 0
    """Version of the weights that made it: 0 as loaded, then as `LLM.update_weights` says."""
    lora_request: Any = None
    """The `LoRARequest` of the request; None means the base model."""
    pooled: list[float] | None = None
    """With `PoolingParams`: what the prompt's hidden states became. The continuation is empty."""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    def __post_init__(self) -> None:
        first = self.outputs[0] if self.outputs else CompletionOutput(0, "", [], None)
        dict.__init__(
            self,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=self.num_cached_tokens,
            request_id=self.request_id,
        )

    def __ne__(self, other: object) -> bool:
        return not self == other  # a dictionary's own would compare the items alone

    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(f"{key!r}{_advice(key)}; a RequestOutput has {', '.join(self)}")

    if not TYPE_CHECKING:  # with __getattr__, a type checker would not find misspelled names

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"a RequestOutput has no attribute {name!r}{_advice(name)}")


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The output of `LLM.embed` for a prompt."""

    request_id: int | str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Number of prompt tokens whose KV came from the prefix cache."""
    finished: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts: the higher, the better they fit."""

    score: float


@dataclasses.dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The output of `LLM.score` for a pair."""

    request_id: int | str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Of both texts."""
    num_cached_tokens: int
    """Number of prompt tokens whose KV came from the prefix cache."""
    finished: bool = True


def _advice(name: str) -> str:
    """Return where a name is that each continuation has."""
    return f": use output.outputs[0].{name}" * (name in CompletionOutput.__dataclass_fields__)


def _difference(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
