"""Requests and answers of /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from nanovllm.apps.server.output_parsers.answer_format import ToolChoice
from nanovllm.apps.server.protocol.common import (
    GenerationRequest,
    Objects,
    RequestModel,
    Usage,
    refused,
)
from nanovllm.apps.server.protocol.request_messages import Messages
from nanovllm.apps.server.protocol.tool_schemas import check_keywords, check_size
from nanovllm.options.other_names import OtherName, other_names

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


class Tool(RequestModel):
    """A function that the model may call."""

    schema_field: ClassVar[str] = "parameters"
    """What the request calls the schema of the arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments."""
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        check_size([self.parameters], self.schema_field)
        check_keywords(self.parameters or {}, self.schema_field)
        return self


class ChatTool(RequestModel):
    """A tool, as chats wrap it."""

    type: Literal["function"]
    function: Tool


ChatTools = Annotated[list[ChatTool], Field(max_length=128, fail_fast=True)]


class FunctionName(RequestModel):
    """Names a function."""

    name: str


class NamedToolChoice(RequestModel):
    """The function that the answer must call."""

    type: Literal["function"] = "function"
    function: FunctionName


class ConversationRequest(GenerationRequest):
    """The fields that chats and responses share."""

    others: ClassVar[Mapping[str, OtherName]] = {
        **GenerationRequest.others,
        **other_names({"chat_template": (), "add_special_tokens": (False,)}),
    }

    text_form: ClassVar[str] = "response_format"
    """The field that says what form the text must have; an answer of calls has none."""

    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def functions(self) -> list[Tool]:
        """The tools that the answer may call."""
        raise NotImplementedError

    @property
    def choice(self) -> ToolChoice:
        """Whether it may or must call them."""
        raise NotImplementedError

    @property
    def may_repeat(self) -> bool:
        """Whether the answer may have several calls."""
        return self.parallel_tool_calls is not False

    @model_validator(mode="after")
    def _check_size_of_tools(self) -> Self:
        check_size((tool.parameters for tool in self.functions), "tools")
        return self

    @model_validator(mode="after")
    def _check_one_form(self) -> Self:
        """Refuse a form of the answer, not only of its text, next to a tool that must be called."""
        for field in self.forms().keys() - {self.text_form}:
            if self.choice not in ("none", "auto"):
                message = f'tool_choice and {field} both say what to write: give one, or "auto"'
                raise refused(field, message)
        return self


class ChatRequest(ConversationRequest):
    """A conversation to answer, and how."""

    others: ClassVar[Mapping[str, OtherName]] = {
        **ConversationRequest.others,
        **other_names(
            {
                "functions function_call": ([], "none"),
                "modalities": (["text"],),
                "echo": (False,),
                "verbosity": ("medium",),
            }
        ),
    }
    empty_is_absent = GenerationRequest.empty_is_absent | {
        *("tools", "tool_choice", "reasoning_effort", "documents")
    }

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ChatTools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    reasoning_effort: str | None = None
    """Passed to the chat template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Objects | None = None

    @property
    def functions(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def choice(self) -> ToolChoice:
        given = self.tool_choice
        return given.function if isinstance(given, NamedToolChoice) else given or "auto"

    @model_validator(mode="after")
    def _check_fields(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "top_logprobs needs logprobs=true")
        if self.tool_choice not in (None, "none", "auto") and self.tools is None:
            raise refused("tool_choice", "tool_choice needs tools")
        return self


class FunctionCall(BaseModel):
    """The function that an answer calls."""

    name: str
    arguments: str
    """A JSON text."""


class ToolCall(BaseModel):
    """A call in an answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class TokenLogprob(BaseModel):
    """The log-probability of a token."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """The same of an answer's token, with those of the most likely tokens."""

    top_logprobs: list[TokenLogprob]


class ChoiceLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens."""

    content: list[ContentLogprob]


class AnswerMessage(BaseModel):
    """An answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same by its older name."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One of n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    """Unix time in seconds."""
    model: str
    service_tier: Literal["default"]
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Any] | None] | None = None


class FunctionCallDelta(BaseModel):
    """What is new of a call."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """What is new of a tool call; the first piece has id and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class Delta(BaseModel):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same by its older name."""
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    """What is new of one of n answers."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """A chunk of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Any] | None] | None = None
