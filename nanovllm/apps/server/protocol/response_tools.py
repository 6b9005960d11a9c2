"""Tools of /v1/responses, and the functions that the model sees in their place.

A custom tool, whose input is text, is a function with the text as its only argument. A tool of a
namespace has the namespace before its name.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from nanovllm.apps.server.protocol.chat import FunctionName, Tool, ToolName
from nanovllm.apps.server.protocol.common import RequestModel, few_in_all, refused
from nanovllm.options.validation import shown

ONLY_CLIENTS = (
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
    """A function that the model may call."""

    ignored: ClassVar[frozenset[str]] = _IGNORED

    type: Literal["function"]


class CustomFormat(RequestModel):
    """What the input of a custom tool must be."""

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
        raise refused("type", f"the tool {shown(kind)} is not supported: {ONLY_CLIENTS}{hint}")
    return tool


_BY_TYPE = Field(discriminator="type")
_CalledTool = Annotated[FunctionTool | CustomTool, _BY_TYPE, BeforeValidator(_check_kind)]


class Namespace(RequestModel):
    """Tools that belong together."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[_CalledTool], _MANY]


AnyTool = Annotated[FunctionTool | CustomTool | Namespace, _BY_TYPE, BeforeValidator(_check_kind)]


FEW_TOOLS = few_in_all("tools", "tools in namespaces", _MAX_TOOLS)


class NamedFunction(FunctionName):
    """The tool that the answer must call."""

    type: Literal["function", "custom"]


class CalledTool(NamedTuple):
    """What the client calls a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function_name(self) -> str:
        """The name of the function that the model sees."""
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
