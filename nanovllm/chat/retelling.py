"""Other forms of a conversation, for chat templates that refuse it or leave some of it out.

Messages are prepared ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import Any


def retold(conversation: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation, then its other forms. Each has the same text, at other places.

    Arguments that are not a JSON object become the value of one argument; then all system messages
    become the first.
    """
    yield conversation
    if any(_odd_arguments(conversation)):
        conversation = [_with_plain_arguments(message) for message in conversation]
        yield conversation
    if _has_odd_systems(conversation):
        text, first, rest = _split(conversation)
        yield [{**first, "content": text}, *rest]


def without_system(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose system messages begin the first message of the user."""
    text, first, rest = _split(conversation)
    index = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if index is None:
        return [{**first, "role": "user", "content": text}, *rest]
    asked = "\n\n".join(part for part in (text, rest[index]["content"]) if part)
    return [*rest[:index], {**rest[index], "content": asked}, *rest[index + 1 :]]


def is_told(conversation: Seq[Mapping[str, Any]], text: str) -> bool:
    """Whether a rendered text has what templates tend to lose: further system messages, and
    arguments that are not a JSON object.
    """
    expected = list(_odd_arguments(conversation))
    if _has_odd_systems(conversation):
        expected += [m["content"].strip() for m in conversation if m["role"] == "system"]
    return all(
        any(form in text for form in (given, _quoted(given), json.dumps(given)[1:-1]))
        for given in expected
    )


def _has_odd_systems(conversation: Seq[Mapping[str, Any]]) -> bool:
    """Whether there is a system message other than one at the start."""
    return any(message["role"] == "system" for message in conversation[1:])


def _split(
    conversation: Seq[dict[str, Any]],
) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """Return the text of all system messages, the first of them, and the other messages."""
    systems = [message for message in conversation if message["role"] == "system"]
    text = "\n\n".join(message["content"] for message in systems if message["content"])
    return text, systems[0], [m for m in conversation if m["role"] != "system"]


def _odd_arguments(conversation: Seq[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the arguments of calls that are texts."""
    for message in conversation:
        for call in message.get("tool_calls", ()):
            if isinstance(given := call.get("function", call)["arguments"], str):
                yield given


def _with_plain_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which arguments that are a text are the value of one argument."""
    if not any(_odd_arguments([message])):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if isinstance(given := function["arguments"], str):
            function = {**function, "arguments": {"arguments": given}}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _quoted(text: str) -> str:
    """Return what stands for a text between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
