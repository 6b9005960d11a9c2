"""Requests of the protocol to `SamplingParams`."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from nanovllm.apps.server.protocol.common import GenerationRequest
from nanovllm.apps.server.state import ServerState
from nanovllm.errors import InvalidRequestError
from nanovllm.options.sampling_params import SamplingParams

LEAST_LOGPROB = -9999.0
"""In place of -inf, which JSON lacks; as in vLLM."""
MAX_ANSWER_LOGPROBS = 2**20
"""Log-probabilities of an answer. To make it takes some 250 bytes for each, in a chat 800."""

_FIELDS = [
    name
    for name in SamplingParams.__dataclass_fields__
    if name in GenerationRequest.model_fields and name != "structured_outputs"
]


def sampling_params(
    server: ServerState,
    given: GenerationRequest,
    *,
    default_max_tokens: int,
    logprobs: int | None,
    defaults: SamplingParams | None = None,
    **changes: Any,
) -> SamplingParams:
    """Return the parameters of a request: those given, and `defaults` for the others.

    All is checked that can be without the prompt, and without compiling a grammar.

    Args:
        default_max_tokens: max_tokens if the request gives none.
        defaults: None are the checkpoint's.
        changes: fields that the route decides.

    Raises:
        InvalidRequestError: a value is invalid.
    """
    fields = {name: value for name in _FIELDS if (value := getattr(given, name)) is not None}
    if forms := given.forms():
        (fields["structured_outputs"],) = forms.values()
    if given.vllm_xargs:
        fields["extra_args"] = given.vllm_xargs
    fields = {"max_tokens": default_max_tokens, **fields, "logprobs": logprobs, **changes}
    params = dataclasses.replace(defaults or server.llm.get_default_sampling_params(), **fields)
    server.llm.engine.input_processor.params_check.check(params)
    check_logprobs(server, params, [0])
    return params


def chat_params(
    server: ServerState,
    given: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    **changes: Any,
) -> SamplingParams:
    """Return the parameters of a conversation, as `sampling_params` does."""
    defaults = server.llm.get_default_sampling_params()
    recommended = server.llm.engine.generation_config.get("max_new_tokens")
    # A sequence ends at max_model_len anyway: so this is what the context has room for.
    most = server.max_model_len if recommended is None else defaults.max_tokens
    if count := _at_position(server, logprobs):
        most = max(1, min(most, MAX_ANSWER_LOGPROBS // count))
    if max_tokens is not None:
        changes["max_tokens"] = max_tokens
    return sampling_params(server, given, default_max_tokens=most, logprobs=logprobs, **changes)


def check_logprobs(server: ServerState, params: SamplingParams, lengths: Iterable[int]) -> None:
    """Refuse a request whose answer could have too many log-probabilities.

    Args:
        lengths: of the prompts, in tokens or, where they are not known yet, in characters.

    Raises:
        InvalidRequestError: there are too many.
    """
    longest = server.max_model_len
    limit = MAX_ANSWER_LOGPROBS
    of_prompt = _at_position(server, params.prompt_logprobs)
    of_output = _at_position(server, params.logprobs)
    most = longest * max(of_prompt, of_output)
    output = min(params.max_tokens, longest) * of_output
    total = params.n * sum(min(length * of_prompt + output, most) for length in lengths)
    if total > limit:
        name = "prompt_logprobs" if params.logprobs is None else "logprobs"
        raise InvalidRequestError(
            f"{name}: the answer could have {total} log-probabilities; the limit is {limit}: ask "
            "for fewer of each token, fewer tokens, prompts or continuations"
        )


def _at_position(server: ServerState, count: int | None) -> int:
    """Return how many log-probabilities a token has: its own, and the `count` most likely."""
    if count is None:
        return 0
    return (server.llm.engine.worker_info.vocab_size if count == -1 else count) + 1


def field_names(given: GenerationRequest) -> dict[str, str]:
    """Return, by the engine's names, the fields of a request that have other names."""
    field = next(iter(given.forms()), "structured_outputs")
    names = {"structured_outputs": field, "StructuredOutputsParams": field}
    return {**names, "extra_args": "vllm_xargs"}
