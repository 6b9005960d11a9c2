"""What a request asks of generation: frozen, validated. Knows nothing of how it is done."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.validation import StrictKeywords, check_bool, check_float, check_int

MAX_TOKEN_ID = 2**31 - 1

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


@dataclasses.dataclass(frozen=True)
class SamplingParams(StrictKeywords):
    """How to choose the tokens of one request, and when to stop.

    vLLM's names and meanings, nano-vllm's defaults. Filters apply in vLLM's order:
    allowed_token_ids, bad_words, min_tokens, logit_bias, penalties, temperature, min_p, top_k and
    top_p.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or out of range.
    """

    error: ClassVar[type[NanoVLLMError]] = InvalidRequestError

    temperature: float = 1.0
    """Divides the logits before sampling; 0 is greedy (the most likely token, always)."""
    max_tokens: int = 64
    """Most tokens to generate."""
    ignore_eos: bool = False
    """Go on past end-of-sequence tokens until max_tokens."""
    seed: int | None = None
    """Makes a sampled request repeatable, whatever runs beside it; None takes the engine's next."""
    n: int = 1
    """Continuations to generate; the prompt is computed once."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 or -1 is all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together reach this probability."""
    min_p: float = 0.0
    """Leave out tokens less likely than this times the most likely."""
    min_tokens: int = 0
    """Do not stop before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; a string, or a list of them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, besides the model's own."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the text."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token generated before; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token for each time it was generated; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, multiplies the negative ones, of tokens in prompt or output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of tokens; a dictionary of token id to bias, cut to [-100, 100]."""
    allowed_token_ids: tuple[int, ...] | None = None
    """If given, no other token is generated."""
    bad_words: tuple[str, ...] = ()
    """Words not to generate; a string, or a list of them. As in vLLM a word is also forbidden after
    a space where it has as many tokens with it."""
    logprobs: int | None = None
    """Log-probabilities to return for each output token: its own and this many most likely."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first."""
    detokenize: bool = True
    """Return text; without it no stop strings."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        error = InvalidRequestError
        self._set("temperature", check_float(error, "temperature", self.temperature, 0.0))
        self._set("max_tokens", check_int(error, "max_tokens", self.max_tokens, 1))
        self._set("n", check_int(error, "n", self.n, 1, 16384))
        self._set("top_k", max(check_int(error, "top_k", self.top_k, -1), 0))
        self._set("top_p", check_float(error, "top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise error("top_p must be above 0 and at most 1, got 0; for greedy use temperature=0")
        self._set("min_p", check_float(error, "min_p", self.min_p, 0.0, 1.0))
        self._set("min_tokens", check_int(error, "min_tokens", self.min_tokens, 0, self.max_tokens))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, check_float(error, name, getattr(self, name), -2.0, 2.0))
        repetition = check_float(error, "repetition_penalty", self.repetition_penalty, 0.0)
        if repetition == 0.0:
            raise error("repetition_penalty must be above 0, got 0; 1 is none")
        self._set("repetition_penalty", repetition)
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "detokenize",
            "skip_special_tokens",
        ):
            check_bool(error, name, getattr(self, name))
        if self.seed is not None:
            self._set("seed", check_int(error, "seed", self.seed, 0, 2**63 - 1))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, check_int(error, name, getattr(self, name), 0, 1000))
        for name in ("stop", "bad_words"):
            self._set(name, _strings(name, getattr(self, name)))
        stops = () if self.stop_token_ids is None else self.stop_token_ids
        self._set("stop_token_ids", _token_ids("stop_token_ids", stops))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise error(
                    "allowed_token_ids is empty: no token could be generated; None allows all"
                )
            self._set("allowed_token_ids", allowed)
        self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.stop and not self.detokenize:
            raise error("stop strings need detokenize=True; use stop_token_ids without it")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise InvalidRequestError(f"{name} must be a string or a list of strings, got {value!r}")
    if "" in value:
        raise InvalidRequestError(f"{name} must not hold an empty string, got {list(value)!r}")
    return tuple(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(
        check_int(InvalidRequestError, f"{name}[{index}]", token, 0, MAX_TOKEN_ID)
        for index, token in enumerate(value)
    )


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if isinstance(value, Mapping):
        value = tuple(value.items())
    try:
        pairs = [(token, bias) for token, bias in value]
    except (TypeError, ValueError):
        raise InvalidRequestError(
            f"logit_bias must be a dictionary of token id to bias, got {value!r}"
        ) from None
    checked = []
    for token, bias in pairs:
        # JSON's keys are strings: vLLM takes them too
        token = int(token) if isinstance(token, str) and token.isdecimal() else token
        token = check_int(InvalidRequestError, "logit_bias token", token, 0, MAX_TOKEN_ID)
        number = check_float(InvalidRequestError, f"logit_bias[{token}]", bias, -float("inf"))
        checked.append((token, min(100.0, max(-100.0, number))))
    return tuple(checked)
