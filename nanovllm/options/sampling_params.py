"""Sampling parameters of a request: validated when made, never changed afterwards."""

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.options.structured_outputs import StructuredOutputsParams, structured_outputs
from nanovllm.options.validation import (
    Error,
    check_bool,
    check_float,
    check_int,
    check_names,
    checked_dataclass,
    plain_text,
    shown,
)

MAX_TOKEN_ID = 2**31 - 1

MAX_TOKENS = 2**31 - 1
"""The largest max_tokens."""
GREEDY_BELOW = 1e-5
"""Lower temperatures sample greedily: dividing the logits by them would overflow."""

CHAT_SAMPLING: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""What chats sample with if neither the user nor the checkpoint decides. At temperature 1 from all
tokens SmolLM2-135M-Instruct answers two thirds as many easy questions right."""

REQUESTS_FAULT = "no token can be chosen: the request's rules"
"""How the reason begins why an answer failed that its own parameters made impossible."""

TOKEN_MARK = "\ud800"
"""Half of a surrogate pair, which no tokenizer decodes. See marks_kept_tokens."""

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


def _max_tokens(error: Error, name: str, value: Any) -> int:
    return MAX_TOKENS if value is None else check_int(error, name, value, 1, MAX_TOKENS)


def _seed(error: Error, name: str, value: Any) -> int | None:
    is_none = isinstance(value, int) and value == -1  # as in vLLM
    return None if is_none else check_int(error, name, value, -(2**63), 2**63 - 1)


def _strings(error: Error, name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    rule = f"{name} must be a string or a list of strings, got"
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise error(f"{rule} {shown(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise error(f"{rule} {shown(value)} with {shown(item)} at index {index}")
    if "" in value:
        raise error(f"{name} must not hold an empty string, got {shown(list(value))}")
    return tuple(map(plain_text, value))


def _token_ids(error: Error, name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise error(f"{name} must be a list of token ids, got {shown(value)}")
    return tuple(
        token  # to check each in a call would take 100 ms for a vocabulary
        if type(token) is int and 0 <= token <= MAX_TOKEN_ID
        else check_int(error, f"{name}[{index}]", token, 0, MAX_TOKEN_ID)
        for index, token in enumerate(value)
    )


def takes_prompt(processor: LogitsProcessor) -> bool:
    """Whether a logits processor has three parameters, the first for the prompt; as in vLLM."""
    try:
        return len(inspect.signature(processor).parameters) == 3
    except ValueError:  # written in C: its signature is not known
        return False


def _processors(error: Error, name: str, value: Any) -> tuple[LogitsProcessor, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or not all(callable(item) for item in value):
        raise error(f"{name} must be a list of functions, got {shown(value)}")
    for processor in value:
        try:
            inspect.signature(processor).bind(*range(3 if takes_prompt(processor) else 2))
        except TypeError:
            raise error(
                f"logits processor {shown(processor)} must take (output_token_ids, logits) or "
                "(prompt_token_ids, output_token_ids, logits)"
            ) from None
        except ValueError:  # written in C: its signature is not known
            continue
    return tuple(value)


def _logit_bias(error: Error, name: str, value: Any) -> dict[int, float]:
    if isinstance(value, Mapping):
        value = tuple(value.items())
    try:
        pairs = [(token, bias) for token, bias in value]
    except (TypeError, ValueError):
        raise error(
            f"{name} must be a dictionary of token id to bias, got {shown(value)}"
        ) from None
    checked = {}
    for token, bias in pairs:
        # The keys of a JSON object are strings; vLLM accepts them too.
        # A token id has 10 digits at most; int() raises for thousands.
        if isinstance(token, str) and token.isdecimal() and len(token) <= 10:
            token = int(token)
        token = check_int(error, f"{name} token", token, 0, MAX_TOKEN_ID)
        number = check_float(error, f"{name}[{token}]", bias, -float("inf"))
        checked[token] = min(100.0, max(-100.0, number))
    return checked


@checked_dataclass(InvalidRequestError)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop.

    Names and meanings are vLLM's, defaults are nano-vllm's. Logits are processed in vLLM's order:
    logits_processors, extra_args, structured_outputs, allowed_token_ids, bad_words, min_tokens,
    logit_bias, penalties, temperature, min_p, top_k, top_p.

    A field of type Sequence stores a tuple; one of strings also accepts a single string.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or out of range.
    """

    temperature: Annotated[float, check_float, 0.0] = 1.0
    """Randomness of the sampling: the logits are divided by it. 0 is greedy sampling, which always
    takes the most likely token."""
    max_tokens: Annotated[int, _max_tokens] = 64
    """Maximum number of tokens to generate; None is as many as the context has room for."""
    ignore_eos: bool = False
    """Ignore end-of-sequence tokens and continue until max_tokens."""
    seed: Annotated[int | None, _seed] = None
    """Random seed of the request. A seeded request gives the same tokens whatever other requests
    run; None or -1 takes the next seed of the engine."""
    n: Annotated[int, check_int, 1, 16384] = 1
    """Number of continuations to generate; the full blocks of the prompt are computed once."""
    top_k: Annotated[int, check_int, -1] = 0
    """Number of most likely tokens to sample from; 0 or -1 is all tokens."""
    top_p: Annotated[float, check_float, 0.0, 1.0] = 1.0
    """Cumulative probability of the most likely tokens to sample from; 1 is all tokens."""
    min_p: Annotated[float, check_float, 0.0, 1.0] = 0.0
    """Minimum probability of a token, relative to the most likely token's; 0 disables it."""
    min_tokens: int = 0
    """Minimum number of tokens to generate before the output may stop."""
    stop: Annotated[Sequence[str], _strings] = ()
    """A string that ends the output, or several."""
    stop_token_ids: Annotated[Sequence[int], _token_ids] = ()
    """Ids of tokens that end the output, such as [7, 8], besides the model's end-of-sequence
    tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the text."""
    presence_penalty: Annotated[float, check_float, -2.0, 2.0] = 0.0
    """Subtracted once from the logit of each token in the output so far; -2 to 2."""
    frequency_penalty: Annotated[float, check_float, -2.0, 2.0] = 0.0
    """Subtracted from a token's logit for each of its occurrences in the output; -2 to 2."""
    repetition_penalty: Annotated[float, check_float, 0.0] = 1.0
    """For tokens in prompt or output: divides positive logits and multiplies negative ones."""
    logit_bias: Annotated[dict[int, float] | None, _logit_bias] = dataclasses.field(
        default=None, hash=False
    )
    """Numbers to add to the logits of tokens, by token id, such as {"7": -5}; clamped to
    [-100, 100]. None is no bias."""
    allowed_token_ids: Annotated[Sequence[int] | None, _token_ids] = None
    """Ids of the tokens that may be generated, such as [7, 8]; None is all tokens."""
    bad_words: Annotated[Sequence[str], _strings] = ()
    """A string that is not generated, or several: neither as it stands nor after a space."""
    logits_processors: Annotated[Sequence[LogitsProcessor], _processors] = ()
    """Functions that change the logits before each token, called as f(output token ids, logits) or
    f(prompt token ids, output token ids, logits); not with tensor_parallel_size above 1."""
    extra_args: Annotated[dict[str, Any] | None, check_names] = dataclasses.field(
        default=None, hash=False
    )
    """Values for logits rules of plugins, by name, such as {"no_digits": true}: those of the
    engine's option logits_rules. None is no value."""
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    """The form of the output, such as {"json": {...}} with a JSON schema, {"regex": "..."},
    {"choice": ["yes", "no"]}, {"grammar": "..."} or {"json_object": true}. None is any text."""
    logprobs: Annotated[int | None, check_int, -1] = None
    """Number of most likely tokens whose log-probabilities to return for each output token, besides
    the output token's own; -1 is the whole vocabulary. None is off."""
    prompt_logprobs: Annotated[int | None, check_int, -1] = None
    """Number of most likely tokens whose log-probabilities to return for each prompt token except
    the first, besides the prompt token's own; -1 is the whole vocabulary. None is no
    log-probabilities."""
    prompt_logprob_start: Annotated[int, check_int, 0] = 0
    """Position in the prompt after which prompt_logprobs begin: tokens up to it have none. Those
    before it may come from the prefix cache."""
    truncate_prompt_tokens: Annotated[int | None, check_int, -1] = None
    """Keep only this many tokens at the end of the prompt; -1 keeps as many as max_model_len has
    room for. None is an error for a prompt that is too long."""
    detokenize: bool = True
    """Return text. Stop strings need it."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    kept_token_ids: Annotated[Sequence[int], _token_ids] = ()
    """Special tokens that skip_special_tokens leaves in the text, such as tags of tool calls."""
    marks_kept_tokens: bool = False
    """Write U+D800, which no text holds, before each of kept_token_ids: a parser of the text can
    tell these tokens from text that reads like them."""
    spaces_between_special_tokens: bool = True
    """Keep the spaces that some tokenizers write between special tokens."""
    output_kind: RequestOutputKind | None = None
    """What each output of a stream holds: RequestOutputKind.DELTA is the new part, CUMULATIVE all
    so far, FINAL_ONLY one output at the end. None is DELTA for stream, and CUMULATIVE for
    AsyncLLM.generate and LLMEngine of nanovllm.vllm. generate and chat return whole outputs."""

    def __post_init__(self) -> None:
        error = InvalidRequestError
        if self.top_p == 0.0:
            raise error("top_p must be above 0 and at most 1, got 0; for greedy use temperature=0")
        if self.repetition_penalty == 0.0:
            raise error("repetition_penalty must be above 0, got 0; 1 disables it")
        if self.prompt_logprob_start and self.prompt_logprobs is None:
            raise error(
                f"prompt_logprob_start {self.prompt_logprob_start} says where prompt_logprobs "
                "begin, but prompt_logprobs is None: give it too, such as prompt_logprobs=0"
            )
        if self.truncate_prompt_tokens == 0:
            raise error("truncate_prompt_tokens must be above 0, or -1 for max_model_len, got 0")
        if self.allowed_token_ids == ():
            raise error("allowed_token_ids is empty: no token could be generated; None allows all")
        if not isinstance(self.output_kind, RequestOutputKind | None):
            raise error(f"output_kind must be a RequestOutputKind, got {shown(self.output_kind)}")
        if self.stop and not self.detokenize:
            raise error("stop strings need detokenize=True; use stop_token_ids without it")
        least = check_int(error, "min_tokens", self.min_tokens, 0, self.max_tokens)
        object.__setattr__(self, "min_tokens", least)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.structured_outputs is not None:
            form = structured_outputs(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", form)

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
            or self.extra_args
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
    def can_jump_forward(self) -> bool:
        """Whether tokens that the grammar forces are appended without a step of the model each.

        They get no log-probabilities, and no other rule can forbid one.
        """
        return (
            self.structured_outputs is not None
            and self.logprobs is None
            and self.allowed_token_ids is None
            and not (self.bad_words or self.min_tokens or self.logits_processors or self.extra_args)
        )


_SHARED_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
GENERATION_FIELDS = (*_SHARED_NAMES, "do_sample", "max_new_tokens")
"""What a generation_config.json may say of sampling."""


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters recommended in a generation_config.json.

    Raises:
        CheckpointError: it recommends an invalid value.
    """
    given = {
        name: generation_config[name]
        for name in _SHARED_NAMES
        if generation_config.get(name) is not None
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


def chat_sampling(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Return what a chat samples with where a generation_config.json recommends no sampling."""
    decides = generation_config.get("do_sample") is False
    if decides or any(generation_config.get(name) is not None for name in CHAT_SAMPLING):
        return {}
    return dict(CHAT_SAMPLING)
