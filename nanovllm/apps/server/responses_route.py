"""POST /v1/responses: OpenAI's newer form of a chat; the routes of a stored response."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence as Seq
from contextlib import aclosing
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

from fastapi import APIRouter, Query, Request
from pydantic_core import to_json
from starlette.responses import Response

from nanovllm.apps.server import generation
from nanovllm.apps.server.conversation import AnswerReader, params_in_form, render, run
from nanovllm.apps.server.error_bodies import APIError, as_api_error, naming_params
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.output_parsers.parameter_types import typed
from nanovllm.apps.server.params import chat_params, field_names
from nanovllm.apps.server.protocol.chat import MAX_ITEMS
from nanovllm.apps.server.protocol.responses import (
    AnyInputItem,
    InputReference,
    ResponsesRequest,
)
from nanovllm.apps.server.response_items import (
    Event,
    ResponseBuilder,
    conversation_of,
    items_of,
    listed_items,
    messages_of,
    new_id,
    stored_items,
)
from nanovllm.apps.server.response_store import StoredResponse
from nanovllm.apps.server.sse import named_frames, sse
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.errors import InvalidRequestError, log_failure
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import shown
from nanovllm.outputs import CompletionOutput, RequestOutput

router = APIRouter(tags=["responses"], route_class=JSONRoute)

logger = logging.getLogger(__name__)

_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {},
    "text": {},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that are returned with its answer, and what they are if not given."""


@router.post("/v1/responses")
async def respond(request: Request, body: ResponsesRequest) -> Response:
    """Answer an input."""
    server = state_of(request)
    renamed = {"max_tokens": "max_output_tokens", **field_names(body)}
    with naming_params(ResponsesRequest.model_fields, "input", renamed):
        place = generation.admit(request, 1, body)
        known = _known(request, body)
        prompt, params, items = await place.prepare(_prepare, server, body, known)
        answer = _Answer(server, body, params, prompt)
        if items is not None:
            owner, before = _owner(request), body.previous_response_id
            answer.keep = lambda response, text: server.responses.add(
                owner,
                StoredResponse(
                    response["id"],
                    before,
                    items,
                    text,
                    to_json({"output": response["output"]}),
                    tuple(item["id"] for item in response["output"]),
                ),
            )
        outputs = await run(place, body, prompt, params)
        if body.stream:
            return sse(answer.frames(outputs), "/v1/responses")
        text = answer.whole(await anext(outputs))
        return Response(text, media_type="application/json")


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request, body: ResponsesRequest) -> dict[str, Any]:
    """Return how many tokens the prompt of a request has."""
    server = state_of(request)
    server.check_model(body.model)
    with naming_params(ResponsesRequest.model_fields, "input"):
        place = generation.admit(request, 1)
        known = _known(request, body)
        count = await place.prepare(_count, server, body, known)
        return {"object": "response.input_tokens", "input_tokens": count}


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str, stream: bool = False) -> Response:
    """Return a stored response."""
    if stream:
        raise APIError(400, "a stored response is not streamed: leave stream out", param="stream")
    stored = state_of(request).responses.get(_owner(request), response_id)[-1]
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """Drop a stored response."""
    state_of(request).responses.delete(_owner(request), response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(request: Request, response_id: str) -> NoReturn:
    """Refuse: no response runs without a client."""
    state_of(request).responses.get(_owner(request), response_id)
    raise APIError(
        400,
        f"the response {shown(response_id)} has ended; to end one that runs, close its connection",
    )


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """List what a stored response answers, with what came before it in its conversation."""
    chain = state_of(request).responses.get(_owner(request), response_id)
    _check_size(request, chain[:-1])  # any of them may have been replaced by a larger one
    items = await asyncio.to_thread(listed_items, chain)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise APIError(400, f"after: there is no item {shown(after)}", param="after")
        start = ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }


def _owner(request: Request) -> str:
    """Return whose responses a request may use: those of its API key."""
    return str(getattr(request.state, "key_digest", ""))


class _Known(NamedTuple):
    """What of the stored responses a request names."""

    earlier: Seq[StoredResponse]
    """Those of the conversation that it goes on with."""
    referenced: Mapping[str, StoredResponse]
    """By the id of an item that stands in its input, the response that has it."""


def _known(request: Request, body: ResponsesRequest) -> _Known:
    responses, owner = state_of(request).responses, _owner(request)
    given = () if isinstance(body.input, str) else body.input
    item_ids = {item.id for item in given if isinstance(item, InputReference)}
    previous_id = body.previous_response_id
    earlier = [] if previous_id is None else responses.conversation(owner, previous_id)
    referenced = {item_id: responses.with_item(owner, item_id) for item_id in item_ids}
    outputs = {each.response_id: len(each.output) for each in referenced.values()}
    _check_size(request, earlier, sum(outputs.values()))
    return _Known(earlier, referenced)


def _check_size(request: Request, turns: Seq[StoredResponse], num_more: int = 0) -> None:
    """Raise APIError, status 400, if what is to be read of stored responses is too large."""
    num_bytes = num_more + sum(each.num_turn_bytes for each in turns)
    if num_bytes > (most := state_of(request).options.max_body_bytes):
        raise APIError(
            400,
            f"the conversation has {num_bytes} bytes, and the server's max_body_bytes is {most}: "
            "go on with a new one",
            param="previous_response_id",
        )


def _count(server: ServerState, body: ResponsesRequest, known: _Known) -> int:
    prompt = _render(server, body, known.earlier, items_of(body.input, known.referenced))
    return len(server.llm.engine.input_processor.encode(prompt, rendered=True))


def _prepare(
    server: ServerState, body: ResponsesRequest, known: _Known
) -> tuple[str, SamplingParams, bytes | None]:
    """Return the prompt, the parameters, and what is to be stored of the input.

    Making them takes a while: call it in a thread.
    """
    changes: dict[str, Any] = {}
    if body.truncation == "auto":
        room = _room(server.max_model_len, body.max_output_tokens)
        changes["truncate_prompt_tokens"] = server.max_model_len - room
    # First, for its checks cost little.
    params = chat_params(server, body, max_tokens=body.max_output_tokens, **changes)
    items = items_of(body.input, known.referenced)
    prompt = _render(server, body, known.earlier, items)
    params = params_in_form(server, body, prompt, params)
    return prompt, params, stored_items(items) if _is_stored(server, body) else None


def _is_stored(server: ServerState, body: ResponsesRequest) -> bool:
    return server.responses.is_on and body.store is not False


def _render(
    server: ServerState,
    body: ResponsesRequest,
    earlier: Seq[StoredResponse],
    items: Seq[AnyInputItem],
) -> str:
    items = [*conversation_of(earlier), *items]
    if len(items) > MAX_ITEMS:
        raise APIError(
            400,
            f"the conversation has {len(items)} items, {MAX_ITEMS} at most",
            param="previous_response_id",
        )
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning.effort)
    messages = messages_of(body.instructions, items)
    try:
        return render(server, messages, tools=body.functions, chat_template_kwargs=variables)
    except (APIError, InvalidRequestError) as error:
        found = as_api_error(error).body["error"]
        is_field = found["param"] in ResponsesRequest.model_fields  # or a place in the messages
        param = found["param"] if is_field else "input"
        raise APIError(400, found["message"] or "", param=param, code=found["code"]) from None


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
        given = body.model_dump(include=set(_ECHOED), exclude_none=True, by_alias=True)
        echoed = {**_ECHOED, **given}
        echoed["reasoning"] = {"effort": None} | echoed["reasoning"]
        echoed["text"] = {"format": {"type": "text"}} | echoed["text"]
        echoed["tools"] = [
            {"parameters": None, "strict": False} | tool if tool["type"] == "function" else tool
            for tool in echoed["tools"]
        ]
        self._num_output = 0
        self._builder = ResponseBuilder(
            {
                "id": new_id("resp") if body.request_id is None else f"resp_{body.request_id}",
                "object": "response",
                "created_at": int(time.time()),
                "completed_at": None,
                "status": "in_progress",
                "background": False,
                "error": None,
                "incomplete_details": None,
                "max_tool_calls": None,
                "model": server.name_in_answer(body.model),
                "output": [],
                "service_tier": "default",
                "store": _is_stored(server, body),
                "temperature": params.temperature,
                "top_logprobs": 0,
                "top_p": params.top_p,
                "usage": None,
                **echoed,
            },
            body.called_tools(),
            encodes_reasoning=body.includes("reasoning.encrypted_content"),
        )
        self.keep: Callable[[dict[str, Any], bytes], object] | None = None
        """Keeps the response once it has ended; its second argument is the response as JSON."""

    def whole(self, output: RequestOutput) -> bytes:
        """Return the response as JSON."""
        self._events(output)
        deque(self._builder.finish(self._builder.response["status"]), maxlen=0)
        return self._keep()

    async def frames(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[str, None]:
        """Yield the events of a streamed response; those that come at once together."""
        builder = self._builder
        yield named_frames(builder.start())
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    yield named_frames(self._events(output))
        except Exception as error:
            if not isinstance(error, APIError):
                log_failure(logger, error, "a stream ended with an error")
            found = as_api_error(error).body["error"]
            is_clients = found["type"] == "invalid_request_error"
            code = found["code"] or ("invalid_prompt" if is_clients else "server_error")
            builder.response["error"] = {"code": code, "message": found["message"] or ""}
            builder.response["status"] = "failed"
        events = [*builder.finish(builder.response["status"])]
        self._keep()  # before the client knows that it may go on from it
        yield named_frames(events)

    def _events(self, output: RequestOutput) -> list[Event]:
        """Return the events of what is new of the answer; at its end, set its status and usage."""
        (completion,) = output.outputs
        self._num_output += len(completion.token_ids)
        parts = self._reader.parts(completion)
        events = [event for part in parts for event in self._builder.add(part)]
        if completion.finish_reason is not None:
            self._end(output, completion)
        return events

    def _keep(self) -> bytes:
        """Return the response as JSON, and keep it if that is asked for and it has not failed."""
        response = self._builder.response
        text = to_json(response)
        if self.keep is not None and response["status"] != "failed":
            self.keep(response, text)
        return text

    def _end(self, output: RequestOutput, completion: CompletionOutput) -> None:
        """Set the status and the usage."""
        status = "completed"
        response = self._builder.response
        if completion.finish_reason == "length":
            status = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif completion.finish_reason == "abort":
            status = "failed"
            response["error"] = {"code": "server_error", "message": "the request was aborted"}
        response["status"] = status
        response["completed_at"] = int(time.time()) if status == "completed" else None
        num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
        response["usage"] = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": num_prompt + self._num_output,
        }
