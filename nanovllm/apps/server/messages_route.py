"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of a chat."""

import copy
import hashlib
import itertools
import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError, from_json
from starlette.responses import Response

from nanovllm.apps.server import generation
from nanovllm.apps.server.conversation import (
    AnswerReader,
    Turns,
    count_tokens,
    prepare,
    render,
)
from nanovllm.apps.server.error_bodies import APIError, naming_params
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
    TEXT_OR_LIST,
    ConversationRequest,
    FunctionName,
    JSONSchema,
    Message,
    RequestModel,
    SentBack,
    ShortText,
    Tool,
    few_in_all,
    refused,
)
from nanovllm.apps.server.sse import error_frames, json_response, named_frames, sse
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import InvalidRequestError
from nanovllm.options.other_names import other_names
from nanovllm.options.validation import shown
from nanovllm.outputs import CompletionOutput, RequestOutput

router = APIRouter(tags=["messages"], route_class=JSONRoute)

Event = dict[str, Any]

_STOP_REASONS: dict[str | None, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""A line of Claude Code's that differs in each request. In the prompt, it would leave nothing of a
conversation to be found in the prefix cache."""
_BETWEEN_PARTS = {"content": "\n\n", "reasoning_content": "\n"}
_ONLY_CUSTOM = "this server runs no tools itself; define it as a custom tool with an input_schema"
_OF_OTHER_ROUTES = other_names(
    {
        "n": (1,),
        "return_token_ids return_tokens_as_token_ids": (False,),
        "stop user response_format stream_options parallel_tool_calls prompt_logprobs": (),
    }
)
_MAX_BLOCKS = 2**14
_MANY = Field(max_length=4096, fail_fast=True)
_FEW = Field(max_length=128, fail_fast=True)
_BY_TYPE = Field(discriminator="type")


class ContentBlock(RequestModel):
    """A part of a message. Every prompt is cached, so marks of what to cache are dropped."""

    ignored = frozenset(["cache_control", "citations", "caller", "toolset_name"])


class TextBlock(ContentBlock):
    type: Literal["text"]
    text: str


def _of_type(kind: str) -> BeforeValidator:
    """Return a check that an object has this type; its error is that of a union of types."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and given.get("type", kind) != kind:
            context = {"tag": given["type"], "expected_tags": f"'{kind}'"}
            raise PydanticCustomError(
                "union_tag_invalid", "must be of type {expected_tags}", context
            )
        return given

    return BeforeValidator(check)


_OnlyText = Annotated[TextBlock, _of_type("text")]
BlockType = TypeVar("BlockType")
_Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[BlockType], _MANY, Tag("list")], TEXT_OR_LIST
]


class PlainTextSource(RequestModel):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(RequestModel):
    type: Literal["content"]
    content: _Content[_OnlyText]


class DocumentBlock(ContentBlock):
    type: Literal["document"]
    source: Annotated[PlainTextSource | ContentSource, _BY_TYPE]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(ContentBlock):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[_OnlyText], _MANY]


class ImageBlock(ContentBlock):
    """A picture; the chat template's part of that type."""

    type: Literal["image"]
    source: dict[str, Any]


class ThinkingBlock(SentBack):
    """What the model thought before it answered. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str = ""


class RedactedThinkingBlock(SentBack):
    """Thoughts of another server that nobody can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(ContentBlock):
    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]


class FoundTool(ContentBlock):
    """A tool that the client's search of tools found."""

    type: Literal["tool_reference"]
    tool_name: str


_Returned = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | FoundTool, _BY_TYPE
]


class ToolResultBlock(ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Content[_Returned] | None = None
    is_error: bool | None = None


class ToolReference(RequestModel):
    type: Literal["tool_reference"]
    name: str


class ToolChange(ContentBlock):
    """A tool that there is, or is no more, from this message on."""

    type: Literal["tool_addition", "tool_removal"]
    tool: Annotated[ToolReference, _of_type("tool_reference")]


AnyBlock = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolChange,
    _BY_TYPE,
]


class MessageParam(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: _Content[AnyBlock]


class ClientTool(Tool):
    schema_field = "input_schema"
    ignored = frozenset(
        (
            *("cache_control", "input_examples", "allowed_callers"),
            *("defer_loading", "eager_input_streaming"),
        )
    )

    type: Literal["custom"] = "custom"
    parameters: dict[str, Any] = Field(alias="input_schema")

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, given: Any) -> Any:
        """Refuse tools of Anthropic's by name: their schemas are not in the request."""
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in (None, "custom"):
            raise refused("type", f"the tool {shown(kind)} is not supported: {_ONLY_CUSTOM}")
        return given


class ToolChoiceOption(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise refused("name", "a tool_choice of type tool needs a name")
        return self


class Thinking(RequestModel):
    """Whether the model thinks before it answers. How long it does is its own choice."""

    ignored = frozenset(["budget_tokens", "display"])

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(JSONSchema):
    type: Literal["json_schema"]


class OutputConfig(RequestModel):
    effort: str | None = None
    """Passed to the chat template as reasoning_effort."""
    format: OutputFormat | None = None


class RequestMetadata(RequestModel):
    user_id: str | None = None


class CountTokensRequest(ConversationRequest):
    others = (
        ConversationRequest.others
        | _OF_OTHER_ROUTES
        | other_names({"container mcp_servers": ([],)})
    )
    not_taken = frozenset(_OF_OTHER_ROUTES)
    ignored = ConversationRequest.ignored | {
        *("thread", "cache_control", "context_management", "inference_geo", "speed"),
        *("diagnostics", "user_profile_id", "workspace_id", "betas"),
    }
    empty_is_absent = ConversationRequest.empty_is_absent | {"tool_choice", "output_config"}
    text_form = "output_config.format"

    messages: Annotated[
        list[MessageParam],
        Field(min_length=1, max_length=4096, fail_fast=True),
        few_in_all("content", "blocks", _MAX_BLOCKS, depth=2),
    ]
    system: _Content[TextBlock] | None = None
    tools: Annotated[list[ClientTool], _FEW] | None = None
    tool_choice: ToolChoiceOption | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: RequestMetadata | None = None
    """Its user_id is the key of fairness."""

    @property
    def functions(self) -> list[Tool]:
        """The tools by name: clients send them in changing orders, and prompts begin with them.

        Those are meant that there are after the last message.
        """
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return sorted(self._tools(), key=lambda tool: tool.name)

    def _tools(self) -> list[ClientTool]:
        """Return the tools left after all additions and removals; refuse undefined names."""
        tools = self.tools or []
        names = {tool.name for tool in tools}
        removed: set[str] = set()
        contents = [m.content for m in self.messages if not isinstance(m.content, str)]
        for block in itertools.chain.from_iterable(contents):
            if isinstance(block, ToolChange):
                name = block.tool.name
                if name not in names:
                    raise refused("messages", f"a {block.type} names {shown(name)}: define it")
                change = removed.add if block.type == "tool_removal" else removed.discard
                change(name)
        return [tool for tool in tools if tool.name not in removed]

    @property
    def choice(self) -> ToolChoice:
        match self.tool_choice:
            case ToolChoiceOption(type="tool", name=str(name)):
                return FunctionName(name=name)
            case ToolChoiceOption(type="any"):
                return "required"
            case ToolChoiceOption(type="none"):
                return "none"
        return "auto"

    @property
    def may_repeat(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    @property
    def thinks(self) -> bool:
        """Whether the model is to think: only if it is told to, as in Anthropic's API."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def forms(self) -> dict[str, dict[str, Any]]:
        found = super().forms()
        match self.output_config:
            case OutputConfig(format=OutputFormat() as schema):
                found[self.text_form] = schema.form()
        return found

    @model_validator(mode="before")
    @classmethod
    def _check_thread(cls, given: Any) -> Any:
        """Refuse a thread with the code by which Anthropic's client goes on without one."""
        if isinstance(given, dict) and given.get("thread") is not None:
            message = "conversations are not held here: leave thread out, and send all messages"
            raise refused("thread", message, code="thread_unsupported_request")
        return given

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if not self._tools() and self.choice not in ("none", "auto"):
            raise refused("tool_choice", "tool_choice needs tools")
        if self.include_reasoning is None:
            self.include_reasoning = self.thinks
        if self.metadata is not None:
            self.user = self.metadata.user_id
        return self


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stop_sequences: Annotated[list[ShortText], Field(max_length=64, fail_fast=True)] | None = None


@router.post("/v1/messages")
async def answer(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation."""
    server = state_of(request)
    renamed = {"stop": "stop_sequences", **generation.field_names(body)}
    with naming_params(MessagesRequest.model_fields, "messages", renamed):
        place = generation.admit(request, 1, body)
        changes: dict[str, Any] = {}
        if body.stop_sequences:
            changes["stop"] = tuple(body.stop_sequences)
        made = partial(prepare, server, body, _render, max_tokens=body.max_tokens, **changes)
        prompt, params = await place.prepare(made)
        answer = _Answer(server, body, prompt.text or "")
        outputs = await generation.run(place, prompt, params, stream=bool(body.stream))
        if body.stream:
            failed = partial(error_frames, path="/v1/messages")
            return sse(outputs, lambda output: named_frames(answer.events(output)), failed=failed)
        answer.events(await anext(outputs))
        return json_response(answer.message)


@router.post("/v1/messages/count_tokens")
async def count(request: Request, body: CountTokensRequest) -> dict[str, int]:
    """Return how many tokens a conversation has."""
    return {"input_tokens": await count_tokens(request, body, _render, "messages")}


def _render(server: ServerState, body: CountTokensRequest) -> Prompt:
    """Return the prompt. A last message of the model's is continued."""
    variables: dict[str, Any] = {"enable_thinking": body.thinks, "thinking": body.thinks}
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    messages = messages_of(body)
    last = messages[-1]
    continues = last.role == "assistant" and bool(last.content) and not last.tool_calls
    return render(
        server,
        messages,
        tools=body.functions,
        continue_final_message=continues,
        chat_template_kwargs={**variables, **(body.chat_template_kwargs or {})},
    )


def messages_of(body: CountTokensRequest) -> list[Message]:
    """Return the conversation of a request.

    What one side says in several messages becomes one message, as templates want it. The result of
    a tool is a message of its own.
    """
    turns = Turns(f"messages must have at most {MAX_CALLS} tool_use blocks in succession")
    said: list[tuple[str, Any]] = [(message.role, message.content) for message in body.messages]
    for role, content in [("system", body.system or []), *said]:
        if isinstance(content, str):
            _add_text(turns, role, content)
        else:
            for block in content:
                _add_block(turns, role, block)
    if not turns.all:
        raise InvalidRequestError("messages must have some content, got empty lists of blocks")
    return [Message(**{name: _joined(name, v) for name, v in t.items()}) for t in turns.all]


def _add_text(turns: Turns, role: str, text: str) -> None:
    """Append a text to the turn of this role."""
    if role == "system" and not (text := _BILLING.sub("", text, count=1)):
        return
    turns.turn(role).setdefault("content", []).append(text)


def _add_block(turns: Turns, role: str, block: AnyBlock) -> None:
    match block:
        case TextBlock() | DocumentBlock() | SearchResultBlock():
            _add_text(turns, role, _text_of(block))
        case ImageBlock():
            turns.turn(role).setdefault("content", []).append(block.model_dump())
        case ThinkingBlock():
            turn = turns.turn("assistant")
            turn.setdefault("reasoning_content", []).append(block.thinking)
        case ToolUseBlock():
            turns.add_call(block.id, block.name, block.input)
        case ToolResultBlock():
            given = block.content or ""
            if isinstance(given, str):
                given = [TextBlock(type="text", text=given)]
            parts = [
                part.model_dump() if isinstance(part, ImageBlock) else _text_of(part)
                for part in given
            ]
            texts = [part for part in parts if isinstance(part, str)]
            if len(texts) == len(parts):
                parts = ["\n".join(texts)]
            turns.add_result(block.tool_use_id, parts)


def _joined(name: str, value: Any) -> Any:
    """Return the value of a message's field; the parts of a text are joined, except beside
    pictures.
    """
    if name not in _BETWEEN_PARTS:
        return value
    if all(isinstance(part, str) for part in value):
        return _BETWEEN_PARTS[name].join(filter(None, value))
    return [{"type": "text", "text": p} if isinstance(p, str) else p for p in value if p]


def _text_of(block: TextBlock | DocumentBlock | SearchResultBlock | FoundTool) -> str:
    match block:
        case TextBlock(text=text) | FoundTool(tool_name=text):
            return text
        case SearchResultBlock():
            parts: Any = [block.title, block.source, *(part.text for part in block.content)]
        case (
            DocumentBlock(source=PlainTextSource(data=text))
            | DocumentBlock(source=ContentSource(content=str(text)))
        ):
            parts = [block.title, block.context, text]
        case DocumentBlock(source=ContentSource(content=list(blocks))):
            parts = [block.title, block.context, *(part.text for part in blocks)]
    return "\n".join(filter(None, parts))


class _Answer:
    """Puts the parts of an answer into `message`, which grows; each change of it is an event."""

    def __init__(self, server: ServerState, body: MessagesRequest, prompt: str) -> None:
        self._reader = AnswerReader(server, body, prompt)
        self._stop_sequences = frozenset(body.stop_sequences or ())
        self._max_model_len = server.max_model_len
        self._block: dict[str, Any] | None = None  # the last of the content, while it grows
        self._arguments = ""  # of the block, if it is a call
        self.message: dict[str, Any] = {
            "id": f"msg_{body.request_id or uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": server.name_in_answer(body.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def events(self, output: RequestOutput) -> list[Event]:
        """Return the events of what is new of the answer."""
        (completion,) = output.outputs
        is_first = "usage" not in self.message
        parts = self._reader.parts(completion)
        self.message["usage"] = {
            "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": output.num_cached_tokens,
            "output_tokens": self._reader.num_output,
            "output_tokens_details": {"thinking_tokens": 0},
        }
        events = []
        if is_first:
            events += [_event("message_start", message=self.message), _event("ping")]
        for part in parts:
            events += self._add(part)
        if completion.finish_reason is not None:
            events += self._end(completion)
        return events

    def _end(self, completion: CompletionOutput) -> Iterator[Event]:
        """Close the message, and set why it ends."""
        if completion.finish_reason == "abort":
            raise APIError(500, "the request was aborted")
        message = self.message
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
        yield from self._close()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=delta, usage=usage)
        yield _event("message_stop")

    def _add(self, part: Part) -> Iterator[Event]:
        match part:
            case TextDelta():
                yield from self._grow("text", part.text)
            case ReasoningDelta():
                yield from self._grow("thinking", part.text, signature="")
            case ToolCallStart():
                block = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
                yield from self._open(block)
            case ToolCallArguments():
                self._arguments += part.text
                yield self._delta("input_json_delta", partial_json=part.text)

    def _grow(self, kind: str, text: str, **fields: Any) -> Iterator[Event]:
        if self._block is None or self._block["type"] != kind:
            yield from self._open({"type": kind, kind: "", **fields})
        assert self._block is not None
        self._block[kind] += text
        yield self._delta(f"{kind}_delta", **{kind: text})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        """Close the block that grows and begin the next."""
        yield from self._close()
        self._block = block
        self.message["content"].append(block)
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[Event]:
        block, self._block = self._block, None
        if block is None:
            return
        if block["type"] == "thinking":  # clients send it back with the thoughts; it means nothing
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._delta("signature_delta", signature=block["signature"])
        elif block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
            self._arguments = ""
        yield _event("content_block_stop", index=self._index)

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    def _delta(self, kind: str, **fields: Any) -> Event:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _event(kind: str, **fields: Any) -> Event:
    """Return an event with what its fields are now: they may grow afterwards."""
    return {"type": kind, **copy.deepcopy(fields)}


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; of a call that was cut off, those that are there."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
