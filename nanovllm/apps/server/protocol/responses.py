"""Requests of /v1/responses: text, and tools that the client calls.

The model sees functions. A custom tool, whose input is text, is a function with the text as its
only argument. A tool of a namespace has the namespace before its name.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from nanovllm.apps.server.output_parsers.answer_format import ToolChoice
from nanovllm.apps.server.protocol.chat import (
    MAX_ITEMS,
    ConversationRequest,
    FunctionName,
    SentBack,
    Tool,
    ToolName,
)
from nanovllm.apps.server.protocol.common import (
    TEXT_OR_LIST,
    JSONSchema,
    Objects,
    RequestModel,
    check_schema,
    few_in_all,
    refused,
)
from nanovllm.options.other_names import OtherName, other_names
from nanovllm.options.validation import shown

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
    ignored: ClassVar[frozenset[str]] = _IGNORED

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

    ignored: ClassVar[frozenset[str]] = _IGNORED

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
    """Return the text for a custom tool; arguments that are otherwise are passed on whole."""
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

    ignored: ClassVar[frozenset[str]] = frozenset(
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
    ignored: ClassVar[frozenset[str]] = InputItem.ignored | {"name"}

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
    others: ClassVar[Mapping[str, OtherName]] = other_names({"verbosity": ("medium",)})

    format: TextFormat | None = None


class ReasoningOptions(RequestModel):
    others: ClassVar[Mapping[str, OtherName]] = other_names({"mode": ("standard",)})
    # The reasoning is returned as it is, without a summary.
    ignored: ClassVar[frozenset[str]] = frozenset(["context", "summary", "generate_summary"])

    effort: str | None = None
    """Passed to the chat template as reasoning_effort."""


_FEW = Field(max_length=128, fail_fast=True)


class ResponsesRequest(ConversationRequest):
    others: ClassVar[Mapping[str, OtherName]] = {
        **ConversationRequest.others,
        **_OF_OTHER_ROUTES,
        **other_names(
            {
                "background enable_response_messages": (False,),
                "top_logprobs": (0,),
                "conversation previous_response_id": (),
            }
        ),
    }

    not_taken: ClassVar[frozenset[str]] = frozenset(_OF_OTHER_ROUTES)
    ignored: ClassVar[frozenset[str]] = ConversationRequest.ignored | {"client_metadata"}
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
