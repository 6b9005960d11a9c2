"""How a chat template takes tools, calls and their results: found out by rendering.

The words of a template do not say it: SmolLM3's takes tools by another name, that of DeepSeek's
distillates calls without tools.
"""

import functools
import itertools
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, get_args

from nanovllm.chat.template_process import TemplateRefusalError

Render = Callable[[dict[str, Any]], str]
"""Returns the text that a template makes of variables; raises TemplateRefusalError."""

ToolsPlace = Literal["tools", "xml_tools", "system.tools", "system.functions"]
"""Where a template reads tools: in a variable, or as JSON text in a key of the system message."""
_PLACES: tuple[ToolsPlace, ...] = get_args(ToolsPlace)

CALLED = "probe_call_k3v"
_TOOL = "probe_tool_q7x"
_VALUES = ("probe-value-5wz", "probe-value-9kd")
_RESULT = "probe-result-8hj"
_SYSTEM = "probe-system-2fd"
_TEXT = "probe-text-6mc"
_PROPERTIES = {"key": {"type": "string", "description": "A key"}}
_FUNCTION = {
    "name": _TOOL,
    "description": "A tool",
    "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["key"]},
}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_USER = {"role": "user", "content": "Hello"}
NAMED_ID = "functions.{name}:{number}"
"""The id of a call in templates that write it in place of the name; Kimi's do."""
_RESULT_ROLES = ("tool", "tool_response", "tool_results", "observation", "environment")


class TemplateShape(NamedTuple):
    """How a chat template takes what it may know of tools."""

    tools: ToolsPlace | None = "tools"  # where it reads tools; None: it shows none
    shows_calls: bool = True
    content: str | None = ""  # the content of a message that has calls only
    arguments_are_text: bool = False
    """Whether the arguments of calls are JSON text; otherwise they are dictionaries."""
    result_role: str | None = "tool"
    """The role of a call's result; None: no role is known that shows one."""
    takes_system: bool = True  # whether it shows a system message
    wants_turns: bool = False  # whether it refuses two messages of the user in a row
    splits_text: bool = False
    """Whether text next to calls must be a message before them, or it is lost."""
    splits_calls: bool = False  # whether each call must be a message
    ids_are_named: bool = False
    """Whether it shows of a call's name only what the id has: ids must be `NAMED_ID`."""
    written: str = ""
    """An answer with a call of the function `CALLED`, as it writes it; "" if that is not known."""


def find_shape(render: Render, template: str, *, has_tools: bool) -> TemplateShape:
    """Return how a template, which `render` renders, takes tools, calls and results.

    `has_tools` is whether the conversation has tools: some templates show calls only then.

    Raises:
        TemplateError: the template takes too much time or memory.
    """
    knows = "tool" in template or "function" in template
    places = _PLACES if has_tools and knows else ()
    place = next((each for each in places if _TOOL in _text(render, [_USER], each)), None)
    if not knows or (has_tools and place is None):
        return TemplateShape(None, False, "", False, None, *_manners(render))
    found = []
    roles = [role for role in _RESULT_ROLES if role == "tool" or role in template]
    # Content next to calls, whether arguments are a text, and whether ids are named.
    for role, content, as_text, ids_are_named in itertools.product(
        roles, ("", None), (False, True), (False, True)
    ):
        shape = _with_calls(render, place, content, as_text, role, ids_are_named)
        if shape.shows_calls and shape.result_role is not None:
            return shape
        found.append(shape)
    best = max(found, key=lambda shape: (shape.shows_calls, shape.result_role is not None))
    takes_system, wants_turns = _manners(render)
    return best._replace(takes_system=takes_system, wants_turns=wants_turns)


def _with_calls(
    render: Render,
    place: ToolsPlace | None,
    content: str | None,
    as_text: bool,
    role: str,
    ids_are_named: bool,
) -> TemplateShape:
    """Return the shape in which messages with calls are such, as far as it shows them."""

    def shows(expected: Collection[str], *messages: dict[str, Any]) -> bool:
        text = _text(render, _round(role, *messages), place)
        return all(part in text for part in expected)

    made = functools.partial(_calling, as_text=as_text, ids_are_named=ids_are_named)
    first, second = (made(content, [number]) for number in (0, 1))
    both = made(content, [0, 1])
    beside = made(_TEXT, [0])
    says = {"role": "assistant", "content": _TEXT}
    result_role = role if shows([_RESULT], first) else None
    if not shows([CALLED, _VALUES[0]], first):
        return TemplateShape(place, False, "", False, result_role)
    splits_text = not shows([_TEXT, _VALUES[0]], beside) and shows([_TEXT, _VALUES[0]], says, first)
    if not splits_text and not shows(_VALUES[:1], beside):
        return TemplateShape(place, False, "", False, result_role)
    splits_calls = not shows(_VALUES, both) and shows(_VALUES, first, second)
    prompt, text = (_text(render, messages, place) for messages in ([_USER], _round(role, first)))
    return TemplateShape(
        place,
        True,
        content,
        as_text,
        result_role,
        splits_text=splits_text,
        splits_calls=splits_calls,
        ids_are_named=ids_are_named,
        written=text[len(prompt) :] if prompt and text.startswith(prompt) else "",
    )


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
        system = conversation[0]
        conversation = conversation[1:]
    shown = json.dumps(functions, ensure_ascii=False)
    return [{**system, key: shown}, *conversation], {"tools": tools}


def _text(render: Render, messages: list[dict[str, Any]], place: ToolsPlace | None = None) -> str:
    """Return the rendered text; "" if the template refuses the messages."""
    variables: dict[str, Any] = {}
    if place is not None:
        messages, variables = place_tools(messages, _TOOLS, place)
    try:
        return render({**variables, "messages": messages})
    except TemplateRefusalError:
        return ""


def _calling(
    content: str | None, numbers: Sequence[int], *, as_text: bool, ids_are_named: bool
) -> dict[str, Any]:
    """Return a message with these calls. Mistral's templates demand such ids."""
    calls = []
    for number in numbers:
        arguments = {"key": _VALUES[number]}
        function = {"name": CALLED, "arguments": json.dumps(arguments) if as_text else arguments}
        call_id = NAMED_ID if ids_are_named else "probe000{number}"
        call_id = call_id.format(name=CALLED, number=number)
        calls.append({"id": call_id, "type": "function", "function": function})
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _round(result_role: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a conversation with these messages of the assistant, and a result for each call."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    result = {"role": result_role, "name": CALLED, "content": _RESULT}
    results = [{**result, "tool_call_id": call["id"]} for call in calls]
    return [_USER, *messages, *results, {"role": "assistant", "content": "Done"}, _USER]
