"""Other forms of a conversation, for chat templates that refuse it or leave some of it out.

Messages are prepared ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import Any


def retold(conversation: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation, then its other forms. Each has the same text, at other places.

    Arguments that are not a JSON object become the value of one argument; then system messages
    after the first become words of the user's.
    """
    yield conversation
    if any(_odd_arguments(conversation)):
        conversation = [_with_plain_arguments(message) for message in conversation]
        yield conversation
    if _has_odd_systems(conversation):
        yield _with_later_systems_said(conversation)


def without_system(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose first, a system message, begins the user's first message."""
    first, *rest = conversation
    index = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if index is None:
        return [{**first, "role": "user"}, *rest]
    asked = _joined(first, rest[index])
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


def _with_later_systems_said(conversation: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose only system message is the first.

    Later ones stay where they are, in a message of the user or a result: agents add one in each
    turn, and what it changes before itself is computed again.
    """
    told: list[dict[str, Any]] = []
    is_alone = False  # the last message told has nothing but the text of system messages
    for message in conversation:
        role = message["role"]
        if role == "system" and told and told[-1]["role"] != "assistant":
            told[-1] = {**told[-1], "content": _joined(told[-1], message)}
        elif is_alone and role in ("user", "tool"):
            told[-1] = {**message, "content": _joined(told[-1], message)}
            is_alone = False
        else:
            is_alone = role == "system" and bool(told)
            told.append({**message, "role": "user"} if is_alone else message)
    return told


def _joined(*messages: Mapping[str, Any]) -> str:
    return "\n\n".join(message["content"] for message in messages if message["content"])


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
