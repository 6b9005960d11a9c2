"""Requests of /v1/completions."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from nanovllm.apps.server.protocol.common import STRING_OR_LIST, GenerationRequest, refused

MAX_PROMPTS = 4096
"""In one request."""

TokenIds = Annotated[list[int], Field(fail_fast=True, min_length=1)]


def _kind(value: Any) -> str | None:
    """Return which of the four forms a prompt has, by its first element; None if it has none."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        return "texts"
    if isinstance(first, list):
        return "token_id_lists"
    if isinstance(value, list):
        return "token_ids"
    return "text" if isinstance(value, str) else None


_Many = Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)
Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], _Many, Tag("texts")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[list[TokenIds], _Many, Tag("token_id_lists")],
    Discriminator(_kind, custom_error_type="kind", custom_error_message=STRING_OR_LIST),
]


class CompletionRequest(GenerationRequest):
    """What to continue, and how."""

    prompt: Prompts
    """A text, a list of texts, token ids, or a list of such lists."""
    echo: bool | None = None
    """Begin the answer with the prompt; with logprobs, its log-probabilities too."""
    logprobs: int | None = None
    """How many of the most likely tokens to return for each token."""
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_unsupported(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n or 1):
            raise refused("best_of", f"best_of={self.best_of} is not supported: use n")
        if self.suffix:
            raise refused("suffix", "suffix is not supported: the models continue a text only")
        return self
