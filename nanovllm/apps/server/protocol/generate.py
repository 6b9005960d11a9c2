"""Requests and answers of /inference/v1/generate, which has token ids on both sides."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from nanovllm.apps.server.protocol.common import (
    EngineRequest,
    GenerationRequest,
    StreamOptions,
    Usage,
    refused,
)
from nanovllm.apps.server.protocol.completions import TokenIds
from nanovllm.options.other_names import OtherName, other_names

_OUTER = frozenset(
    (
        *("model", "priority", "user", "stream", "stream_options", "cache_salt", "request_id"),
        *("return_token_ids", "return_tokens_as_token_ids", "truncate_prompt_tokens"),
        *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    )
)


class GenerateParams(GenerationRequest):
    """How to continue, by the names of SamplingParams. Without a value, its default counts, not the
    checkpoint's.
    """

    others: ClassVar[Mapping[str, OtherName]] = {
        **GenerationRequest.others,
        **other_names({"detokenize": (True, False), "output_kind": (0, 1, 2)}),
    }
    not_taken: ClassVar[frozenset[str]] = _OUTER

    logprobs: int | None = None
    """How many of the most likely tokens to return for each token; 0 is the token alone."""


class GenerateRequest(EngineRequest):
    """The prompt's token ids, and how to continue them."""

    others: ClassVar[Mapping[str, OtherName]] = other_names({"output_mode": ("tokens",)})

    token_ids: TokenIds
    sampling_params: GenerateParams
    request_id: str | None = Field(default=None, min_length=1, max_length=128)
    return_token_ids: bool | None = None
    """Return the prompt's, too."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=128)

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerateRequest":
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "stream_options needs stream=true")
        return self


class CandidateLogprob(BaseModel):
    """A token that could be at a position."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(CandidateLogprob):
    """The token at a position, and the most likely ones there."""

    top_logprobs: list[CandidateLogprob]


class GenerateLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens, one element a token."""

    content: list[PositionLogprobs]


class VersionSpan(BaseModel):
    """Tokens `start` to `end` - 1 of a continuation were sampled with these weights."""

    version: str
    start: int
    end: int


class GenerateChoice(BaseModel):
    """One continuation, or what is new of it."""

    index: int
    token_ids: list[int]
    logprobs: GenerateLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[VersionSpan] | None
    """None before the end."""
    routed_experts: str | None = None
    """With enable_return_routed_experts, at the end: a file in numpy's format, in base64; see
    `CompletionOutput`."""


class Generated(BaseModel):
    """An answer."""

    request_id: str
    created: Annotated[int, Field(description="Unix time in seconds.")]
    model: str
    output_mode: Literal["tokens"] = "tokens"
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: list[dict[int, Any] | None] | None
    prompt_token_ids: list[int] | None


class GeneratedChunk(BaseModel):
    """A chunk of a streamed answer."""

    request_id: str
    output_mode: Literal["tokens"] = "tokens"
    choices: list[GenerateChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
