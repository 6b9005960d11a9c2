"""Tools in conversations: as chat templates take them, and as text for templates that show none."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Any

from nanovllm.chat.openai_messages import fields_of
from nanovllm.chat.template_process import plain_value
from nanovllm.chat.template_shape import NAMED_ID, TemplateShape, place_tools

_INSTRUCTIONS = """\
# Tools

You may call functions to help with the user's request. The functions are within <tools></tools>:
<tools>
{tools}
</tools>

For each call, write a JSON object with the function's name and arguments within \
<tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def knows_tools(template: str) -> bool:
    """Whether the words of a chat template suggest that it shows tools, or calls of them."""
    return re.search(r"\b(tools|tool_calls)\b", template) is not None


def shows_pythonic_calls(template: str) -> bool:
    """Whether a chat template is LFM2's, whose calls are a Python list."""
    return re.search(r"<\|tool_(call|list)_start\|>|List of tools: \[", template) is not None


def is_harmony(template: str) -> bool:
    """Whether a chat template writes harmony, the format of gpt-oss."""
    return "<|channel|>" in template and "<|message|>" in template


def fitted(
    conversation: Seq[Mapping[str, Any]], tools: Any, template: str, shape: TemplateShape
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a conversation, and variables of the template, such that all of it is in the text.

    What the template, by its `shape`, does not show itself becomes text of a message.
    """
    if shape.ids_are_named:
        conversation = _with_named_ids(conversation)
    written = "" if tools and shape.tools is None else template  # tools as text are Hermes'
    plain = [
        piece
        for message in conversation
        for piece in _as_template_takes_it(message, written, shape)
    ]
    plain = _with_results(plain, shape)
    if not tools:
        return plain, {"tools": tools}
    if shape.tools is None:
        return _with_tools_as_text(plain, tools, shape), {"tools": tools}
    return place_tools(plain, [fields_of(tool) for tool in tools], shape.tools)


def with_thinking(conversation: Seq[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose reasoning has the names, too, that some templates give it."""
    plain = [dict(message) for message in conversation]
    for message in plain:
        if "reasoning_content" in message:
            for name in ("thinking", "tool_plan"):
                message.setdefault(name, message["reasoning_content"])
    return plain


def completed(tools: Any, *, parameters: bool = True) -> Any:
    """Return tools whose functions have a description, as some templates demand, and parameters."""
    if not isinstance(tools, list | tuple):
        return tools
    found = []
    for tool in map(fields_of, tools):
        function = fields_of(tool.get("function")) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping):
            function = {"description": "", **function}
            if parameters:
                given = function.get("parameters") or {}
                function["parameters"] = {"type": "object", "properties": {}, **given}
            tool = {**tool, "function": function}
        found.append(tool)
    return found


def _as_template_takes_it(
    message: Mapping[str, Any], template: str, shape: TemplateShape
) -> list[dict[str, Any]]:
    """Return a message with its calls as a template takes them, or as text; or its pieces."""
    if not message.get("tool_calls"):
        return [dict(message)]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    content = message.get("content")
    calls = message["tool_calls"]
    if not shape.shows_calls:
        return [{**plain, "content": _joined(content, _written(calls, template))}]
    if shape.arguments_are_text:
        calls = [_with_text_arguments(call) for call in calls]
    pieces = [[call] for call in calls] if shape.splits_calls else [calls]
    if content and not shape.splits_text:
        messages = [{**plain, "tool_calls": pieces.pop(0)}]
    else:
        messages = [plain] if content else []
    for piece in pieces:
        following = {"role": message["role"]} if messages else plain
        messages.append({**following, "content": shape.content, "tool_calls": piece})
    return messages


def _with_text_arguments(call: Any) -> Any:
    function = _function(call)
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    function = {**function, "arguments": _json(function.get("arguments") or {})}
    return {**call, "function": function} if "function" in call else function


def _with_named_ids(conversation: Seq[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose calls have the names of their functions in their ids.

    Results follow: by their ids, or in order where they have none. Ids that are named stay.
    """
    plain = [dict(message) for message in conversation]
    ids: dict[str, str] = {}
    waiting: list[str] = []  # calls that have no result yet
    count = 0
    for message in plain:
        calls = []
        for call in message.get("tool_calls", ()):
            name, old = _function(call)["name"], call.get("id")
            begin = NAMED_ID.format(name=name, number="")
            is_named = old is not None and old.startswith(begin) and old[len(begin) :].isdecimal()
            new = old if is_named else NAMED_ID.format(name=name, number=count)
            calls.append({**call, "id": new})
            ids[old or new] = new
            waiting.append(new)
            count += 1
        if calls:
            message["tool_calls"] = calls
        elif message["role"] == "tool":
            new = ids.get(message.get("tool_call_id") or "", waiting[0] if waiting else None)
            if new is not None:
                message["tool_call_id"] = new
            waiting = [call_id for call_id in waiting if call_id != new]
    return plain


def _written(calls: Seq[Any], template: str) -> str:
    """Return calls as the model of a template writes them; in the Hermes format if unknown."""
    functions = [_function(call) for call in calls]
    if shows_pythonic_calls(template):
        return f"<|tool_call_start|>[{', '.join(map(_pythonic, functions))}]<|tool_call_end|>"
    if "<function_calls>" in template:
        lines = (_pythonic(function, _json) for function in functions)
        return "<function_calls>\n" + "\n".join(lines) + "\n</function_calls>"
    if "<|/tool|>" in template:
        return f"<|tool_call|>{_json(functions)}<|/tool_call|>"
    if "<|tool_call|>" in template:
        return f"<|tool_call|>{_json(functions)}"
    if "<tool_calls>[" in template:
        return f"<tool_calls>{_json(functions)}</tool_calls>"
    return "\n".join(f"<tool_call>\n{_json(function)}\n</tool_call>" for function in functions)


def _pythonic(function: Mapping[str, Any], written: Callable[[Any], str] = repr) -> str:
    """Return a call as LFM2 writes it; Olmo writes values as JSON."""
    arguments = function.get("arguments", {})
    given = arguments.items() if isinstance(arguments, Mapping) else ()
    return f"{function['name']}({', '.join(f'{key}={written(value)}' for key, value in given)})"


def _function(call: Any) -> Any:
    """Return the name and the arguments of a call."""
    return call["function"] if isinstance(call, Mapping) and "function" in call else call


def _joined(content: Any, text: str) -> str:
    return "\n".join(part for part in (content, text) if part)


def _with_results(
    conversation: Seq[Mapping[str, Any]], shape: TemplateShape
) -> list[dict[str, Any]]:
    """Return a conversation with results of calls in messages of a role that the template knows.

    Without one they become a message of the user, in Hermes' words: one for consecutive results,
    and with what the user says after them if the template wants turns.
    """
    role = shape.result_role
    plain: list[dict[str, Any]] = []
    was_result = False
    for message in conversation:
        is_result = message["role"] == "tool"
        if is_result and role is None:
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            message = {"role": "user", "content": text}
        elif is_result:
            message = {**message, "role": role}
        if (
            was_result
            and role is None
            and (is_result or (shape.wants_turns and message["role"] == "user"))
        ):
            plain[-1]["content"] = _joined(plain[-1]["content"], message.get("content") or "")
        else:
            plain.append(dict(message))
        was_result = is_result
    return plain


def _with_tools_as_text(
    plain: list[dict[str, Any]], tools: Seq[Any], shape: TemplateShape
) -> list[dict[str, Any]]:
    """Return a conversation for a template that knows no tools, in the words of the Hermes models.

    The tools go into the system message, or before the user's first words if the template knows
    none. Calls are in the text of their message already, and results in messages of the user.
    """
    text = _INSTRUCTIONS.format(tools="\n".join(_json(fields_of(tool)) for tool in tools))
    if shape.takes_system and plain[0]["role"] == "system":
        plain[0]["content"] = f"{plain[0].get('content') or ''}\n\n{text}".lstrip()
        return plain
    if shape.takes_system:
        return [{"role": "system", "content": text}, *plain]
    first = next((message for message in plain if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": text}, *plain]
    first["content"] = f"{text}\n\n{first.get('content') or ''}".rstrip()
    return plain


def for_harmony(
    conversation: Seq[Mapping[str, Any]], tools: Seq[Any] | None
) -> tuple[list[dict[str, Any]], Seq[Any] | None]:
    """Return a conversation and its tools for gpt-oss's template.

    The template reads reasoning under the name "thinking"; next to calls it takes either reasoning
    or text, so here the text joins the reasoning. Of several calls in a message it takes one, so
    each gets its own. Functions need a description.
    """
    plain = with_thinking(_one_call_each(conversation))
    for message in plain:
        if message.get("tool_calls") and message.get("thinking") and message.get("content"):
            message["thinking"] += f"\n{message.pop('content')}"
    return plain, completed(tools, parameters=False)


def _one_call_each(conversation: Seq[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose messages have one call at most, each before its result."""
    told: list[dict[str, Any]] = []
    index = 0
    while index < len(conversation):
        message = dict(conversation[index])
        index += 1
        if len(message.get("tool_calls", ())) < 2:
            told.append(message)
            continue
        results = list(itertools.takewhile(lambda m: m["role"] == "tool", conversation[index:]))
        index += len(results)
        for number, call in enumerate(message["tool_calls"]):
            more = {"role": "assistant", "content": ""} if number else message
            told.append({**more, "tool_calls": [call]})
            found = _result_of(call, results)
            told += [dict(results.pop(found))] if found is not None else []
        told += map(dict, results)
    return told


def _result_of(call: Mapping[str, Any], results: Seq[Mapping[str, Any]]) -> int | None:
    """Return which of the results is that of a call: the first if they do not say it."""
    ids = [result.get("tool_call_id") for result in results]
    if call.get("id") in ids and call.get("id") is not None:
        return ids.index(call["id"])
    return 0 if results and (call.get("id") is None or ids[0] is None) else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=plain_value)
