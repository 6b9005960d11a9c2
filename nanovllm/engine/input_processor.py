"""Prompts to requests: text and conversations become token ids, and everything is checked.

Owns the tokenizer. Knows no scheduling and no output.
"""

import dataclasses
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from functools import cached_property
from itertools import count
from typing import Any

from nanovllm.chat import templates as chat
from nanovllm.chat.template_process import TemplateProcess
from nanovllm.chat.templates import Message, RenderedChat
from nanovllm.checkpoint.kept_tokenizer import KeptTokenizer
from nanovllm.checkpoint.tokenizer import TokenBound, token_bound
from nanovllm.engine.extensions import Grammars
from nanovllm.engine.prompt import (
    Prompt,
    array_to_list,
    cache_salt,
    check_unicode,
    text_and_tokens,
)
from nanovllm.engine.request import Request
from nanovllm.errors import InvalidRequestError
from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.options.structured_outputs import StructuredOutputsParams
from nanovllm.options.validation import check_int, shown
from nanovllm.scheduler.sequence import Sequence

_SLICE_CHARS = 8
"""Characters for each token of max_model_len in the first slice of a long prompt: most texts have
fewer."""
_UNSETTLED_TOKENS = 256
"""Tokens at the end of a slice that the text behind it may change; in truth these are a few."""


class InputProcessor:
    """Makes requests out of prompts and sampling parameters.

    Args:
        tokenizer: None if the checkpoint has none; prompts are then lists of token ids.
        seed: seeds the requests that have no seed of their own.
        max_logprobs: most log-probabilities for each token; -1 is the size of the vocabulary.
        in_process: whether the model runs in this process, and can call logits processors.
        make_grammars: makes what compiles structured_outputs, when a request first has one. It
            is not called without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: KeptTokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        max_logprobs: int = -1,
        in_process: bool = True,
        make_grammars: Callable[[], Grammars] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._max_logprobs = max_logprobs
        self._in_process = in_process
        self._make_grammars = make_grammars
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        self._last_token_id = vocab_size - 1
        self._max_model_len = max_model_len
        self._seeds = random.Random(seed)
        self._seq_ids = count()
        self._template_process = TemplateProcess()

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int | None = 0,
        stream: bool = False,
        user: str | None = None,
    ) -> Request:
        """Return a checked request with its sequences; nothing is queued yet.

        Args:
            user: whose request it is, see `WaitingQueue`; None counts as a user, too.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported.
        """
        params = self.check_params(SamplingParams() if params is None else params)
        stream = stream and params.output_kind is not RequestOutputKind.FINAL_ONLY
        priority = 0 if priority is None else priority
        priority = check_int(InvalidRequestError, "priority", priority, -(2**31), 2**31)
        if not (user is None or isinstance(user, str)):
            raise InvalidRequestError(f"user must be a string or None, got {shown(user)}")
        salt = cache_salt(prompt)
        if isinstance(params.structured_outputs, StructuredOutputsParams):
            grammars = self.grammars
            assert grammars is not None  # check_params() saw to it
            grammars.compile(params.structured_outputs)
        text, token_ids = self._tokenize(prompt, params.truncate_prompt_tokens)
        bad_words = self.encode_bad_words(params.bad_words)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        # Prompt log-probabilities rule out prefix hits, so only the first sequence computes them.
        others = dataclasses.replace(params, prompt_logprobs=None)
        sequences = [
            Sequence(
                next(self._seq_ids),
                token_ids,
                others if index else params,
                seed=(seed + index) % 2**63,
                priority=priority,
                bad_words=bad_words,
                user=user or "",
                cache_salt=salt,
            )
            for index in range(params.n)
        ]
        return Request(text, params, sequences, stream=stream)

    @property
    def grammars(self) -> Grammars | None:
        """What compiles structured_outputs; None if there is no tokenizer."""
        with self._grammars_lock:
            if self._grammars is None and self.tokenizer is not None and self._make_grammars:
                self._grammars = self._make_grammars()
            return self._grammars

    def encode(self, prompt: str) -> list[int]:
        """Return the prompt's token ids.

        Raises:
            InvalidRequestError: the checkpoint has no tokenizer, or the text is not valid Unicode.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this engine has no tokenizer, so prompts must be lists of token ids, not text"
            )
        is_chat = isinstance(prompt, RenderedChat)
        check_unicode("the conversation" if is_chat else "the prompt", prompt)
        return self._encode(self.tokenizer, prompt, add_special_tokens=not is_chat)

    def render(self, messages: Seq[Message], options: Mapping[str, Any]) -> RenderedChat:
        """Return the text of a conversation, rendered by the chat template.

        Args:
            options: chat_template, tools, add_generation_prompt, continue_final_message, and
                further variables of the template.

        Raises:
            InvalidRequestError: there is no chat template, or it cannot render the messages.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer, so there is no chat template")
        return chat.render(self.tokenizer, self._template_process, messages, options)

    def shutdown(self) -> None:
        """End the process that renders chat templates. It is started again when needed."""
        self._template_process.shutdown()

    def encode_bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences to forbid for `words`.

        As in vLLM, each word is encoded as it stands and after a space; the second form counts if
        it has as many tokens as the first.

        Raises:
            InvalidRequestError: the checkpoint has no tokenizer, or a word is not valid Unicode.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            if self.tokenizer is None:
                raise InvalidRequestError(
                    "this engine has no tokenizer, so bad_words cannot be used"
                )
            check_unicode("a word of bad_words", word)
            self.check_length("a word of bad_words", word)
            bare = word.lstrip() or word  # a word of white space only stays as it is
            plain = tuple(self._encode(self.tokenizer, bare, add_special_tokens=False))
            spaced = tuple(self._encode(self.tokenizer, " " + bare, add_special_tokens=False))
            found += [plain] if plain else []
            if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        return tuple(found)

    def _encode(self, tokenizer: KeptTokenizer, text: str, **options: Any) -> list[int]:
        """Return the text's token ids: all of them are tokens of the model."""
        token_ids: list[int] = tokenizer.encode(text, **options)
        if max(token_ids, default=0) > self._last_token_id:
            raise InvalidRequestError(
                f"the checkpoint's tokenizer made token {max(token_ids)} of the text; this model's "
                f"last is {self._last_token_id}: the tokenizer is another model's"
            )
        return token_ids

    def check_params(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the size of the vocabulary for a logprobs of -1. Compiles nothing.

        Raises:
            InvalidRequestError: this checkpoint or engine does not support a parameter.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                "sampling_params must be SamplingParams, "
                f"got {type(params).__name__} {shown(params)}"
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                "this engine has no tokenizer, so stop cannot be used; use stop_token_ids"
            )
        if params.logits_processors and not self._in_process:
            raise InvalidRequestError(
                "logits_processors run in this process, so tensor_parallel_size must be 1; "
                "use logit_bias, allowed_token_ids or bad_words"
            )
        for stop in params.stop:
            check_unicode("a stop string", stop)
        if self.tokenizer is None and params.structured_outputs is not None:
            raise InvalidRequestError(
                "this engine has no tokenizer, so structured_outputs cannot be used"
            )
        last = self._last_token_id
        for name, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", [token for token, _ in params.logit_bias]),
        ):
            if max(token_ids, default=0) > last:
                raise InvalidRequestError(
                    f"{name} holds token {max(token_ids)}; this model's last is {last}"
                )
        return self._bound_logprobs(params)

    def _bound_logprobs(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with the size of the vocabulary for a logprobs of -1.

        Raises:
            InvalidRequestError: more are requested than max_logprobs.
        """
        vocab_size = self._last_token_id + 1
        limit = vocab_size if self._max_logprobs == -1 else self._max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            given = getattr(params, name)
            count = vocab_size if given == -1 else given
            if count is not None and count > limit:
                raise InvalidRequestError(
                    f"{name} {given} asks for {count} of each token; this engine's max_logprobs "
                    f"is {limit}: make the LLM with a larger one, or with -1 for all"
                )
            if given == -1:
                params = params.clone(**{name: count})
        return params

    def _tokenize(self, prompt: Prompt, kept: int | None) -> tuple[str | None, list[int]]:
        """Return (text, token ids) of a prompt; the text is None if only token ids were given.

        Args:
            kept: truncate_prompt_tokens.
        """
        text = None
        if isinstance(prompt, Mapping):
            text, prompt = text_and_tokens(prompt)
        if isinstance(prompt, str):
            if kept is None:
                self.check_length("the prompt", prompt)
                self._check_slices(prompt)
            text, prompt = str(prompt), self.encode(prompt)
        prompt = array_to_list(prompt)
        if not isinstance(prompt, Seq) or isinstance(prompt, bytes):
            raise InvalidRequestError(
                "a prompt must be a string or a list of token ids, "
                f"got {type(prompt).__name__} {shown(prompt)}"
            )
        if not prompt:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        limit, last = self._max_model_len, self._last_token_id
        if kept is not None:
            prompt = prompt[-(limit - 1 if kept == -1 else kept) :]
        if len(prompt) >= limit:
            raise self._too_long(str(len(prompt)))
        return text, [
            token
            if type(token) is int and 0 <= token <= last
            else check_int(InvalidRequestError, f"prompt token {index}", token, 0, last)
            for index, token in enumerate(prompt)
        ]

    def _check_slices(self, prompt: str) -> None:
        """Raise InvalidRequestError if the first part of a long text has too many tokens.

        So a prompt that is too long costs about what the longest that fits costs.
        """
        size = _SLICE_CHARS * self._max_model_len
        while size < len(prompt):
            num_tokens = len(self.encode(type(prompt)(prompt[:size]))) - _UNSETTLED_TOKENS
            if num_tokens >= self._max_model_len:
                raise self._too_long(f"more than {num_tokens}")
            size *= 2

    def _too_long(self, num_tokens: str) -> InvalidRequestError:
        limit = self._max_model_len
        return InvalidRequestError(
            f"the prompt has {num_tokens} tokens; max_model_len {limit} leaves "
            f"room for {limit - 1} at most, and one of output: shorten it, or raise the limit"
        )

    def check_length(self, what: str, *texts: str) -> None:
        """Raise InvalidRequestError if texts are surely too long: tokenizing them takes seconds."""
        limit, bound = self._max_model_len, self.length_bound
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
    def length_bound(self) -> TokenBound | None:
        """What a text's length says of its tokens. The first call takes a microsecond a token of
        the vocabulary.
        """
        return None if self.tokenizer is None else token_bound(self.tokenizer)
