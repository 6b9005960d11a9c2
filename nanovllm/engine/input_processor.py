"""Prompts to requests: text and conversations become token ids, and everything is checked.

Owns the tokenizer. Knows no scheduling and no output.
"""

import dataclasses
import logging
import random
from collections.abc import Iterable, Mapping, Sequence as Seq
from itertools import count
from typing import TYPE_CHECKING, Any

from nanovllm.engine.request import Request
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.scheduler.sequence import Sequence
from nanovllm.utils.hub import Checkpoint, check_tokenizer_files
from nanovllm.validation import check_int

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Prompt = str | Seq[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's {"prompt": text} or {"prompt_token_ids": ids}."""

Message = Mapping[str, Any]
"""One message of a conversation, such as {"role": "user", "content": "Hello!"}."""


class InputProcessor:
    """Makes requests out of prompts and sampling parameters.

    Args:
        tokenizer: None if the checkpoint has none; prompts are then lists of token ids.
        seed: seeds the requests that have no seed of their own.
        max_logprobs: most log-probabilities for each token; -1 is the size of the vocabulary.
        in_process: whether the model runs in this process, and can call logits processors.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        *,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        max_logprobs: int = -1,
        in_process: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._max_logprobs = max_logprobs
        self._in_process = in_process
        self._last_token_id = vocab_size - 1
        self._max_model_len = max_model_len
        self._seeds = random.Random(seed)
        self._seq_ids = count()

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = False,
    ) -> Request:
        """Return a checked request with its sequences; nothing is queued yet.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported.
        """
        params = SamplingParams() if params is None else params
        self._check_params(params)
        params = self._bound_logprobs(params)
        stream = stream and params.output_kind is not RequestOutputKind.FINAL_ONLY
        priority = check_int(InvalidRequestError, "priority", priority, -(2**31), 2**31)
        text, token_ids = self._tokenize(prompt)
        limit = self._max_model_len
        if params.truncate_prompt_tokens is not None:
            kept = params.truncate_prompt_tokens
            token_ids = token_ids[-(limit - 1 if kept == -1 else kept) :]
        if len(token_ids) >= limit:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len {limit} leaves "
                f"room for {limit - 1} at most, and one of output: shorten it, or raise the limit"
            )
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
            )
            for index in range(params.n)
        ]
        return Request(text, params, sequences, stream=stream)

    def encode(self, prompt: str) -> list[int]:
        """Return the prompt's token ids.

        Raises:
            InvalidRequestError: the checkpoint has no tokenizer, or the text is not valid Unicode.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this engine has no tokenizer, so prompts must be lists of token ids, not text"
            )
        _check_unicode("the prompt", prompt)
        return self._encode(self.tokenizer, prompt)

    def render(self, messages: Seq[Message], **options: Any) -> list[int]:
        """Return the token ids of a conversation, rendered by the chat template.

        Args:
            options: arguments of transformers' apply_chat_template.

        Raises:
            InvalidRequestError: there is no chat template, or it cannot render the messages.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer, so there is no chat template")
        is_list = isinstance(messages, Seq) and bool(messages)
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequestError(
                f'a conversation is a list of {{"role": ..., "content": ...}}, got {messages!r:.80}'
            )
        try:
            token_ids: list[int] = self.tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=False, **options
            )
        except Exception as error:  # a template may raise any exception
            raise InvalidRequestError(f"the chat template cannot render this: {error}") from error
        return token_ids

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
            _check_unicode("a word of bad_words", word)
            bare = word.lstrip() or word  # a word of white space only stays as it is
            plain = tuple(self._encode(self.tokenizer, bare, add_special_tokens=False))
            spaced = tuple(self._encode(self.tokenizer, " " + bare, add_special_tokens=False))
            found += [plain] if plain else []
            if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                found.append(spaced)
        return tuple(found)

    def _encode(self, tokenizer: "PreTrainedTokenizerBase", text: str, **options: Any) -> list[int]:
        """Return the text's token ids: all of them are tokens of the model."""
        token_ids: list[int] = tokenizer.encode(text, **options)
        if max(token_ids, default=0) > self._last_token_id:
            raise InvalidRequestError(
                f"the checkpoint's tokenizer made token {max(token_ids)} of the text; this model's "
                f"last is {self._last_token_id}: the tokenizer is another model's"
            )
        return token_ids

    def _check_params(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError for parameters that this checkpoint does not support."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__} {params!r}"
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

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return (text, token ids) of a prompt; the text is None if token ids were given."""
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
                raise InvalidRequestError(
                    f'a prompt dictionary has one key, "prompt" or "prompt_token_ids", '
                    f"got {list(prompt)}"
                )
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            token_ids = self.encode(prompt)
            if not token_ids:
                raise InvalidRequestError("the prompt is empty: give at least one token")
            return prompt, token_ids
        if not isinstance(prompt, Seq) or isinstance(prompt, bytes):
            raise InvalidRequestError(
                "a prompt must be a string or a list of token ids, "
                f"got {type(prompt).__name__} {prompt!r:.80}"
            )
        if not prompt:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        last = self._last_token_id
        return None, [
            token
            if type(token) is int and 0 <= token <= last
            else check_int(InvalidRequestError, f"prompt token {index}", token, 0, last)
            for index, token in enumerate(prompt)
        ]


def chat_template_options(
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None,
    chat_template: str | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the options of `InputProcessor.render` for the arguments of `chat`.

    An entry of `chat_template_kwargs` replaces the argument of the same name.
    """
    return {
        "add_generation_prompt": add_generation_prompt,
        "tools": tools,
        "chat_template": chat_template,
        **(chat_template_kwargs or {}),
    }


def _check_unicode(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{what} is not valid Unicode text: {error}") from error


def load_tokenizer(checkpoint: Checkpoint) -> "PreTrainedTokenizerBase | None":
    """Return the checkpoint's tokenizer, None if it has none; run no code of the checkpoint.

    Raises:
        CheckpointError: a file is invalid, or there is no fast tokenizer of a known class.
    """
    if not checkpoint.has_tokenizer:
        logger.warning("%s: no tokenizer, so prompts must be token ids", checkpoint.path)
        return None
    check_tokenizer_files(checkpoint)
    from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

    # transformers would allocate what config.json asks for: give it the type's defaults instead.
    is_qwen3 = checkpoint.config.get("model_type") == "qwen3"
    config = AutoConfig.for_model("qwen3") if is_qwen3 else PretrainedConfig()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            checkpoint.tokenizer_path, config=config, trust_remote_code=False
        )
        tokenizer.decode(tokenizer.encode("a b"))  # raises for a wrong model_max_length and such
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # many kinds; a panic of tokenizers is no Exception
        raise CheckpointError(
            f"cannot load the tokenizer in {checkpoint.tokenizer_path}: tokenizer.json, "
            f"tokenizer_config.json or special_tokens_map.json is invalid: {error!s:.300}"
        ) from error
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"the tokenizer in {checkpoint.tokenizer_path} has no tokenizer.json; "
            "save it as a fast tokenizer"
        )
    found: PreTrainedTokenizerBase = tokenizer
    return found
