"""Requests of /v1/chat/completions, and what other conversations share with them.

Types only: `nanovllm.chat.openai_messages` prepares messages for templates.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from nanovllm.apps.server.output_parsers.answer_format import ToolChoice
from nanovllm.apps.server.protocol.common import (
    GenerationRequest,
    Objects,
    RequestModel,
    few_in_all,
    refused,
)
from nanovllm.chat.openai_messages import counts_as_absent, is_empty
from nanovllm.options.other_names import OtherName, other_names

MAX_VALUES = 2**15
"""JSON values in the schemas of a request's tools: each is looked at."""
MAX_ITEMS = 4096
"""Of a conversation."""
MAX_CALLS = 128
"""Of a message."""
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


def check_size(schemas: Iterable[Any], field: str) -> None:
    """Refuse schemas, in this field of the model, that have too many values in all."""
    unread = list(schemas)
    num_values = len(unread)
    while unread:
        value = unread.pop()
        if isinstance(value, dict | list):
            num_values += len(value)
            if num_values > MAX_VALUES:
                raise refused(
                    field,
                    f"the schemas of tools have more than {MAX_VALUES} values: send fewer tools, "
                    "or simpler ones",
                )
            unread += value.values() if isinstance(value, dict) else value


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
        return self


class ChatTool(RequestModel):
    type: Literal["function"]
    function: Tool


ChatTools = Annotated[list[ChatTool], Field(max_length=128, fail_fast=True)]


class FunctionName(RequestModel):
    name: str


class NamedToolChoice(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionName


class SentBack(RequestModel):
    """A part of an earlier answer. What client libraries add to it is dropped, and so is what is
    empty: it means what null does.
    """

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = cls.model_fields.keys()
        return {name: v for name, v in given.items() if name in known and not is_empty(v)}


class EarlierFunction(SentBack):
    name: str
    arguments: str | dict[str, Any] | None = None
    """A JSON text; one that is not an object is passed on as it is."""


class EarlierCall(SentBack):
    id: str | None = None
    type: Literal["function"] = "function"
    function: EarlierFunction


class Message(RequestModel):
    """A message of a conversation. The chat template reads further fields where it knows them."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Objects | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = Field(default=None, max_length=MAX_CALLS, fail_fast=True)
    tool_call_id: str | None = None
    function_call: EarlierFunction | None = None
    """OpenAI's form before there were tools."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        """Let every field pass, but for empty ones that mean what null does."""
        if not isinstance(given, dict):
            return given
        return {name: v for name, v in given.items() if not counts_as_absent(name, v)}


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
    few_in_all("tool_calls", "tool_calls", MAX_ITEMS),
]
"""A conversation."""


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
