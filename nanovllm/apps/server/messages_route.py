"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of a chat."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm.apps.server import generation
from nanovllm.apps.server.conversation import AnswerReader, params_in_form, render, run
from nanovllm.apps.server.error_bodies import APIError, naming_params
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.message_blocks import Event, MessageBuilder, messages_of
from nanovllm.apps.server.output_parsers.parameter_types import typed
from nanovllm.apps.server.params import chat_params, field_names
from nanovllm.apps.server.protocol.messages import CountTokensRequest, MessagesRequest
from nanovllm.apps.server.response_items import new_id
from nanovllm.apps.server.sse import json_response, named_frames, sse
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import CompletionOutput, RequestOutput

router = APIRouter(tags=["messages"], route_class=JSONRoute)

_STOP_REASONS: dict[str | None, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


@router.post("/v1/messages")
async def answer(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation."""
    server = state_of(request)
    renamed = {"stop": "stop_sequences", **field_names(body)}
    fields = MessagesRequest.model_fields
    with naming_params(fields, "messages", renamed):
        place = generation.admit(request, 1, body)
        prompt, params = await place.prepare(_prepare, server, body)
        answer = _Answer(server, body, prompt)
        outputs = await run(place, body, prompt, params)
        if body.stream:
            return sse(answer.frames(outputs), "/v1/messages")
        return json_response(answer.whole(await anext(outputs)))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountTokensRequest) -> dict[str, int]:
    """Return how many tokens a conversation has."""
    server = state_of(request)
    server.check_model(body.model)
    fields = CountTokensRequest.model_fields
    with naming_params(fields, "messages"):
        place = generation.admit(request, 1)
        return {"input_tokens": await place.prepare(_count, server, body)}


def _count(server: ServerState, body: CountTokensRequest) -> int:
    prompt = _render(server, body)
    return len(server.llm.engine.input_processor.encode(prompt, rendered=True))


def _prepare(server: ServerState, body: MessagesRequest) -> tuple[str, SamplingParams]:
    """Return the prompt and the parameters. Making them takes a while: call it in a thread."""
    changes: dict[str, Any] = {}
    if body.stop_sequences:
        changes["stop"] = tuple(body.stop_sequences)
    # First, for its checks cost little.
    params = chat_params(server, body, max_tokens=body.max_tokens, **changes)
    prompt = _render(server, body)
    return prompt, params_in_form(server, body, prompt, params)


def _render(server: ServerState, body: CountTokensRequest) -> str:
    """Return the prompt. A last message of the model's is continued."""
    variables: dict[str, Any] = {"enable_thinking": body.thinks, "thinking": body.thinks}
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    messages = messages_of(body.system, body.messages)
    last = messages[-1]
    continues = last.role == "assistant" and bool(last.content) and not last.tool_calls
    return render(
        server,
        messages,
        tools=body.functions,
        continue_final_message=continues,
        chat_template_kwargs={**variables, **(body.chat_template_kwargs or {})},
    )


class _Answer:
    """Makes the message of one request."""

    def __init__(self, server: ServerState, body: MessagesRequest, prompt: str) -> None:
        self._reader = AnswerReader(server, body, prompt, typed(body.functions))
        self._stop_sequences = frozenset(body.stop_sequences or ())
        self._max_model_len = server.max_model_len
        self._num_output = 0
        self._builder = MessageBuilder(
            {
                "id": new_id("msg") if body.request_id is None else f"msg_{body.request_id}",
                "type": "message",
                "role": "assistant",
                "model": server.name_in_answer(body.model),
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
            }
        )

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        self._events(output)
        return self._builder.message

    async def frames(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[str, None]:
        """Yield the events of a streamed message; those that come at once together."""
        async with aclosing(outputs):
            async for output in outputs:
                yield named_frames(self._events(output))

    def _events(self, output: RequestOutput) -> list[Event]:
        """Return the events of what is new of the answer."""
        (completion,) = output.outputs
        is_first = "usage" not in self._builder.message
        self._num_output += len(completion.token_ids)
        self._builder.message["usage"] = {
            "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": output.num_cached_tokens,
            "output_tokens": self._num_output,
            "output_tokens_details": {"thinking_tokens": 0},
        }
        events = self._builder.start() if is_first else []
        for part in self._reader.parts(completion):
            events += self._builder.add(part)
        if completion.finish_reason is not None:
            self._end(completion)
            events += self._builder.finish()
        return events

    def _end(self, completion: CompletionOutput) -> None:
        """Set why the message ends."""
        if completion.finish_reason == "abort":
            raise APIError(500, "the request was aborted")
        message = self._builder.message
        usage = message["usage"]
        usage["output_tokens_details"]["thinking_tokens"] = self._reader.num_reasoning_tokens
        num_tokens = sum(count for count in usage.values() if isinstance(count, int))
        reason = _STOP_REASONS[self._reader.finish_reason(completion)]
        if reason == "max_tokens" and num_tokens >= self._max_model_len:
            reason = "model_context_window_exceeded"
        if reason == "end_turn" and completion.stop_reason in self._stop_sequences:
            reason = "stop_sequence"
            message["stop_sequence"] = str(completion.stop_reason)
        message["stop_reason"] = reason
