"""What a request gives back. Reads like nano-vllm's dictionaries and like vLLM's objects."""

import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model (before temperature, penalties and filters)."""

    logprob: float
    rank: int
    """Among the whole vocabulary; 1 is the most likely."""
    decoded_token: str


@dataclasses.dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened, in seconds of time.monotonic(); None for what has not."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_output_tokens: int = 0
    """Over all continuations."""

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until it was first scheduled."""
        return _difference(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return _difference(self.arrival_time, self.first_token_time)

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between output tokens after the first; None for fewer than two."""
        seconds = _difference(self.first_token_time, self.last_token_time)
        return (
            None
            if seconds is None or self.num_output_tokens < 2
            else (seconds / (self.num_output_tokens - 1))
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated continuation."""

    index: int
    """Which of the request's n continuations this is."""
    text: str
    """The decoded output, or in a stream the new piece of it; without stop strings and tokens
    unless include_stop_str_in_output.
    """
    token_ids: list[int]
    """The output tokens, or in a stream the new ones; a stop token is included."""
    finish_reason: str | None
    """"stop" (end of sequence, stop token or string), "length" (max_tokens or max_model_len),
    "abort"; None while running.
    """
    stop_reason: int | str | None = None
    """The stop token id or string; None if it was an end-of-sequence id, or nothing."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the whole output, if logprobs were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of token_ids: its own log-probability first, then the most likely tokens'."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request with its prompt and what was generated.

    `output["text"]` and `output["token_ids"]` (nano-vllm) read the first continuation, as do
    `output.outputs[0].text` and `output.outputs[0].token_ids` (vLLM).
    """

    request_id: int
    prompt: str | None
    """The prompt's text; None where it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """All n continuations, by index; in a stream those that went on."""
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, if asked for; None for the first, which nothing predicts. In a stream
    they come once, with the first output.
    """

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    def keys(self) -> tuple[str, ...]:
        return _KEYS

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __getitem__(self, key: str) -> Any:
        if key not in _KEYS:
            raise KeyError(f"{key!r}; a RequestOutput has {', '.join(_KEYS)}")
        return getattr(self, key)


_KEYS = (
    "text",
    "token_ids",
    "finish_reason",
    "prompt",
    "prompt_token_ids",
    "num_cached_tokens",
    "request_id",
)


def _difference(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
