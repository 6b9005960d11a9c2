"""Requests of the protocol to `SamplingParams`. Knows of prompts their lengths, and no answers."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from nanovllm.errors import InvalidRequestError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.server.error_bodies import APIError
from nanovllm.server.protocol.common import GenerationRequest
from nanovllm.server.state import ServerState

LEAST_LOGPROB = -9999.0
"""In place of -inf, which JSON lacks; as in vLLM."""
MAX_N = 128
"""Of answers to one prompt, as OpenAI's."""

MAX_ANSWER_LOGPROBS = 2**20
"""Log-probabilities of an answer. To make it takes some 250 bytes for each, in a chat 800."""

_FIELDS = [
    name
    for name in SamplingParams.__dataclass_fields__
    if name in GenerationRequest.model_fields and name != "structured_outputs"
]
_STRUCTURED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def sampling_params(
    server: ServerState,
    given: GenerationRequest,
    *,
    default_max_tokens: int,
    logprobs: int | None,
    structured: dict[str, Any] | None = None,
    **changes: Any,
) -> SamplingParams:
    """Return the parameters of a request: those given, and the checkpoint's for the others.

    All is checked that can be without the prompt, and without compiling a grammar.

    Args:
        default_max_tokens: max_tokens if the request gives none.
        structured: what the answer must fit, if it is not the request that says so.
        changes: fields that the route decides.

    Raises:
        APIError, InvalidRequestError: a value is invalid.
    """
    fields = {name: getattr(given, name) for name in _FIELDS}
    fields = {name: value for name, value in fields.items() if value is not None}
    if fields.get("n", 1) > MAX_N:
        raise APIError(400, f"n must be at most {MAX_N}, got {given.n}", param="n")
    found = structured_outputs(given) if structured is None else structured
    if found is not None:
        fields["structured_outputs"] = found
    fields = {"max_tokens": default_max_tokens, **fields, "logprobs": logprobs, **changes}
    params = dataclasses.replace(server.llm.get_default_sampling_params(), **fields)
    server.llm.engine.input_processor.params_check.check(params)
    check_logprobs(server, params, [0])
    return params


def chat_params(
    server: ServerState, given: GenerationRequest, *, logprobs: int | None, **options: Any
) -> SamplingParams:
    """Return the parameters of a conversation, as `sampling_params` does with `options`."""
    defaults = server.llm.get_default_sampling_params()
    recommended = server.llm.engine.generation_config.get("max_new_tokens")
    # A sequence ends at max_model_len anyway: so this is what the context has room for.
    most = server.max_model_len if recommended is None else defaults.max_tokens
    if count := _at_position(server, logprobs):
        most = max(1, min(most, MAX_ANSWER_LOGPROBS // count))
    return sampling_params(server, given, default_max_tokens=most, logprobs=logprobs, **options)


def check_logprobs(server: ServerState, params: SamplingParams, lengths: Iterable[int]) -> None:
    """Refuse a request whose answer could have too many log-probabilities.

    Args:
        lengths: of the prompts, in tokens or, where they are not known yet, in characters.

    Raises:
        InvalidRequestError: there are too many.
    """
    longest, limit = server.max_model_len, MAX_ANSWER_LOGPROBS
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


def num_answers(given: GenerationRequest) -> int:
    """Return n as it counts in the queue, before `sampling_params` checks it."""
    return max(1, min(given.n or 1, MAX_N))


def structured_outputs(given: GenerationRequest) -> dict[str, Any] | None:
    """Return what the answer must fit, by vLLM's names; None if it is free.

    Raises:
        APIError: two fields say it.
    """
    found: dict[str, dict[str, Any]] = {}
    if given.structured_outputs:
        found["structured_outputs"] = given.structured_outputs
    for name, kind in _STRUCTURED.items():
        if getattr(given, name) is not None:
            found[name] = {kind: getattr(given, name)}
    form = given.response_format
    if form is not None and form.type == "json_object":
        found["response_format"] = {"json_object": True}
    if form is not None and form.type == "json_schema":
        schema = form.json_schema.schema_ if form.json_schema else None
        if schema is None:
            raise APIError(
                400,
                "response_format of type json_schema needs json_schema.schema",
                param="response_format.json_schema.schema",
            )
        found["response_format"] = {"json": schema if isinstance(schema, dict) else {}}
    if len(found) > 1:
        first, second, *_ = found
        raise APIError(400, f"{first} and {second} both say what to write: give one", param=second)
    return next(iter(found.values()), None)


def check_one_form(given: GenerationRequest, *, must_call: bool) -> None:
    """Refuse a form of the answer beside a tool that must be called.

    A response_format is that of a text, of which such an answer has none: it does not matter.

    Raises:
        APIError: the request has both.
    """
    found = [name for name in ("structured_outputs", *_STRUCTURED) if getattr(given, name)]
    if must_call and found:
        message = f'tool_choice and {found[0]} both say what to write: give one, or "auto"'
        raise APIError(400, message, param=found[0])


def structured_names(given: GenerationRequest) -> dict[str, str]:
    """Return, by the engine's names of it, the field that says what the answer must fit."""
    fields = ("response_format", *_STRUCTURED)
    found = [name for name in fields if getattr(given, name) is not None]
    field = found[0] if found else "structured_outputs"
    return {"structured_outputs": field, "StructuredOutputsParams": field}
