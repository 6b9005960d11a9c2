"""Requests of /v1/messages and /v1/messages/count_tokens, by the names of Anthropic's API."""

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from nanovllm.apps.server.output_parsers.answer_format import ToolChoice
from nanovllm.apps.server.protocol.chat import ConversationRequest, FunctionName, SentBack, Tool
from nanovllm.apps.server.protocol.common import (
    TEXT_OR_LIST,
    JSONSchema,
    RequestModel,
    ShortText,
    refused,
    too_many,
)
from nanovllm.options.other_names import OtherName, other_names
from nanovllm.options.validation import shown

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

    ignored: ClassVar[frozenset[str]] = frozenset(
        ["cache_control", "citations", "caller", "toolset_name"]
    )


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


_TextOnly = Annotated[TextBlock | DocumentBlock | SearchResultBlock | FoundTool, _BY_TYPE]


class ToolResultBlock(ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Content[_TextOnly] | None = None
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


def _few_blocks(messages: Any) -> Any:
    """Refuse very many blocks in all: checking each of them takes time."""
    if isinstance(messages, list):
        contents = [m.get("content") for m in messages if isinstance(m, dict)]
        blocks = [block for each in contents if isinstance(each, list) for block in each]
        inner = [block.get("content") for block in blocks if isinstance(block, dict)]
        if len(blocks) + sum(len(each) for each in inner if isinstance(each, list)) > _MAX_BLOCKS:
            raise too_many("blocks", _MAX_BLOCKS)
    return messages


class ClientTool(Tool):
    schema_field: ClassVar[str] = "input_schema"
    ignored: ClassVar[frozenset[str]] = frozenset(
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

    ignored: ClassVar[frozenset[str]] = frozenset(["budget_tokens", "display"])

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
    others: ClassVar[Mapping[str, OtherName]] = {
        **ConversationRequest.others,
        **_OF_OTHER_ROUTES,
        **other_names({"container mcp_servers": ([],)}),
    }
    not_taken: ClassVar[frozenset[str]] = frozenset(_OF_OTHER_ROUTES)
    ignored: ClassVar[frozenset[str]] = ConversationRequest.ignored | {
        *("thread", "cache_control", "context_management", "inference_geo", "speed"),
        *("diagnostics", "user_profile_id", "workspace_id", "betas"),
    }
    empty_is_absent = ConversationRequest.empty_is_absent | {"tool_choice", "output_config"}
    text_form = "output_config.format"

    messages: Annotated[
        list[MessageParam],
        Field(min_length=1, max_length=4096, fail_fast=True),
        BeforeValidator(_few_blocks),
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
        """Return the tools after the last addition and removal, which name defined ones only."""
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
