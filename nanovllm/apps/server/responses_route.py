"""POST /v1/responses: OpenAI's newer form of a chat. Nothing is stored between requests."""

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm.apps.server import generation
from nanovllm.apps.server.answers.parameter_types import typed
from nanovllm.apps.server.conversation import AnswerReader, params_in_form, render
from nanovllm.apps.server.error_bodies import APIError, as_api_error, naming_params
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.params import chat_params, structured_names
from nanovllm.apps.server.protocol.response_objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
)
from nanovllm.apps.server.protocol.responses import ResponsesRequest
from nanovllm.apps.server.response_items import ResponseBuilder, messages_of, new_id
from nanovllm.apps.server.sse import error_frame, frame, sse
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import InvalidRequestError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import CompletionOutput, RequestOutput

router = APIRouter(tags=["responses"], route_class=JSONRoute)

logger = logging.getLogger(__name__)

_ECHOED = ResponseObject.model_fields.keys() - {"model", "temperature", "top_p"}
"""Fields of the request that are returned with its answer."""


@router.post("/v1/responses", response_model=ResponseObject)
async def respond(request: Request, body: ResponsesRequest) -> Response:
    """Answer an input."""
    server = state_of(request)
    renamed = {"max_tokens": "max_output_tokens", **structured_names(body)}
    with naming_params(ResponsesRequest.model_fields, "input", renamed):
        place = generation.admit(request, 1, body)
        prompt, params = await place.prepare(_prepare, server, body)
        answer = _Answer(server, body, params, prompt)
        outputs = await generation.run(
            place,
            Prompt(prompt, rendered=True, salt=body.cache_salt),
            params,
            stream=bool(body.stream),
        )
        if body.stream:
            return sse(answer.frames(outputs), on_error=error_frame)
        text = answer.whole(await anext(outputs)).model_dump_json()
        return Response(text, media_type="application/json")


def _prepare(server: ServerState, body: ResponsesRequest) -> tuple[str, SamplingParams]:
    """Return the prompt and the parameters. Making them takes a while: call it in a thread."""
    changes: dict[str, Any] = {}
    if body.truncation == "auto":
        room = _room(server.max_model_len, body.max_output_tokens)
        changes["truncate_prompt_tokens"] = server.max_model_len - room
    # First, for its checks cost little.
    params = chat_params(server, body, max_tokens=body.max_output_tokens, **changes)
    prompt = _render(server, body)
    return prompt, params_in_form(server, body, prompt, params)


def _render(server: ServerState, body: ResponsesRequest) -> str:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning.effort)
    messages = messages_of(body.instructions, body.input)
    try:
        return render(server, messages, tools=body.functions, chat_template_kwargs=variables)
    except (APIError, InvalidRequestError) as error:
        found = as_api_error(error).body["error"]
        is_field = found["param"] in ResponsesRequest.model_fields  # or a place in the messages
        param = found["param"] if is_field else "input"
        raise APIError(400, found["message"] or "", param=param) from None


def _room(max_model_len: int, max_output_tokens: int | None) -> int:
    """Return how many tokens a conversation that may be cut leaves to the answer."""
    if max_output_tokens is None:
        return max(1, max_model_len // 4)
    return max(1, min(max_output_tokens, max_model_len // 2))


class _Answer:
    """Makes the response of one request."""

    def __init__(
        self, server: ServerState, body: ResponsesRequest, params: SamplingParams, prompt: str
    ) -> None:
        self._reader = AnswerReader(server, body, prompt, typed(body.functions))
        given = body.model_dump(include=_ECHOED, exclude_none=True, by_alias=True)
        echoed: dict[str, Any] = {"reasoning": {}, "text": {}, "tools": [], **given}
        echoed["reasoning"] = {"effort": None} | echoed["reasoning"]
        echoed["text"] = {"format": {"type": "text"}} | echoed["text"]
        echoed["tools"] = [{"parameters": None, "strict": False} | tool for tool in echoed["tools"]]
        self._builder = ResponseBuilder(
            ResponseObject(
                id=new_id("resp") if body.request_id is None else f"resp_{body.request_id}",
                created_at=int(time.time()),
                model=server.name_in_answer(body.model),
                temperature=params.temperature,
                top_p=params.top_p,
                **echoed,
            )
        )

    def whole(self, output: RequestOutput) -> ResponseObject:
        (completion,) = output.outputs
        for part in self._reader.parts(completion):
            for _ in self._builder.add(part):
                pass
        self._end(output, completion, len(completion.token_ids))
        for _ in self._builder.finish(self._builder.response.status):
            pass
        return self._builder.response

    async def frames(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[str, None]:
        """Yield the events of a streamed response; those that come at once together."""
        builder = self._builder
        num_output = 0
        yield "".join(frame(event, event.type) for event in builder.start())
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    (completion,) = output.outputs
                    num_output += len(completion.token_ids)
                    yield "".join(
                        frame(event, event.type)
                        for part in self._reader.parts(completion)
                        for event in builder.add(part)
                    )
                    if completion.finish_reason is not None:
                        self._end(output, completion, num_output)
        except Exception as error:
            if not isinstance(error, APIError):
                logger.exception("a stream ended with an error")
            found = as_api_error(error).body["error"]
            is_clients = found["type"] == "invalid_request_error"
            code = found["code"] or ("invalid_prompt" if is_clients else "server_error")
            builder.response.error = ResponseError(code=code, message=found["message"] or "")
            builder.response.status = "failed"
        events = builder.finish(builder.response.status)
        yield "".join(frame(event, event.type) for event in events)

    def _end(self, output: RequestOutput, completion: CompletionOutput, num_output: int) -> None:
        """Set the status and the usage."""
        response = self._builder.response
        status: Status = "completed"
        if completion.finish_reason == "length":
            status = "incomplete"
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        elif completion.finish_reason == "abort":
            status = "failed"
            response.error = ResponseError(code="server_error", message="the request was aborted")
        response.status = status
        response.completed_at = int(time.time()) if status == "completed" else None
        num_prompt = len(output.prompt_token_ids)
        response.usage = ResponseUsage(
            input_tokens=num_prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=output.num_cached_tokens),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=self._reader.num_reasoning_tokens
            ),
            total_tokens=num_prompt + num_output,
        )
