"""What an engine accepts: parameters that it supports, prompts that fit, tokens that exist.

A prompt's length is told from its text where that is possible. No grammar is compiled here.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence as Seq
from functools import cached_property
from typing import Any

from nanovllm.errors import InvalidRequestError, PromptTooLongError
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.loading.tokenizer import TokenBound, token_bound
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import as_class, check_int, did_you_mean, shown

_SLICE_CHARS = 8  # for each token of max_model_len in the first slice: most texts have fewer
_UNSETTLED_TOKENS = 256  # at the end of a slice: more than the text after it may change


def check_unicode(what: str, text: str) -> None:
    """Raise InvalidRequestError if a text has half a surrogate pair, which nothing can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{what} is not valid Unicode text: {error}") from error


def check_names(request_id: str | None, user: str | None) -> None:
    """Check the names that a caller gives to a request and to its user.

    Raises:
        InvalidRequestError: one is not a string.
    """
    if not (user is None or isinstance(user, str)):
        raise InvalidRequestError(f"user must be a string or None, got {shown(user)}")
    if not (request_id is None or isinstance(request_id, str)):
        raise InvalidRequestError(
            f"request_id must be a string, got {shown(request_id)} ({type(request_id).__name__})"
        )


def check_priority(priority: int | None) -> int:
    """Return a request's priority; None is 0.

    Raises:
        InvalidRequestError: it is not a 32-bit integer.
    """
    priority = 0 if priority is None else priority
    return check_int(InvalidRequestError, "priority", priority, -(2**31), 2**31)


def no_adapters(lora_request: object) -> None:
    """Raise InvalidRequestError if a request names an adapter: the engine takes none."""
    if lora_request is not None:
        raise InvalidRequestError(
            f"lora_request={shown(lora_request)} needs an engine that takes adapters: make it with "
            "enable_lora=True"
        )


@dataclasses.dataclass
class ParamsCheck:
    """Checks sampling parameters against the model and the options of an engine."""

    has_tokenizer: bool  # whether the engine knows text
    vocab_size: int
    max_logprobs: int = -1  # for each token; -1 is the size of the vocabulary
    in_process: bool = True  # whether the model runs here, and can call logits processors
    # `LogitsRule.check` of the user's rules, by name.
    rules: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)

    def check(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the size of the vocabulary for a logprobs of -1.

        Raises:
            InvalidRequestError: this checkpoint or engine does not support a parameter.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                "sampling_params must be SamplingParams, "
                f"got {type(params).__name__} {shown(params)}"
            )
        params = as_class(params, SamplingParams)  # the ranks may not know another
        if params.stop and not self.has_tokenizer:
            raise InvalidRequestError(
                "this engine has no tokenizer, so stop cannot be used; use stop_token_ids"
            )
        if params.logits_processors and not self.in_process:
            raise InvalidRequestError(
                "logits_processors run in this process, so tensor_parallel_size must be 1, "
                "without Ray; use logit_bias, allowed_token_ids or bad_words"
            )
        if params.extra_args or params.logit_bias:  # the caller can change his dictionaries
            given = params.extra_args or {}
            checked = {name: self._extra_arg(name, value) for name, value in given.items()}
            params = params.clone(extra_args=checked or None)
        for stop in params.stop:
            check_unicode("a stop string", stop)
        if not self.has_tokenizer and params.structured_outputs is not None:
            raise InvalidRequestError(
                "this engine has no tokenizer, so structured_outputs cannot be used"
            )
        last = self.vocab_size - 1
        for name, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", params.logit_bias or ()),
        ):
            if max(token_ids, default=0) > last:
                raise InvalidRequestError(
                    f"{name} holds token {max(token_ids)}; this model's last is {last}"
                )
        if params.logprobs is None and params.prompt_logprobs is None:
            return params
        return self._bound_logprobs(params)

    def _extra_arg(self, name: str, value: Any) -> Any:
        """Return a value of extra_args as its rule takes it."""
        if name not in self.rules:
            hint = did_you_mean(name, self.rules)
            if not self.rules:
                hint = ", which was made without: give it the option logits_rules"
            raise InvalidRequestError(
                f"extra_args names {shown(name)}, which is no logits rule of this engine{hint}"
            )
        try:
            return self.rules[name](value)
        except Exception as error:
            reason = f"{error}" if isinstance(error, ValueError) else repr(error)
            raise InvalidRequestError(f"extra_args: {name} {shown(value)}: {reason}") from error

    def _bound_logprobs(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the size of the vocabulary for a logprobs of -1."""
        limit = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            given = getattr(params, name)
            count = self.vocab_size if given == -1 else given
            if count is not None and count > limit:
                raise InvalidRequestError(
                    f"{name} {given} asks for {count} of each token; this engine's max_logprobs "
                    f"is {limit}: make the LLM with a larger one, or with -1 for all"
                )
            if given == -1:
                params = params.clone(**{name: count})
        return params


@dataclasses.dataclass(eq=False)
class PromptLimit:
    """The limit of max_model_len: a prompt has fewer tokens, as one of output must fit."""

    tokenizer: TextTokenizer | None
    max_model_len: int
    last: int  # the model's last token
    generates: bool = True  # else there is no output

    @property
    def most(self) -> int:
        """The most tokens of a prompt."""
        return self.max_model_len - self.generates

    def check_length(self, text: str, encode: Callable[[str], list[int]]) -> None:
        """Raise InvalidRequestError if a prompt's text is surely too long, or its first part is.

        Rejecting an over-long prompt costs no more than tokenizing the longest valid one.
        """
        self.check_text("the prompt", text)
        size = _SLICE_CHARS * self.max_model_len
        while size < len(text):
            num_tokens = len(encode(text[:size])) - _UNSETTLED_TOKENS
            if num_tokens > self.most:
                raise self.exceeded(f"more than {num_tokens}")
            size *= 2

    def exceeded(self, num_tokens: str) -> PromptTooLongError:
        """Return the error for so many tokens. On "prompt is too long" clients shorten a chat."""
        room = f"allows {self.most} prompt tokens plus one output token" * self.generates
        return PromptTooLongError(
            f"the prompt is too long: {num_tokens} tokens; max_model_len {self.max_model_len} "
            f"{room or 'is the most'}: shorten it, cut it by truncate_prompt_tokens=-1, or raise "
            "the limit"
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
            InvalidRequestError: there are none or too many, or one is not a token.
        """
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        last = self.last
        if kept is not None:
            token_ids = token_ids[-(self.most if kept == -1 else kept) :]
        if len(token_ids) > self.most:
            raise self.exceeded(str(len(token_ids)))
        return [
            token
            if type(token) is int and 0 <= token <= last
            else check_int(InvalidRequestError, f"prompt token {index}", token, 0, last)
            for index, token in enumerate(token_ids)
        ]

    def check_text(self, what: str, *texts: str) -> None:
        """Raise PromptTooLongError if texts are surely too long: tokenizing them takes seconds."""
        limit = self.max_model_len
        num_chars = sum(map(len, texts))
        if num_chars <= limit:
            return
        bound = self.bound
        if bound is None or num_chars <= self.most * bound.chars_per_token:
            return
        if bound.least_tokens(texts) > self.most:
            raise PromptTooLongError(
                f"{what} is too long: {num_chars} characters, and no token has more than "
                f"{bound.chars_per_token:g}: it cannot fit into max_model_len {limit}; shorten it, "
                "cut it by truncate_prompt_tokens=-1, or raise the limit"
            )

    @cached_property
    def bound(self) -> TokenBound | None:
        """What a text's length says of its tokens; made in a microsecond a token."""
        return None if self.tokenizer is None else token_bound(self.tokenizer)
