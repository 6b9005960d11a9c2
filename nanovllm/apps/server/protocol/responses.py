"""Requests of /v1/responses. Text and function tools; nothing is stored."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from nanovllm.apps.server.answers.answer_format import ToolChoice
from nanovllm.apps.server.protocol.chat import ConversationRequest, FunctionName, Tool
from nanovllm.apps.server.protocol.common import (
    TEXT_OR_LIST,
    JSONSchema,
    Objects,
    RequestModel,
    refused,
)
from nanovllm.apps.server.protocol.request_messages import SentBack
from nanovllm.options.other_names import OtherName, other_names
from nanovllm.options.validation import shown

_NOT_STORED = "responses are not stored; send the whole conversation in input"
_ONLY_FUNCTIONS = 'this server calls no tools itself; give functions, of type "function"'
_OF_CHATS = "use /v1/chat/completions"
_OF_OTHER_ROUTES = other_names(
    ("n", (1,), "a response is one answer"),
    ("max_tokens", (), "use max_output_tokens"),
    ("response_format", (), "use text.format"),
    ("prompt_logprobs", (), "use /v1/completions"),
    ("return_token_ids return_tokens_as_token_ids", (False,), _OF_CHATS),
)


class InputItem(RequestModel):
    """A part of the conversation. What only an answer needs is dropped."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        ["id", "status", "phase", "parsed_arguments", "namespace", "caller", "created_by"]
    )
    empty_is_absent = frozenset(["type"])


class InputMessage(InputItem):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Objects


class InputReasoning(SentBack):
    """What the model thought before it answered. Of an encrypted item nothing is read."""

    type: Literal["reasoning"]
    content: Objects | None = None
    summary: Objects | None = None
    encrypted_content: str | None = None


class InputCall(SentBack):
    """A function that the model called."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = None


class InputCallOutput(InputItem):
    """What a function returned."""

    ignored: ClassVar[frozenset[str]] = InputItem.ignored | {"name"}

    type: Literal["function_call_output"]
    call_id: str
    output: str | Objects | None


AnyInputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(
        lambda item: (item.get("type") or "message") if isinstance(item, dict) else None,
        custom_error_type="item_type",
        custom_error_message="must be of type message, reasoning, function_call or "
        f"function_call_output: {_NOT_STORED}",
    ),
]


class FunctionTool(Tool):
    """A function that the model may call."""

    ignored: ClassVar[frozenset[str]] = frozenset(["allowed_callers", "output_schema"])

    type: Literal["function"]


class NamedFunction(FunctionName):
    """The function that the answer must call."""

    others: ClassVar[Mapping[str, OtherName]] = other_names(
        ("mode tools", (), "allowed_tools is not known; leave other tools out of the request"),
    )

    type: Literal["function"]


class TextFormat(JSONSchema):
    """What form the text must have."""

    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if self.type == "json_schema" and self.schema_ is None:
            raise refused("schema", "a format of type json_schema needs a schema")
        return self


class TextOptions(RequestModel):
    """What the text must be."""

    others: ClassVar[Mapping[str, OtherName]] = other_names(
        ("verbosity", ("medium",), "say in a message how long the answer should be"),
    )

    format: TextFormat | None = None


class ReasoningOptions(RequestModel):
    """How the model should reason."""

    others: ClassVar[Mapping[str, OtherName]] = other_names(
        ("mode", ("standard",), "there is one mode only; leave it out"),
    )
    # The reasoning is returned as it is, without a summary.
    ignored: ClassVar[frozenset[str]] = frozenset(["context", "summary", "generate_summary"])

    effort: str | None = None
    """Passed to the chat template as reasoning_effort."""


_FEW = Field(max_length=128, fail_fast=True)


class ResponsesRequest(ConversationRequest):
    """What to answer, and how."""

    others: ClassVar[Mapping[str, OtherName]] = {
        **ConversationRequest.others,
        **_OF_OTHER_ROUTES,
        **other_names(
            ("background", (False,), _NOT_STORED),
            ("previous_response_id conversation prompt previous_input_messages", (), _NOT_STORED),
            ("max_tool_calls", (), _ONLY_FUNCTIONS),
            ("top_logprobs", (0,), _OF_CHATS),
            ("enable_response_messages", (False,), "use /tokenize to see a prompt"),
        ),
    }

    not_taken: ClassVar[frozenset[str]] = frozenset(_OF_OTHER_ROUTES)
    empty_is_absent = ConversationRequest.empty_is_absent | {"text", "tool_choice", "reasoning"}

    input: Annotated[
        Annotated[str, Field(min_length=1), Tag("text")]
        | Annotated[
            list[AnyInputItem], Field(min_length=1, max_length=4096, fail_fast=True), Tag("list")
        ],
        TEXT_OR_LIST,
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], _FEW] | None = None
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"] | None, Tag("word")]
        | Annotated[NamedFunction, Tag("function")],
        Discriminator(lambda value: "function" if isinstance(value, dict | BaseModel) else "word"),
    ] = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], _FEW] | None = None
    """Parts of answers that only hosted tools and encrypted reasoning have; ignored."""
    truncation: Literal["auto", "disabled"] | None = None
    """"auto" keeps the end of a conversation that leaves too little room for the answer."""
    metadata: Annotated[dict[str, str], Field(max_length=128)] | None = None
    """Returned with the answer."""

    @property
    def functions(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def choice(self) -> ToolChoice:
        return self.tool_choice or "auto"

    def forms(self) -> dict[str, dict[str, Any]]:
        found = super().forms()
        match self.text:
            case TextOptions(format=TextFormat(type="json_object")):
                found["text.format"] = {"json_object": True}
            case TextOptions(format=TextFormat(type="json_schema", schema_=schema)):
                found["text.format"] = {"json": schema if isinstance(schema, dict) else {}}
        return found

    @model_validator(mode="before")
    @classmethod
    def _check_tools(cls, given: Any) -> Any:
        """Refuse hosted tools by name."""
        tools = given.get("tools") if isinstance(given, dict) else None
        for tool in tools if isinstance(tools, list) else ():
            kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
            if kind != "function":
                raise refused(
                    "tools", f"the tool {shown(kind)} is not supported: {_ONLY_FUNCTIONS}"
                )
        return given

    @model_validator(mode="after")
    def _check_fields(self) -> "ResponsesRequest":
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise refused("tool_choice", "tool_choice needs tools")
        if "message.output_text.logprobs" in (self.include or ()):
            raise refused("include", "log-probabilities are returned by /v1/chat/completions")
        return self
