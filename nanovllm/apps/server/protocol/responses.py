"""Requests of /v1/responses: text, and tools that the client calls."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from nanovllm.apps.server.output_parsers.answer_format import ToolChoice
from nanovllm.apps.server.protocol.chat import MAX_ITEMS, ConversationRequest, SentBack, Tool
from nanovllm.apps.server.protocol.common import (
    TEXT_OR_LIST,
    JSONSchema,
    Objects,
    RequestModel,
    check_schema,
    refused,
)
from nanovllm.apps.server.protocol.response_tools import (
    FEW_TOOLS,
    AnyTool,
    CalledTool,
    CustomTool,
    NamedFunction,
    functions,
)
from nanovllm.options.other_names import OtherName, other_names
from nanovllm.options.validation import shown

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
    """What the model thought before it answered."""

    type: Literal["reasoning"]
    content: Objects | None = None
    summary: Objects | None = None
    encrypted_content: str | None = None
    """Read if there is no content; that of another server cannot be."""


class InputCall(SentBack):
    """A function that the model called."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None


class InputCustomCall(SentBack):
    """A custom tool that the model called."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str = ""


class InputCallOutput(InputItem):
    """What a tool returned."""

    ignored: ClassVar[frozenset[str]] = InputItem.ignored | {"name"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Objects | None


class InputReference(SentBack):
    """Stands for an item of a stored response."""

    type: Literal["item_reference"]
    id: str


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
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReference, Tag("item_reference")],
    Discriminator(
        _kind_of,
        custom_error_type="item_type",
        custom_error_message="must be of type message, reasoning, function_call, "
        "function_call_output, custom_tool_call, custom_tool_call_output or item_reference",
    ),
]
InputItems = Annotated[
    list[AnyInputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
]


class TextFormat(JSONSchema):
    """What form the text must have."""

    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        check_schema(self.type, self, "schema")
        return self


class TextOptions(RequestModel):
    """What the text must be."""

    others: ClassVar[Mapping[str, OtherName]] = other_names({"verbosity": ("medium",)})

    format: TextFormat | None = None


class ReasoningOptions(RequestModel):
    """How the model should reason."""

    others: ClassVar[Mapping[str, OtherName]] = other_names({"mode": ("standard",)})
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
            {
                "background enable_response_messages": (False,),
                "top_logprobs": (0,),
                "conversation": (),
            }
        ),
    }

    not_taken: ClassVar[frozenset[str]] = frozenset(_OF_OTHER_ROUTES)
    ignored: ClassVar[frozenset[str]] = ConversationRequest.ignored | {"client_metadata"}
    empty_is_absent = ConversationRequest.empty_is_absent | {
        *("text", "tool_choice", "reasoning", "previous_response_id")
    }
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
    store: bool | None = None
    """Whether `previous_response_id` of later requests may name the response; true if not given."""
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    """The response whose conversation goes on with `input`; its instructions do not hold on."""
    truncation: Literal["auto", "disabled"] | None = None
    """"auto" keeps the end of a conversation that leaves too little room for the answer."""
    metadata: Annotated[dict[str, str], Field(max_length=128)] | None = None
    """Returned with the answer."""

    @property
    def functions(self) -> list[Tool]:
        if self.tool_choice == "none":
            return []
        return [function for function, _ in functions(self.tools or ())]

    @property
    def choice(self) -> ToolChoice:
        return self.tool_choice or "auto"

    def called_tools(self) -> dict[str, CalledTool]:
        """Return what the client calls each tool, by the name of the function in its place."""
        return {called.function_name: called for _, called in functions(self.tools or ())}

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
