"""POST /v1/responses: OpenAI's newer form of a chat. Nothing is stored between requests.

Knows no queue and no connection: `generation` does. Knows no format of tool calls: `answers` does.
"""

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from nanovllm.chat.answer_parser import AnswerParser
from nanovllm.chat.parts import Part, ReasoningDelta
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import InvalidRequestError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.server import generation
from nanovllm.server.answers import NamedTool, ToolChoice
from nanovllm.server.error_bodies import APIError, as_api_error, naming_params
from nanovllm.server.json_route import JSONRoute
from nanovllm.server.params import (
    chat_params,
    check_one_form,
    structured_names,
    structured_outputs,
)
from nanovllm.server.protocol.chat import ChatTool, Tool
from nanovllm.server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    NamedFunction,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from nanovllm.server.rendering import render
from nanovllm.server.response_items import ResponseBuilder, messages_of, new_id
from nanovllm.server.sse import frame, sse
from nanovllm.server.state import ServerState, state_of

router = APIRouter(tags=["responses"], route_class=JSONRoute)

logger = logging.getLogger(__name__)


@router.post("/v1/responses", response_model=ResponseObject)
async def respond(request: Request, body: ResponsesRequest) -> Response:
    """Answer an input."""
    server = state_of(request)
    adapter = server.check_model(body.model)
    priority = server.check_priority(body.priority)
    form = _text_format(body)
    renamed = {"max_tokens": "max_output_tokens", **structured_names(body)}
    if form is not None:
        renamed |= dict.fromkeys(("structured_outputs", "StructuredOutputsParams"), "text.format")
    with naming_params(ResponsesRequest.model_fields, "input", renamed):
        place = generation.admit(request, 1, body.user, priority, adapter)
        prompt, params = await place.prepare(_prepare, server, body, form)
        answer = _Answer(server, body, params, prompt)
        outputs = await generation.run(
            place,
            Prompt(prompt, rendered=True, salt=body.cache_salt),
            params,
            stream=bool(body.stream),
        )
        if body.stream:
            return sse(answer.frames(outputs), done="")
        text = answer.whole(await anext(outputs)).model_dump_json()
        return Response(text, media_type="application/json")


def _prepare(
    server: ServerState, body: ResponsesRequest, form: dict[str, Any] | None
) -> tuple[str, SamplingParams]:
    """Return the prompt and the parameters. To make them takes a while: call it in a thread."""
    params = _params(server, body, form)  # first, for its checks cost little
    prompt = _render(server, body)
    return prompt, server.answer_format.params(
        params,
        prompt,
        body.tools or [],
        _tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )


def _render(server: ServerState, body: ResponsesRequest) -> str:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning.effort)
    tools = [] if body.tool_choice == "none" else body.tools or []
    fields = set(Tool.model_fields)
    try:
        return render(
            server,
            messages_of(body.instructions, body.input),
            tools=[
                ChatTool(type="function", function=Tool(**tool.model_dump(include=fields)))
                for tool in tools
            ],
            chat_template_kwargs=variables,
        )
    except (APIError, InvalidRequestError) as error:
        found = as_api_error(error).body["error"]
        is_field = found["param"] in ResponsesRequest.model_fields  # else a place in the messages
        param = found["param"] if is_field else "input"
        raise APIError(400, found["message"] or "", param=param) from None


def _params(
    server: ServerState, body: ResponsesRequest, form: dict[str, Any] | None
) -> SamplingParams:
    changes: dict[str, Any] = {}
    if body.max_output_tokens is not None:
        changes["max_tokens"] = body.max_output_tokens
    if body.truncation == "auto":
        room = _room(server.max_model_len, body.max_output_tokens)
        changes["truncate_prompt_tokens"] = server.max_model_len - room
    check_one_form(body, must_call=_tool_choice(body) not in ("none", "auto"))
    return chat_params(server, body, logprobs=None, structured=form, **changes)


def _room(max_model_len: int, max_output_tokens: int | None) -> int:
    """Return how many tokens a conversation that may be cut leaves to the answer."""
    if max_output_tokens is None:
        return max(1, max_model_len // 4)
    return max(1, min(max_output_tokens, max_model_len // 2))


def _tool_choice(body: ResponsesRequest) -> ToolChoice:
    if isinstance(body.tool_choice, NamedFunction):
        return NamedTool(body.tool_choice.name)
    return body.tool_choice or "auto"


def _text_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """Return what the text must fit, by vLLM's names; None if the request's other fields say it."""
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if structured_outputs(body) is not None:
        other = structured_names(body)["structured_outputs"]
        raise APIError(
            400, f"text.format and {other} both say what to write: give one", param="text.format"
        )
    return {"json_object": True} if form.schema_ is None else {"json": form.schema_}


class _Answer:
    """Makes the response of one request."""

    def __init__(
        self, server: ServerState, body: ResponsesRequest, params: SamplingParams, prompt: str
    ) -> None:
        self._tokenizer: Any = server.llm.engine.input_processor.tokenizer
        self._reasoning = ""
        self._with_reasoning = body.include_reasoning is not False
        self._parser: AnswerParser = server.answer_format.parser(
            has_tools=bool(body.tools) and body.tool_choice != "none",
            starts_in_reasoning=server.answer_format.starts_in_reasoning(prompt),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tools=body.tools or (),
        )
        choice, form = body.tool_choice, None if body.text is None else body.text.format
        self._builder = ResponseBuilder(
            ResponseObject(
                id=new_id("resp") if body.request_id is None else f"resp_{body.request_id}",
                created_at=int(time.time()),
                instructions=body.instructions,
                max_output_tokens=body.max_output_tokens,
                metadata=body.metadata or {},
                model=server.name_in_answer(body.model),
                parallel_tool_calls=body.parallel_tool_calls is not False,
                reasoning={"effort": body.reasoning.effort if body.reasoning else None},
                temperature=params.temperature,
                text={
                    "format": {"type": "text"}
                    if form is None
                    else form.model_dump(by_alias=True, exclude_none=True)
                },
                tool_choice=choice.model_dump()
                if isinstance(choice, NamedFunction)
                else choice or "auto",
                tools=[
                    {"parameters": None, "strict": False} | tool.model_dump(exclude_none=True)
                    for tool in body.tools or ()
                ],
                top_p=params.top_p,
                truncation=body.truncation or "disabled",
                user=body.user,
            )
        )

    def whole(self, output: RequestOutput) -> ResponseObject:
        (completion,) = output.outputs
        for part in self._parts(completion):
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
        builder, num_output = self._builder, 0
        yield "".join(frame(event, event.type) for event in builder.start())
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    (completion,) = output.outputs
                    num_output += len(completion.token_ids)
                    yield "".join(
                        frame(event, event.type)
                        for part in self._parts(completion)
                        for event in builder.add(part)
                    )
                    if completion.finish_reason is not None:
                        self._end(output, completion, num_output)
        except Exception as error:
            if not isinstance(error, APIError):
                logger.exception("a stream ended with an error")
            found = as_api_error(error).body["error"]
            builder.response.error = ResponseError(
                code=found["code"] or "server_error", message=found["message"] or ""
            )
            builder.response.status = "failed"
        events = builder.finish(builder.response.status)
        yield "".join(frame(event, event.type) for event in events)

    def _parts(self, completion: CompletionOutput) -> list[Part]:
        parts = self._parser.feed(completion.text)
        if completion.finish_reason is not None:
            parts += self._parser.finish(cut=completion.finish_reason != "stop")
        self._reasoning += "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
        if not self._with_reasoning:
            parts = [part for part in parts if not isinstance(part, ReasoningDelta)]
        return parts

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
        num_prompt, reasoning = len(output.prompt_token_ids), self._reasoning
        num_reasoning = len(self._tokenizer.encode(reasoning)) if reasoning else 0
        response.usage = ResponseUsage(
            input_tokens=num_prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=output.num_cached_tokens),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=min(num_reasoning, num_output)
            ),
            total_tokens=num_prompt + num_output,
        )
