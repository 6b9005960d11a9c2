"""Tools in conversations: earlier calls as chat templates expect them, and as text for templates
that know no tools.

Knows no requests and no token ids.
"""

import json
import re
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from nanovllm.chat.messages import fields_of

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
    """Whether a chat template shows tools, or calls of them, to the model."""
    return re.search(r"\b(tools|tool_calls)\b", template) is not None


def shows_pythonic_calls(template: str) -> bool:
    """Whether a chat template is LFM2's, whose calls are a Python list."""
    return re.search(r"<\|tool_(call|list)_start\|>|List of tools: \[", template) is not None


def for_pythonic(conversation: Seq[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return a conversation for one of LFM2's templates.

    They read reasoning under the name "thinking". Most know no calls: then these become text.
    """
    plain = [dict(message) for message in conversation]
    for message in plain:
        if "reasoning_content" in message:
            message.setdefault("thinking", message["reasoning_content"])
        if message.get("tool_calls") and "tool_calls" not in template:
            calls = ", ".join(map(_pythonic, message.pop("tool_calls")))
            text = f"<|tool_call_start|>[{calls}]<|tool_call_end|>"
            message["content"] = f"{message.get('content', '')}{text}"
    return plain


def _pythonic(call: Any) -> str:
    """Return a call as LFM2 writes it."""
    function = call["function"] if isinstance(call, Mapping) and "function" in call else call
    arguments = function.get("arguments", {})
    given = arguments.items() if isinstance(arguments, Mapping) else ()
    return f"{function['name']}({', '.join(f'{key}={value!r}' for key, value in given)})"


def with_tools_as_text(
    conversation: Seq[Mapping[str, Any]], tools: Seq[Any] | None
) -> list[dict[str, Any]]:
    """Return a conversation for a template that knows no tools.

    The tools go into the system message, calls into the text of their message, and results into a
    message of the user, in the words of the Hermes models.
    """
    plain: list[dict[str, Any]] = []
    was_result = False
    for message in conversation:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message.get('content', '')}\n</tool_response>"
            if was_result:
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text})
        else:
            plain.append(_with_calls_as_text(message))
        was_result = is_result
    if tools:
        text = _INSTRUCTIONS.format(tools="\n".join(_json(fields_of(tool)) for tool in tools))
        if plain[0]["role"] == "system":
            plain[0]["content"] = f"{plain[0].get('content', '')}\n\n{text}".lstrip()
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain


def for_harmony(
    conversation: Seq[Mapping[str, Any]], tools: Seq[Any] | None
) -> tuple[list[dict[str, Any]], Seq[Any] | None]:
    """Return a conversation and its tools for gpt-oss's template.

    The template reads reasoning under the name "thinking"; beside calls it takes either reasoning
    or text, so here the text joins the reasoning. Functions need a description.
    """
    plain = [dict(message) for message in conversation]
    for message in plain:
        if "reasoning_content" in message:
            message.setdefault("thinking", message["reasoning_content"])
        if message.get("tool_calls") and message.get("thinking") and message.get("content"):
            message["thinking"] += f"\n{message.pop('content')}"
    described = [fields_of(tool) for tool in tools or ()]
    for index, tool in enumerate(described):
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
            described[index] = {**tool, "function": {"description": "", **tool["function"]}}
    return plain, described or tools


def _with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return dict(message)
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    blocks = [plain.get("content", "")]
    for call in message["tool_calls"]:
        function = call["function"] if isinstance(call, Mapping) and "function" in call else call
        blocks.append(f"<tool_call>\n{_json(function)}\n</tool_call>")
    plain["content"] = "\n".join(block for block in blocks if block)
    return plain


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=fields_of)
