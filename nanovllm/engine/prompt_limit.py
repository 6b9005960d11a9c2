"""How long a prompt may be, told from its text where that is possible; and what its tokens may be.

Knows no requests.
"""

import dataclasses
from collections.abc import Callable, Sequence as Seq
from functools import cached_property
from typing import Any

from nanovllm.checkpoint.text_tokenizer import TextTokenizer
from nanovllm.checkpoint.tokenizer import TokenBound, token_bound
from nanovllm.errors import InvalidRequestError
from nanovllm.options.validation import check_int

_SLICE_CHARS = 8
"""Characters for each token of max_model_len in the first slice of a long prompt: most texts have
fewer."""
_UNSETTLED_TOKENS = 256
"""Tokens at the end of a slice that the text behind it may change; in truth these are a few."""


@dataclasses.dataclass(eq=False)
class PromptLimit:
    """The limit of max_model_len: a prompt has fewer tokens, as one of output must fit."""

    tokenizer: TextTokenizer | None
    max_model_len: int
    last: int  # the model's last token

    def check_length(self, text: str, encode: Callable[[str], list[int]]) -> None:
        """Raise InvalidRequestError if a prompt's text is surely too long, or its first part is.

        So a prompt that is too long costs about what the longest that fits costs.
        """
        self.check_text("the prompt", text)
        size = _SLICE_CHARS * self.max_model_len
        while size < len(text):
            num_tokens = len(encode(text[:size])) - _UNSETTLED_TOKENS
            if num_tokens >= self.max_model_len:
                raise self.exceeded(f"more than {num_tokens}")
            size *= 2

    def exceeded(self, num_tokens: str) -> InvalidRequestError:
        """Return the error for a prompt of so many tokens."""
        limit = self.max_model_len
        return InvalidRequestError(
            f"the prompt has {num_tokens} tokens; max_model_len {limit} leaves "
            f"room for {limit - 1} at most, and one of output: shorten it, or raise the limit"
        )

    def check_made_tokens(self, token_ids: list[int]) -> None:
        """Raise InvalidRequestError if a tokenizer made a token that the model lacks."""
        if max(token_ids, default=0) > self.last:
            raise InvalidRequestError(
                f"the checkpoint's tokenizer made token {max(token_ids)} of the text; this model's "
                f"last is {self.last}: the tokenizer is another model's"
            )

    def checked_tokens(self, token_ids: Seq[Any], kept: int | None) -> list[int]:
        """Return the token ids of a prompt, all of them tokens of the model.

        Args:
            kept: truncate_prompt_tokens.

        Raises:
            InvalidRequestError: there are none or too many, or one is no token.
        """
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        limit, last = self.max_model_len, self.last
        if kept is not None:
            token_ids = token_ids[-(limit - 1 if kept == -1 else kept) :]
        if len(token_ids) >= limit:
            raise self.exceeded(str(len(token_ids)))
        return [
            token
            if type(token) is int and 0 <= token <= last
            else check_int(InvalidRequestError, f"prompt token {index}", token, 0, last)
            for index, token in enumerate(token_ids)
        ]

    def check_text(self, what: str, *texts: str) -> None:
        """Raise InvalidRequestError if texts are surely too long: tokenizing them takes seconds."""
        limit, bound = self.max_model_len, self.bound
        num_chars = sum(map(len, texts))
        if num_chars <= limit or bound is None or num_chars <= (limit - 1) * bound.chars_per_token:
            return
        if bound.least_tokens(texts) > limit - 1:
            raise InvalidRequestError(
                f"{what} has {num_chars} characters, and no token has more than "
                f"{bound.chars_per_token:g}: it cannot fit into max_model_len {limit}; shorten it, "
                "or raise the limit"
            )

    @cached_property
    def bound(self) -> TokenBound | None:
        """What a text's length says of its tokens. The first call takes a microsecond a token of
        the vocabulary.
        """
        return None if self.tokenizer is None else token_bound(self.tokenizer)
