"""Sampling parameters of a request: validated when made, never changed afterwards.

Knows nothing of models and sampling code.
"""

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.options.structured_outputs import StructuredOutputsParams, structured_outputs
from nanovllm.options.validation import check_bool, check_float, check_int, shown, strict_keywords

MAX_TOKEN_ID = 2**31 - 1

MAX_TOKENS = 2**31 - 1
"""The largest max_tokens."""
GREEDY_BELOW = 1e-5
"""Lower temperatures sample greedily: dividing the logits by them would overflow."""


LogitsProcessor = Callable[..., Any]
"""f(output_token_ids, logits) or f(prompt_token_ids, output_token_ids, logits), which returns the
logits to sample from: a tensor [vocab_size], such as `logits` itself after a change in place."""


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """What is new since the previous output."""
    FINAL_ONLY = 2
    """Everything, in one output at the end."""

    __repr__ = enum.Enum.__str__


@strict_keywords(InvalidRequestError)
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop.

    Names and meanings are vLLM's, defaults are nano-vllm's. Logits are processed in vLLM's order:
    logits_processors, structured_outputs, allowed_token_ids, bad_words, min_tokens, logit_bias,
    penalties, temperature, min_p, top_k, top_p.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or out of range.
    """

    temperature: float = 1.0
    """Randomness of the sampling: the logits are divided by it. 0 is greedy sampling, which always
    takes the most likely token."""
    max_tokens: int = 64
    """Maximum number of tokens to generate."""
    ignore_eos: bool = False
    """Ignore end-of-sequence tokens and continue until max_tokens."""
    seed: int | None = None
    """Random seed of the request. A seeded request gives the same tokens whatever other requests
    run; None takes the next seed of the engine."""
    n: int = 1
    """Number of continuations to generate; the prompt is computed once."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 or -1 is all tokens."""
    top_p: float = 1.0
    """Cumulative probability of the most likely tokens to sample from; 1 is all tokens."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to the most likely token's; 0 disables it."""
    min_tokens: int = 0
    """Minimum number of tokens to generate before the output may stop."""
    stop: tuple[str, ...] = ()
    """A string that ends the output, or several."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids of tokens that end the output, such as [7, 8], besides the model's end-of-sequence
    tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the text."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output so far; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each of its occurrences in the output; -2 to 2."""
    repetition_penalty: float = 1.0
    """For tokens in prompt or output: divides positive logits and multiplies negative ones."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Numbers to add to the logits of tokens, by token id, such as {"7": -5}; clamped to
    [-100, 100]."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Ids of the tokens that may be generated, such as [7, 8]; None is all tokens."""
    bad_words: tuple[str, ...] = ()
    """A string that is not generated, or several. As in vLLM, the word with a space before it is
    forbidden too, if that takes as many tokens as the word alone."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Functions that change the logits before each token, called as f(output token ids, logits) or
    f(prompt token ids, output token ids, logits); not with tensor_parallel_size above 1."""
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    """The form of the output, such as {"json": {...}} with a JSON schema, {"regex": "..."},
    {"choice": ["yes", "no"]}, {"grammar": "..."} or {"json_object": true}. None is any text."""
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities to return for each output token, besides
    the output token's own; -1 is the whole vocabulary. None is no log-probabilities."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities to return for each prompt token except
    the first, besides the prompt token's own; -1 is the whole vocabulary. None is no
    log-probabilities."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the prompt; -1 keeps as many as max_model_len has
    room for. None is to refuse a prompt that is too long."""
    detokenize: bool = True
    """Return text. Stop strings need it."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    kept_token_ids: tuple[int, ...] = ()
    """Special tokens that skip_special_tokens leaves in the text, such as tags of tool calls."""
    spaces_between_special_tokens: bool = True
    """Keep the spaces that some tokenizers write between special tokens."""
    output_kind: RequestOutputKind | None = None
    """What each output of a stream holds: RequestOutputKind.DELTA is the new part, CUMULATIVE all
    so far, FINAL_ONLY one output at the end. None is DELTA for stream, and CUMULATIVE for the names
    of vLLM's: an iterated AsyncLLM.generate and LLMEngine. generate and chat return whole
    outputs."""

    def __post_init__(self) -> None:
        error = InvalidRequestError
        self._set("temperature", check_float(error, "temperature", self.temperature, 0.0))
        self._set("max_tokens", check_int(error, "max_tokens", self.max_tokens, 1, MAX_TOKENS))
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
            raise error("repetition_penalty must be above 0, got 0; 1 disables it")
        self._set("repetition_penalty", repetition)
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            check_bool(error, name, getattr(self, name))
        if self.seed is not None:
            self._set("seed", check_int(error, "seed", self.seed, 0, 2**63 - 1))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, check_int(error, name, getattr(self, name), -1))
        if self.truncate_prompt_tokens is not None:
            self._set("truncate_prompt_tokens", _truncation(self.truncate_prompt_tokens))
        if not isinstance(self.output_kind, RequestOutputKind | None):
            raise error(f"output_kind must be a RequestOutputKind, got {shown(self.output_kind)}")
        self._set("logits_processors", _processors(self.logits_processors))
        if self.structured_outputs is not None:
            self._set("structured_outputs", structured_outputs(self.structured_outputs))
        for name in ("stop", "bad_words"):
            self._set(name, _strings(name, getattr(self, name)))
        for name in ("stop_token_ids", "kept_token_ids"):
            given = getattr(self, name)
            self._set(name, _token_ids(name, () if given is None else given))
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

    def clone(self, **changes: Any) -> "SamplingParams":
        """Return a copy with `changes`, which are checked. Parameters themselves never change."""
        return dataclasses.replace(self, **changes)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_rules(self) -> bool:
        """Whether some rule changes the logits, grammars aside."""
        return bool(
            self.allowed_token_ids is not None
            or self.logits_processors
            or self.bad_words
            or self.min_tokens
            or self.logit_bias
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )

    @property
    def is_plain(self) -> bool:
        """Whether a step gives only a token, from the logits as they are."""
        return not self.has_rules and self.structured_outputs is None and self.logprobs is None

    @property
    def forces_tokens(self) -> bool:
        """Whether tokens that the grammar forces are appended without a step of the model each.

        They get no log-probabilities, and no other rule can forbid one.
        """
        return (
            self.structured_outputs is not None
            and self.logprobs is None
            and self.allowed_token_ids is None
            and not (self.bad_words or self.min_tokens or self.logits_processors)
        )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters recommended in a generation_config.json.

    Raises:
        CheckpointError: it recommends an invalid value.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {
        name: generation_config[name] for name in names if generation_config.get(name) is not None
    }
    do_sample = generation_config.get("do_sample")
    if do_sample is not None and not check_bool(
        CheckpointError, "generation_config.json: do_sample", do_sample
    ):
        given["temperature"] = 0.0
    if generation_config.get("max_new_tokens") is not None:
        given["max_tokens"] = generation_config["max_new_tokens"]
    try:
        return SamplingParams(**given)
    except InvalidRequestError as error:
        raise CheckpointError(f"generation_config.json: {error}") from error


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    rule = f"{name} must be a string or a list of strings, got"
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise InvalidRequestError(f"{rule} {shown(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise InvalidRequestError(f"{rule} {shown(value)} with {shown(item)} at index {index}")
    if "" in value:
        raise InvalidRequestError(f"{name} must not hold an empty string, got {shown(list(value))}")
    return tuple(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {shown(value)}")
    return tuple(
        token  # to check each in a call would take 100 ms for a vocabulary
        if type(token) is int and 0 <= token <= MAX_TOKEN_ID
        else check_int(InvalidRequestError, f"{name}[{index}]", token, 0, MAX_TOKEN_ID)
        for index, token in enumerate(value)
    )


def _truncation(value: Any) -> int:
    number = check_int(InvalidRequestError, "truncate_prompt_tokens", value, -1)
    if number == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be above 0, or -1 for max_model_len, got 0"
        )
    return number


def _processors(value: Any) -> tuple[LogitsProcessor, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or not all(callable(item) for item in value):
        raise InvalidRequestError(
            f"logits_processors must be a list of functions, got {shown(value)}"
        )
    for processor in value:
        try:
            inspect.signature(processor).bind(*range(3 if takes_prompt(processor) else 2))
        except TypeError:
            raise InvalidRequestError(
                f"logits processor {shown(processor)} must take (output_token_ids, logits) or "
                "(prompt_token_ids, output_token_ids, logits)"
            ) from None
        except ValueError:  # written in C: its signature is not known
            continue
    return tuple(value)


def takes_prompt(processor: LogitsProcessor) -> bool:
    """Whether a logits processor has three parameters, the first for the prompt; as in vLLM."""
    try:
        return len(inspect.signature(processor).parameters) == 3
    except ValueError:  # written in C: its signature is not known
        return False


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if isinstance(value, Mapping):
        value = tuple(value.items())
    try:
        pairs = [(token, bias) for token, bias in value]
    except (TypeError, ValueError):
        raise InvalidRequestError(
            f"logit_bias must be a dictionary of token id to bias, got {shown(value)}"
        ) from None
    checked = []
    for token, bias in pairs:
        # The keys of a JSON object are strings; vLLM accepts them too.
        token = int(token) if isinstance(token, str) and token.isdecimal() else token
        token = check_int(InvalidRequestError, "logit_bias token", token, 0, MAX_TOKEN_ID)
        number = check_float(InvalidRequestError, f"logit_bias[{token}]", bias, -float("inf"))
        checked.append((token, min(100.0, max(-100.0, number))))
    return tuple(checked)
