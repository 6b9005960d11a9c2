"""POST /inference/v1/generate: continues token ids, in vLLM's form. No text on the way."""

import asyncio
import base64
import io
import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm.apps.server import generation
from nanovllm.apps.server.error_bodies import naming_params
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.protocol import (
    GenerationRequest,
    StreamableRequest,
    StreamOptions,
    TokenIds,
    usage,
)
from nanovllm.apps.server.sse import DONE, frame, json_response, sse
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.engine.prompt import Prompt
from nanovllm.options.other_names import other_names
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput

router = APIRouter(tags=["completions"], route_class=JSONRoute)

_OUTER = frozenset(
    (
        *("model", "priority", "user", "stream", "stream_options", "cache_salt", "request_id"),
        *("return_token_ids", "return_tokens_as_token_ids", "truncate_prompt_tokens"),
        *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    )
)


class GenerateParams(GenerationRequest):
    """How to continue, by the names of SamplingParams. Without a value, its default counts, not the
    checkpoint's.
    """

    others = GenerationRequest.others | other_names(
        {"detokenize": (True, False), "output_kind": (0, 1, 2)}
    )
    not_taken = _OUTER

    logprobs: int | None = None
    """How many of the most likely tokens to return for each token; 0 is the token alone."""


class GenerateRequest(StreamableRequest):
    """The prompt's token ids, and how to continue them."""

    others = other_names({"output_mode": ("tokens",)})

    token_ids: TokenIds
    sampling_params: GenerateParams


@router.post("/inference/v1/generate")
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Continue token ids."""
    server = state_of(request)
    fields = {name: f"sampling_params.{name}" for name in GenerateParams.model_fields}
    with naming_params((), "token_ids", fields):
        params = _params(server, body)
        generation.check_logprobs(server, params, [len(body.token_ids)])
        place = generation.admit(request, params.n, body)
        prompt = Prompt(token_ids=body.token_ids, salt=body.cache_salt)
        outputs = await generation.run(place, prompt, params, stream=bool(body.stream))
    answer = _Answer(server, body, params)
    if body.stream:
        return sse(outputs, answer.frames)
    return json_response(await asyncio.to_thread(answer.whole, await anext(outputs)))


def _params(server: ServerState, body: GenerateRequest) -> SamplingParams:
    given = body.sampling_params
    room = max(1, server.max_model_len - len(body.token_ids))
    return generation.sampling_params(
        server,
        given,
        default_max_tokens=room,
        logprobs=given.logprobs,
        defaults=SamplingParams(),
        detokenize=bool(given.stop),  # text is needed to find a stop string
    )


class _Answer:
    def __init__(self, server: ServerState, body: GenerateRequest, params: SamplingParams) -> None:
        self._id = body.request_id or uuid.uuid4().hex
        self._model = server.name_in_answer(body.model)
        self._with_prompt = bool(body.return_token_ids)
        self._num_top = params.logprobs
        self._options = body.stream_options or StreamOptions()
        self._num_output = 0

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        return {
            "request_id": self._id,
            "created": int(time.time()),
            "model": self._model,
            "output_mode": "tokens",
            "choices": [self._choice(completion) for completion in output.outputs],
            "usage": self._usage(output),
            "prompt_logprobs": output.prompt_logprobs,
            "prompt_token_ids": output.prompt_token_ids if self._with_prompt else None,
        }

    def frames(self, output: RequestOutput) -> str:
        """Return the frames of chunks for what is new; at the end the usage if asked for."""
        frames = []
        for completion in output.outputs:
            chunk = self._chunk(self._choice(completion))
            if self._with_prompt:
                chunk["prompt_token_ids"] = output.prompt_token_ids
                self._with_prompt = False
            if self._options.with_each_chunk:
                chunk["usage"] = self._usage(output)
            frames.append(frame(chunk))
        if output.finished:
            if self._options.include_usage:
                frames.append(frame({**self._chunk(), "usage": self._usage(output)}))
            frames.append(DONE)
        return "".join(frames)

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {"request_id": self._id, "output_mode": "tokens", "choices": choices}

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        return usage(len(output.prompt_token_ids), self._num_output, output.num_cached_tokens)

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        self._num_output += len(completion.token_ids)
        spans = None
        if (found := completion.weight_versions) is not None:
            spans = [{"version": str(s.version), "start": s.start, "end": s.end} for s in found]
        return {
            "index": completion.index,
            "token_ids": completion.token_ids,
            "logprobs": self._logprobs(completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "weight_versions": spans,  # None before the end
            "routed_experts": _encoded(completion.routed_experts),
        }

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        content = []
        for token, entries in zip(completion.token_ids, completion.logprobs or [], strict=True):
            tops = [_of(other, entry) for other, entry in entries.items()]
            if self._num_top >= 0:  # as in vLLM: the token itself is one of them
                tops = tops[: max(self._num_top, 1)]
            content.append({**_of(token, entries[token]), "top_logprobs": tops})
        return {"content": content}


def _of(token_id: int, entry: Logprob) -> dict[str, Any]:
    logprob = max(entry.logprob, generation.LEAST_LOGPROB)
    return {"token_id": token_id, "logprob": logprob, "rank": entry.rank}


def _encoded(array: Any) -> str | None:
    """Return a numpy array as a file of its format in base64."""
    if array is None:
        return None
    import numpy as np

    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
