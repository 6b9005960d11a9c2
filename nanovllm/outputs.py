"""What a request gives back. Reads like nano-vllm's dictionaries and like vLLM's objects."""

import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated continuation."""

    index: int
    """Which of the request's continuations this is."""
    text: str
    """The decoded output; special tokens are left out."""
    token_ids: list[int]
    """The output tokens, an end-of-sequence token included."""
    finish_reason: str | None
    """"stop" (end of sequence), "length" (max_tokens or max_model_len), "abort"; None while
    running.
    """


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
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""

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
