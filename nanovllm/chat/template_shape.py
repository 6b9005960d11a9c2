"""How a chat template takes tools, calls and their results: found out by rendering.

The words of a template do not say it: SmolLM3's takes tools by another name, that of DeepSeek's
distillates calls without tools. Knows no requests and no token ids.
"""

import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from nanovllm.chat.template_process import TemplateError, TemplateLimitError

Render = Callable[[dict[str, Any]], str]
"""Returns the text that a template makes of variables; raises TemplateError."""

ToolsPlace = Literal["tools", "xml_tools", "system.tools", "system.functions"]
"""Where a template reads tools: in a variable, or as JSON text in a key of the system message."""
_PLACES: tuple[ToolsPlace, ...] = get_args(ToolsPlace)

_TOOL, _CALLED, _VALUE = "probe_tool_q7x", "probe_call_k3v", "probe-value-5wz"
_RESULT, _SYSTEM, _TEXT = "probe-result-8hj", "probe-system-2fd", "probe-text-6mc"
_PROPERTIES = {"key": {"type": "string", "description": "A key"}}
_FUNCTION = {
    "name": _TOOL,
    "description": "A tool",
    "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["key"]},
}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_USER = {"role": "user", "content": "Hello"}
_CALLS_IN = [("", False), ("", True), (None, False), (None, True)]
"""Content beside calls, and whether arguments are a text, in the order in which they are tried."""
_RESULT_ROLES = ("tool", "tool_response", "tool_results", "observation", "environment")


class TemplateShape(NamedTuple):
    """How a chat template takes what it may know of tools."""

    tools: ToolsPlace | None = "tools"
    """Where it reads tools; None: it shows none."""
    shows_calls: bool = True
    content: str | None = ""
    """The content of a message that has calls only."""
    arguments_are_text: bool = False
    """Whether the arguments of calls are JSON text; else they are dictionaries."""
    result_role: str | None = "tool"
    """The role of a call's result; None: no role is known that shows one."""
    takes_system: bool = True
    """Whether it shows a system message."""
    wants_turns: bool = False
    """Whether it refuses two messages of the user in a row."""


def find_shape(render: Render, template: str, *, has_tools: bool) -> TemplateShape:
    """Return how a template takes tools, calls and results.

    Args:
        render: renders `template`.
        has_tools: whether the conversation comes with tools. Some templates show calls only then.

    Raises:
        TemplateLimitError: the template takes too much time or memory.
    """
    knows = "tool" in template or "function" in template
    place = _tools_place(render, template) if has_tools and knows else None
    if not knows or (has_tools and place is None):
        return TemplateShape(None, False, "", False, None, *_manners(render))
    roles = [role for role in _RESULT_ROLES if role == "tool" or role in template]
    seen = []
    for role in roles:
        for content, as_text in _CALLS_IN:
            text = _text(render, _with_call(content, as_text, role), place)
            beside = _text(render, _with_call(_TEXT, as_text, role), place)
            calls = all(_CALLED in found and _VALUE in found for found in (text, beside))
            result = _RESULT in text
            shape = TemplateShape(
                place, calls, content if calls else "", calls and as_text, role if result else None
            )
            if calls and result:
                return shape
            seen.append(shape)
    found = max(seen, key=lambda shape: (shape.shows_calls, shape.result_role is not None))
    takes_system, wants_turns = _manners(render)
    return found._replace(takes_system=takes_system, wants_turns=wants_turns)


def _manners(render: Render) -> tuple[bool, bool]:
    """Return whether a template shows a system message, and whether it wants turns."""
    system = {"role": "system", "content": _SYSTEM}
    again = {"role": "user", "content": _TEXT}
    return _SYSTEM in _text(render, [system, _USER]), _TEXT not in _text(render, [_USER, again])


def place_tools(
    conversation: list[dict[str, Any]], tools: Any, place: ToolsPlace
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a conversation, and variables of the template, that have the tools at their place."""
    owner, _, key = place.rpartition(".")
    if not owner:
        return conversation, {"tools": tools, place: tools}
    functions = [tool.get("function", tool) for tool in tools]
    system = {"role": "system", "content": "You are a helpful assistant with some tools."}
    if conversation[0]["role"] == "system":
        system, conversation = conversation[0], conversation[1:]
    shown = json.dumps(functions, ensure_ascii=False)
    return [{**system, key: shown}, *conversation], {"tools": tools}


def _tools_place(render: Render, template: str) -> ToolsPlace | None:
    """Return the first place whose tools are shown."""
    return next((p for p in _PLACES if _TOOL in _text(render, [_USER], p)), None)


def _text(render: Render, messages: list[dict[str, Any]], place: ToolsPlace | None = None) -> str:
    """Return the rendered text; "" if the template refuses the messages."""
    variables: dict[str, Any] = {}
    if place is not None:
        messages, variables = place_tools(messages, _TOOLS, place)
    try:
        return render({**variables, "messages": messages})
    except TemplateLimitError:
        raise
    except TemplateError:
        return ""


def _with_call(content: str | None, as_text: bool, result_role: str) -> list[dict[str, Any]]:
    """Return a conversation with a call. Mistral's templates demand such an id."""
    arguments = {"key": _VALUE}
    function = {"name": _CALLED, "arguments": json.dumps(arguments) if as_text else arguments}
    call = {"id": "probe0001", "type": "function", "function": function}
    result = {"role": result_role, "name": _CALLED, "tool_call_id": "probe0001", "content": _RESULT}
    return [
        _USER,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        result,
        {"role": "assistant", "content": "Done"},
        _USER,
    ]
