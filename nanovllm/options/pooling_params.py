"""`PoolingParams`: what a request wants of the hidden states of its prompt, instead of tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from nanovllm.errors import InvalidRequestError
from nanovllm.options.sampling_params import MAX_TOKEN_ID
from nanovllm.options.validation import (
    Error,
    check_bool,
    check_choice,
    check_int,
    checked_dataclass,
    plain_text,
    shown,
)

POOLINGS = ("last", "mean", "cls")
_MAX_SIZE = 2**20
_MOST = 1024


def _pooling(error: Error, name: str, value: Any) -> str:
    return check_choice(error, name, value.lower() if isinstance(value, str) else value, POOLINGS)


def _name(error: Error, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise error(f"{name} must be a string, got {shown(value)}")
    return plain_text(value)


def _token_ids(error: Error, name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) > _MOST:
        raise error(f"{name} must be a list of at most {_MOST} token ids, got {shown(value)}")
    return tuple(
        check_int(error, f"{name}[{index}]", token, 0, MAX_TOKEN_ID)
        for index, token in enumerate(value)
    )


@checked_dataclass(InvalidRequestError)
class PoolingParams:
    """How the hidden states of a prompt's tokens become one vector.

    None means what the checkpoint says, by the files of sentence-transformers; without these it is
    the last token's state, normalised.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or out of range.
    """

    pooling: Annotated[str | None, _pooling] = None
    """Whose hidden states count: "last" is the last token's, "cls" the first one's, "mean" the mean
    over all tokens."""
    normalize: Annotated[bool | None, check_bool] = None
    """Divide the vector by its length, so that a product of two is their cosine."""
    dimensions: Annotated[int | None, check_int, 1, _MAX_SIZE] = None
    """Keep only so many numbers at the beginning of the vector, before it is normalised (Matryoshka
    embeddings); None keeps all."""
    prompt_name: Annotated[str | None, _name] = None
    """Which of the checkpoint's prompts to write before a text, such as "query"; "" is none. None
    is the checkpoint's default, if it has one."""
    truncate_prompt_tokens: Annotated[int | None, check_int, -1, _MAX_SIZE] = None
    """Keep only so many tokens at the beginning of a prompt, with those that the tokenizer puts at
    its end; -1 keeps as many as fit. None is an error for a prompt that is too long."""
    token_ids: Annotated[Sequence[int], _token_ids] = ()
    """The logits of these tokens after the prompt take the vector's place: rerankers set it."""

    def __post_init__(self) -> None:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens must be above 0, or -1 for max_model_len, got 0"
            )

    def clone(self, **changes: Any) -> "PoolingParams":
        """Return a copy with `changes`, which are checked. Parameters themselves never change."""
        return dataclasses.replace(self, **changes)

    @property
    def reads_all(self) -> bool:
        """Whether tokens before the last one count, too: a prefix hit would leave them out."""
        return self.pooling in ("mean", "cls")
