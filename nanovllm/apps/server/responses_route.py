"""POST /v1/responses: OpenAI's newer form of a chat. Responses are not stored."""

import base64
import copy
import json
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator
from starlette.responses import Response

from nanovllm.apps.server import generation
from nanovllm.apps.server.conversation import (
    AnswerReader,
    Turns,
    count_tokens,
    prepare,
    render,
)
from nanovllm.apps.server.error_bodies import APIError, as_api_error, naming_params
from nanovllm.apps.server.json_route import JSONRoute
from nanovllm.apps.server.output_parsers.answer_format import ToolChoice
from nanovllm.apps.server.output_parsers.parts import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.protocol import (
    MAX_CALLS,
    MAX_ITEMS,
    TEXT_OR_LIST,
    ConversationRequest,
    FunctionName,
    JSONSchema,
    Message,
    Objects,
    RequestModel,
    SentBack,
    Tool,
    ToolName,
    check_schema,
    few_in_all,
    refused,
)
from nanovllm.apps.server.sse import json_response, named_frames, sse
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import InvalidRequestError
from nanovllm.options.other_names import other_names
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import shown
from nanovllm.outputs import CompletionOutput, RequestOutput

router = APIRouter(tags=["responses"], route_class=JSONRoute)
stored_router = APIRouter(include_in_schema=False)
"""Routes of stored responses. All answer 404, as none is stored."""

Event = dict[str, Any]

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
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
_ENCODED = "nanovllm:"
_ONLY_CLIENTS = (
    "this server calls no tools itself; give functions, custom tools, or namespaces of them, "
    "which the client calls"
)
_HINTS = {
    "web_search": '; in Codex set web_search = "disabled"',
    "image_generation": "; in Codex set features.image_generation = false",
}
_MAX_TOOLS = 1024
_MANY = Field(min_length=1, max_length=128, fail_fast=True)
_IGNORED = frozenset(["allowed_callers", "output_schema", "defer_loading"])


class FunctionTool(Tool):
    ignored = _IGNORED

    type: Literal["function"]


class CustomFormat(RequestModel):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _check_grammar(self) -> "CustomFormat":
        if self.type == "grammar" and (self.syntax is None or self.definition is None):
            raise refused("definition", "a format of type grammar needs syntax and definition")
        return self


class CustomTool(RequestModel):
    """A tool whose input is text, not JSON."""

    ignored = _IGNORED

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def is_only_shown(self) -> bool:
        """Whether there is a grammar that the model reads, but that no call is made to fit."""
        return self.format is not None and self.format.syntax == "lark"

    def parameters(self) -> dict[str, Any]:
        """Return the schema of the function in its place."""
        value = {"type": "string"}
        if self.format is not None and self.format.syntax == "regex":
            value["pattern"] = f"^(?:{self.format.definition})$"
        return {
            "type": "object",
            "properties": {"input": value},
            "required": ["input"],
            "additionalProperties": False,
        }

    def whole_description(self) -> str:
        """Return the description, with the grammar if there is one."""
        parts = [self.description or ""]
        if self.format is not None and self.is_only_shown:
            parts.append(f"The input must fit this Lark grammar:\n{self.format.definition}")
        return "\n\n".join(filter(None, parts))


def _check_kind(tool: Any) -> Any:
    """Refuse by name a tool that this server would have to call."""
    kind = tool.get("type") if isinstance(tool, dict) else "function"
    if kind not in ("function", "custom", "namespace"):
        hint = _HINTS.get(str(kind), "")
        raise refused("type", f"the tool {shown(kind)} is not supported: {_ONLY_CLIENTS}{hint}")
    return tool


_BY_TYPE = Field(discriminator="type")
_CalledTool = Annotated[FunctionTool | CustomTool, _BY_TYPE, BeforeValidator(_check_kind)]


class Namespace(RequestModel):
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[_CalledTool], _MANY]


AnyTool = Annotated[FunctionTool | CustomTool | Namespace, _BY_TYPE, BeforeValidator(_check_kind)]


FEW_TOOLS = few_in_all("tools", "tools in namespaces", _MAX_TOOLS)


class NamedFunction(FunctionName):
    type: Literal["function", "custom"]


class CalledTool(NamedTuple):
    """What the client calls a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function_name(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


def functions(tools: Iterable[AnyTool]) -> Iterator[tuple[Tool, CalledTool]]:
    """Return the functions that the model sees, and what the client calls each."""
    for tool in tools:
        if isinstance(tool, Namespace):
            about = tool.description  # said once: it may be long
            for inner, called in functions(tool.tools):
                called = called._replace(namespace=tool.name)
                text = "\n\n".join(filter(None, (about, inner.description)))
                change = {"name": called.function_name, "description": text or None}
                yield inner.model_copy(update=change), called
                about = None
        elif isinstance(tool, CustomTool):
            function = Tool.model_construct(
                name=tool.name,
                description=tool.whole_description() or None,
                parameters=tool.parameters(),
                strict=tool.format is not None and tool.format.syntax == "regex",
            )
            yield function, CalledTool(tool.name, is_custom=True)
        else:
            yield tool, CalledTool(tool.name)


def custom_arguments(text: str) -> str:
    """Return the arguments of the function in place of a custom tool that gets `text`."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool; arguments of another form are returned unchanged."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


_INCLUDED = frozenset(
    (
        *("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
        *("web_search_call.action.sources", "code_interpreter_call.outputs"),
        *("message.input_image.image_url", "computer_call_output.output.image_url"),
    )
)
"""Parts of answers that a request may ask for; but for the first, only hosted tools have them."""
_OF_OTHER_ROUTES = other_names(
    {
        "n": (1,),
        "return_token_ids return_tokens_as_token_ids": (False,),
        "max_tokens response_format prompt_logprobs": (),
    }
)


class InputItem(RequestModel):
    """A part of the conversation. What only an answer needs is dropped."""

    ignored = frozenset(
        ["id", "status", "phase", "parsed_arguments", "namespace", "caller", "created_by"]
    )
    empty_is_absent = frozenset(["type"])


class InputMessage(InputItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Objects


class InputReasoning(SentBack):
    type: Literal["reasoning"]
    content: Objects | None = None
    summary: Objects | None = None
    encrypted_content: str | None = None
    """Read if there is no content; that of another server cannot be."""


class InputCall(SentBack):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None


class InputCustomCall(SentBack):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str = ""


class InputCallOutput(InputItem):
    ignored = InputItem.ignored | {"name"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Objects | None


def _kind_of(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind == "custom_tool_call_output":
        return "function_call_output"
    return (kind or "message") if isinstance(item, dict | BaseModel) else None


AnyInputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(
        _kind_of,
        custom_error_type="item_type",
        custom_error_message="must be of type message, reasoning, function_call, "
        "function_call_output, custom_tool_call or custom_tool_call_output; responses are not "
        "stored, so send the items themselves",
    ),
]
InputItems = Annotated[
    list[AnyInputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
]


class TextFormat(JSONSchema):
    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        check_schema(self.type, self, "schema")
        return self


class TextOptions(RequestModel):
    others = other_names({"verbosity": ("medium",)})

    format: TextFormat | None = None


class ReasoningOptions(RequestModel):
    others = other_names({"mode": ("standard",)})
    # The reasoning is returned as it is, without a summary.
    ignored = frozenset(["context", "summary", "generate_summary"])

    effort: str | None = None
    """Passed to the chat template as reasoning_effort."""


_FEW = Field(max_length=128, fail_fast=True)


class ResponsesRequest(ConversationRequest):
    others = (
        ConversationRequest.others
        | _OF_OTHER_ROUTES
        | other_names(
            {
                "background enable_response_messages": (False,),
                "top_logprobs": (0,),
                "conversation previous_response_id": (),
            }
        )
    )

    not_taken = frozenset(_OF_OTHER_ROUTES)
    ignored = ConversationRequest.ignored | {"client_metadata"}
    empty_is_absent = ConversationRequest.empty_is_absent | {*("text", "tool_choice", "reasoning")}
    text_form = "text.format"

    input: Annotated[
        Annotated[str, Field(min_length=1), Tag("text")] | Annotated[InputItems, Tag("list")],
        TEXT_OR_LIST,
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    tools: Annotated[list[AnyTool], _FEW, FEW_TOOLS] | None = None
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"] | None, Tag("word")]
        | Annotated[NamedFunction, Tag("function")],
        Discriminator(lambda value: "function" if isinstance(value, dict | BaseModel) else "word"),
    ] = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], _FEW] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """"auto" keeps the end of a conversation that leaves too little room for the answer."""
    metadata: Annotated[dict[str, str], Field(max_length=128)] | None = None

    @property
    def functions(self) -> list[Tool]:
        if self.tool_choice == "none":
            return []
        return [function for function, _ in functions(self.tools or ())]

    @property
    def choice(self) -> ToolChoice:
        return self.tool_choice or "auto"

    def includes(self, part: str) -> bool:
        """Whether the answer is to have a part that not every answer has."""
        return part in (self.include or ())

    def forms(self) -> dict[str, dict[str, Any]]:
        found = super().forms()
        match self.text:
            case TextOptions(format=TextFormat(type="json_object")):
                found[self.text_form] = {"json_object": True}
            case TextOptions(format=TextFormat(type="json_schema") as schema):
                found[self.text_form] = schema.form()
        return found

    @model_validator(mode="after")
    def _check_fields(self) -> "ResponsesRequest":
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise refused("tool_choice", "tool_choice needs tools")
        if self.includes("message.output_text.logprobs"):
            raise refused("include", "log-probabilities are returned by /v1/chat/completions")
        for name in self.include or ():
            if name not in _INCLUDED:
                known = ", ".join(sorted(_INCLUDED))
                raise refused("include", f"include must be among {known}, got {shown(name)}")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> "ResponsesRequest":
        known: dict[str, CalledTool] = {}
        for _, called in functions(self.tools or ()):
            name = called.function_name
            if known.setdefault(name, called) != called:
                raise refused("tools", f"two tools are called {shown(name)}: rename one")
        for tool in self.tools or ():
            must = self.choice not in ("none", "auto")
            if must and isinstance(tool, CustomTool) and tool.is_only_shown:
                raise refused(
                    "tool_choice",
                    f"the tool {shown(tool.name)} has a Lark grammar, which no call can be made to "
                    'fit: use tool_choice "auto", or a format with syntax "regex"',
                )
        return self


@router.post("/v1/responses")
async def respond(request: Request, body: ResponsesRequest) -> Response:
    """Answer an input."""
    server = state_of(request)
    renamed = {"max_tokens": "max_output_tokens", **generation.field_names(body)}
    with naming_params(ResponsesRequest.model_fields, "input", renamed):
        place = generation.admit(request, 1, body)
        changes: dict[str, Any] = {}
        if body.truncation == "auto":
            room = _room(server.max_model_len, body.max_output_tokens)
            changes["truncate_prompt_tokens"] = server.max_model_len - room
        limit = body.max_output_tokens
        made = partial(prepare, server, body, _render, max_tokens=limit, **changes)
        prompt, params = await place.prepare(made)
        answer = _Answer(server, body, params, prompt.text or "")
        outputs = await generation.run(place, prompt, params, stream=bool(body.stream))
        if body.stream:
            return sse(outputs, answer.frames, failed=answer.failed)
        return json_response(answer.whole(await anext(outputs)))


@router.post("/v1/responses/input_tokens")
async def count(request: Request, body: ResponsesRequest) -> dict[str, Any]:
    """Return how many tokens the prompt of a request has."""
    count = await count_tokens(request, body, _render, "input")
    return {"object": "response.input_tokens", "input_tokens": count}


@stored_router.get("/v1/responses/{response_id}")
@stored_router.delete("/v1/responses/{response_id}")
@stored_router.get("/v1/responses/{response_id}/input_items")
@stored_router.post("/v1/responses/{response_id}/cancel")
async def find_response(response_id: str) -> None:
    """Refuse: no response is stored, and none runs without a client."""
    raise APIError(
        404,
        f"there is no response {shown(response_id)}: responses are not stored; send the earlier "
        "items of a conversation in input, and to cancel an answer close its connection",
        type="invalid_request_error",
    )


def _render(server: ServerState, body: ResponsesRequest) -> Prompt:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning.effort)
    messages = messages_of(body)
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


def messages_of(body: ResponsesRequest) -> list[Message]:
    """Return the conversation of a request.

    Reasoning, text and calls of one turn of the model become one message.
    """
    turns = Turns(f"input must have at most {MAX_CALLS} calls in succession")
    if body.instructions:
        turns.turn("system")["content"] = body.instructions
    items = body.input
    if isinstance(items, str):
        items = [InputMessage(role="user", content=items)]
    for item in items:
        _add_item(turns, item)
    return [Message(**turn) for turn in turns.all]


def _add_item(turns: Turns, item: AnyInputItem) -> None:
    match item:
        case InputMessage(role="assistant"):
            turn = turns.turn("assistant", before=("content", "tool_calls"))
            turn["content"] = item.content
        case InputMessage():
            turns.all.append({"role": item.role, "content": item.content})
        case InputReasoning():
            if text := _thought(item):
                before = ("reasoning_content", "content", "tool_calls")
                turns.turn("assistant", before)["reasoning_content"] = text
        case InputCall() | InputCustomCall():
            name = CalledTool(item.name, item.namespace).function_name
            arguments = (
                item.arguments if isinstance(item, InputCall) else custom_arguments(item.input)
            )
            turns.add_call(item.call_id, name, arguments)
        case InputCallOutput():
            turns.add_result(item.call_id, item.output)


def _thought(item: InputReasoning) -> str:
    """Return the text of reasoning: its content, or what this server has put into it."""
    if not item.content and (given := item.encrypted_content or "").startswith(_ENCODED):
        try:
            return base64.b64decode(given[len(_ENCODED) :], validate=True).decode()
        except ValueError:  # also of UTF-8
            return ""
    return "\n".join(str(part.get("text", "")) for part in item.content or item.summary or ())


class _Answer:
    """Puts the parts of an answer into a response, which grows; each change of it is an event."""

    def __init__(
        self, server: ServerState, body: ResponsesRequest, params: SamplingParams, prompt: str
    ) -> None:
        self._reader = AnswerReader(server, body, prompt)
        # What the client calls each tool, by the name of the function in its place.
        self._tools = {tool.function_name: tool for _, tool in functions(body.tools or ())}
        self._encodes_reasoning = body.includes("reasoning.encrypted_content")
        self._arguments = ""  # of the item, if it is a call of a custom tool
        self._num_events = 0
        self._item: dict[str, Any] | None = None  # the last of the output, while it grows
        given = body.model_dump(include=set(_ECHOED), exclude_none=True, by_alias=True)
        echoed = {**_ECHOED, **given}
        echoed["reasoning"] = {"effort": None} | echoed["reasoning"]
        echoed["text"] = {"format": {"type": "text"}} | echoed["text"]
        echoed["tools"] = [
            {"parameters": None, "strict": False} | tool if tool["type"] == "function" else tool
            for tool in echoed["tools"]
        ]
        self._response: dict[str, Any] = {
            "id": f"resp_{body.request_id or uuid4().hex}",
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
            "store": False,
            "temperature": params.temperature,
            "top_logprobs": 0,
            "top_p": params.top_p,
            "usage": None,
            **echoed,
        }

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        self._events(output)
        return self._response

    def frames(self, output: RequestOutput) -> str:
        """Return the events of what is new of a streamed response."""
        begin = [] if self._num_events else [self._state("created"), self._state("in_progress")]
        return named_frames(begin + self._events(output))

    def failed(self, error: APIError) -> bytes:
        """Return the events that end a response with an error."""
        found = error.body["error"]
        is_clients = found["type"] == "invalid_request_error"
        code = found["code"] or ("invalid_prompt" if is_clients else "server_error")
        self._response["error"] = {"code": code, "message": found["message"] or ""}
        self._response["status"] = "failed"
        return named_frames(self._finish()).encode()

    def _events(self, output: RequestOutput) -> list[Event]:
        """Return the events of what is new of the answer; at its end, set its status and usage."""
        (completion,) = output.outputs
        parts = self._reader.parts(completion)
        events = [event for part in parts for event in self._add(part)]
        if completion.finish_reason is not None:
            self._end(output, completion)
            events += self._finish()
        return events

    def _end(self, output: RequestOutput, completion: CompletionOutput) -> None:
        status = "completed"
        response = self._response
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
            "output_tokens": self._reader.num_output,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": num_prompt + self._reader.num_output,
        }

    def _add(self, part: Part) -> Iterator[Event]:
        match part:
            case TextDelta():
                if self._kind != "message":
                    yield from self._open_message()
                yield from self._grow_text(part.text, logprobs=[])
            case ReasoningDelta():
                if self._kind != "reasoning":
                    text = {"type": "reasoning_text", "text": ""}
                    yield from self._open("reasoning", text, summary=[], content=[])
                yield from self._grow_text(part.text)
            case ToolCallStart():
                tool = self._tools.get(part.name, CalledTool(part.name))
                kind = "custom_tool_call" if tool.is_custom else "function_call"
                fields: dict[str, Any] = {"input" if tool.is_custom else "arguments": ""}
                if tool.namespace is not None:
                    fields["namespace"] = tool.namespace
                yield from self._open(kind, call_id=part.call_id, name=tool.name, **fields)
            case ToolCallArguments() if self._kind == "custom_tool_call":
                self._arguments += part.text  # the text in it is certain at its end
            case ToolCallArguments():
                assert self._item is not None
                self._item["arguments"] += part.text
                yield self._of_item("function_call_arguments.delta", delta=part.text)

    def _close(self, status: str) -> Iterator[Event]:
        """Close the item that grows."""
        item = self._item
        if item is None:
            return
        item["status"] = status
        if self._kind == "custom_tool_call":
            text = item["input"] = custom_input(self._arguments)
            self._arguments = ""
            yield self._of_item("custom_tool_call_input.delta", delta=text)
            yield self._of_item("custom_tool_call_input.done", input=text)
        elif self._kind == "function_call":
            fields = {name: item[name] for name in ("name", "arguments")}
            yield self._of_item("function_call_arguments.done", **fields)
        else:
            (part,) = item["content"]
            text = part["text"]
            more: dict[str, Any] = {"logprobs": []} if self._kind == "message" else {}
            if self._kind == "reasoning" and self._encodes_reasoning:
                item["encrypted_content"] = _ENCODED + base64.b64encode(text.encode()).decode()
            yield self._of_item(f"{part['type']}.done", content_index=0, text=text, **more)
            yield self._of_item("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", output_index=self._index, item=item)
        self._item = None

    def _finish(self) -> Iterator[Event]:
        """Close the response, whose status, usage and details are set."""
        status = self._response["status"]
        if not self._response["output"] and status != "failed":
            yield from self._open_message()
        yield from self._close("completed" if status == "completed" else "incomplete")
        yield self._state(status)

    @property
    def _index(self) -> int:
        return len(self._response["output"]) - 1

    @property
    def _kind(self) -> str | None:
        return None if self._item is None else self._item["type"]

    def _open_message(self) -> Iterator[Event]:
        text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._open("message", text, role="assistant", content=[])

    def _open(
        self, kind: str, text: dict[str, Any] | None = None, **fields: Any
    ) -> Iterator[Event]:
        """Close the item that grows and begin the next, with an empty text if it has one."""
        yield from self._close("completed")
        head = {"id": f"{_PREFIXES[kind]}_{uuid4().hex}", "type": kind, "status": "in_progress"}
        self._item = {**head, **fields}
        self._response["output"].append(self._item)
        yield self._event("output_item.added", output_index=self._index, item=self._item)
        if text is not None:
            self._item["content"].append(text)
            yield self._of_item("content_part.added", content_index=0, part=text)

    def _grow_text(self, text: str, **fields: Any) -> Iterator[Event]:
        assert self._item is not None
        (part,) = self._item["content"]
        part["text"] += text
        yield self._of_item(f"{part['type']}.delta", content_index=0, delta=text, **fields)

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=self._index, **fields)

    def _state(self, kind: str) -> Event:
        return self._event(kind, response=self._response)

    def _event(self, kind: str, **fields: Any) -> Event:
        """Return an event with what its fields are now: they may grow afterwards."""
        number = self._num_events
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": number, **copy.deepcopy(fields)}
