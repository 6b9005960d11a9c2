"""Messages in OpenAI's format, prepared for chat templates: all conversations come through here."""

from collections.abc import Mapping, Sequence as Seq
from typing import Any, NamedTuple

from nanovllm.chat.pictures import Locate, anywhere, is_picture, picture_of, with_marks
from nanovllm.errors import InvalidRequestError
from nanovllm.options.validation import shown
from nanovllm.utils import strict_json

_TEXT_OF_PART = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the key that holds it."""

_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
"""Types of content parts with which answers of other servers show their reasoning."""

_ROLES = {"developer": "system", "function": "tool"}
"""Other names of roles, and what templates call them."""

_EMPTY_IS_ABSENT = frozenset(
    (
        *("name", "tool_calls", "tool_call_id", "function_call", "refusal", "annotations"),
        *("audio", "reasoning", "reasoning_content"),
    )
)
"""Fields whose empty value means what None does. Templates ask only whether a field is there."""


def is_empty(value: Any) -> bool:
    """Whether a value is None, or a text, list or dictionary with nothing in it."""
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


def counts_as_absent(name: str, value: Any) -> bool:
    """Whether a field of a message means nothing with this value."""
    return value is None or (name in _EMPTY_IS_ABSENT and is_empty(value))


def is_message(value: Any) -> bool:
    """Whether `value` is a message rather than a conversation."""
    return isinstance(value, Mapping) or (
        hasattr(value, "model_dump") and not isinstance(value, type)
    )


def fields_of(given: Any) -> Any:
    """Return a pydantic object as a dictionary."""
    is_model = hasattr(given, "model_dump") and not isinstance(given, Mapping)
    return given.model_dump() if is_model else given


def listed(value: Any) -> Any:
    """Return an array as a list: pandas and Ray Data make arrays of the lists in a file."""
    return value.tolist() if hasattr(value, "tolist") else value


def prepared(
    messages: Any, pictures: list[Any] | None = None, locate: Locate = anywhere
) -> list[dict[str, Any]]:
    """Return the messages of a conversation as templates read them.

    Each `content` is a string, with a mark for each picture. What is empty is left out. Arguments
    of calls are dictionaries; text that is not a JSON object stays text. Of a call only what
    OpenAI's API defines is kept: client libraries add fields. Reasoning has both its names, and the
    role "developer" is "system".

    Args:
        pictures: takes them, in their order; None: the model reads text only.
        locate: finds the files that parts name.

    Raises:
        InvalidRequestError: this is not a conversation, or a message is invalid.
    """
    messages = listed(messages)
    if not isinstance(messages, Seq) or not messages or not all(map(is_message, messages)):
        raise InvalidRequestError(
            f'a conversation is a list of {{"role": ..., "content": ...}}, got {shown(messages)}'
        )
    parts = _Parts(pictures, locate)
    return [_message(f"message {index}", each, parts) for index, each in enumerate(messages)]


def _message(name: str, given: Any, parts: "_Parts") -> dict[str, Any]:
    fields = fields_of(given)
    message = {key: value for key, value in fields.items() if not counts_as_absent(key, value)}
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequestError(
            f'{name} has no "role", such as "user" or "assistant": {shown(given)}'
        )
    message["role"] = _ROLES.get(role, role)
    if role == "assistant" and isinstance(message.get("content"), list | tuple):
        _take_thoughts(message)
    message["content"] = _content(name, message.get("content"), role, parts)
    if not message["content"] and isinstance(message.get("refusal"), str):
        message["content"] = message["refusal"]
    for new, old in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if old in message:
            message.setdefault(new, message[old])
    if (call := message.pop("function_call", None)) is not None:  # OpenAI's form before tools
        message.setdefault("tool_calls", [{"type": "function", "function": call}])
    if "tool_calls" in message:
        message["tool_calls"] = _calls(name, message["tool_calls"])
    return message


def _take_thoughts(message: dict[str, Any]) -> None:
    """Make reasoning of the content parts that are thoughts; those that are hidden are dropped."""
    parts = [fields_of(part) for part in message["content"]]
    thoughts = [p for p in parts if isinstance(p, Mapping) and p.get("type") in _THOUGHTS]
    if thoughts:
        message["content"] = [part for part in parts if part not in thoughts]
        texts = [text for text in map(_thought, thoughts) if text]
        if texts and "reasoning" not in message:
            message.setdefault("reasoning_content", "\n".join(texts))


def _thought(part: Mapping[str, Any]) -> str:
    """Return the text of a thought: Mistral's is a list of parts."""
    given = part.get(part["type"]) or part.get("text") or part.get("summary")
    inner = given if isinstance(given, list | tuple) else [{"text": given}]
    texts = [each.get("text") if isinstance(each, Mapping) else each for each in inner]
    return "\n".join(text for text in texts if isinstance(text, str))


class _Parts(NamedTuple):
    """What becomes of the pictures among the parts of messages. See `prepared`."""

    pictures: list[Any] | None
    locate: Locate

    def content(self, name: str, given: Seq[Any], role: str) -> str:
        """Return the content of a message of parts."""
        plain = [fields_of(part) for part in given]
        reads = "text only" if self.pictures is None else "text and pictures only"
        if self.pictures is None or not any(map(is_picture, plain)):
            return "\n".join(_text(name, part, reads) for part in plain)  # as vLLM joins them
        if role not in ("user", "tool", "function"):
            raise InvalidRequestError(
                f"{name} has a picture, and its role is {shown(role)}: pictures belong to messages "
                "of the user and of tools"
            )
        texts: list[str | None] = []
        for part in plain:
            if is_picture(part):
                self.pictures.append(picture_of(name, part, self.locate))
            texts.append(None if is_picture(part) else _text(name, part, reads))
        return with_marks(texts)


def _content(name: str, given: Any, role: str, parts: _Parts) -> str:
    if given is None and role in ("assistant", "tool", "function"):
        return ""  # there are calls instead, or nothing to return
    given = listed(given)
    if isinstance(given, list | tuple):
        return parts.content(name, given, role)
    if not isinstance(given, str):
        raise InvalidRequestError(
            f"{name}: the content must be a string or a list of parts, got {shown(given)}"
        )
    return given


def _text(name: str, given: Any, reads: str) -> str:
    """Return the text of a content part. `reads` is what the model reads."""
    if isinstance(given, str):
        return given
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXT_OF_PART:
        raise InvalidRequestError(
            f"{name} has a content part of type {shown(kind)}, but the model reads {reads}: "
            f'give {{"type": "text", "text": ...}}, got {shown(given)}'
        )
    key = _TEXT_OF_PART[kind]
    text = given.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(
            f'{name}: the "{key}" of a content part must be a string, got {shown(given)}'
        )
    return text


def _calls(name: str, given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list | tuple):
        raise InvalidRequestError(f"{name}: tool_calls must be a list, got {shown(given)}")
    return [_call(f"{name}: tool_calls[{index}]", call) for index, call in enumerate(given)]


def _call(place: str, given: Any) -> dict[str, Any]:
    """Return a call; one that is not wrapped in "function" stays so."""
    call = fields_of(given)
    if not isinstance(call, Mapping):
        raise InvalidRequestError(
            f'{place} must be {{"function": {{"name": ..., "arguments": ...}}}}, got {shown(given)}'
        )
    kept = {key: call[key] for key in ("id", "type") if not is_empty(call.get(key))}
    function = fields_of(call.get("function", call))
    named = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(named, str) or not named:
        raise InvalidRequestError(f"{place} has no function's name, got {shown(given)}")
    plain = {"name": named, "arguments": _arguments(function.get("arguments"))}
    return {**kept, "function": plain} if "function" in call else {**kept, **plain}


def _arguments(given: Any) -> Any:
    """Return arguments as a dictionary; text that is not a JSON object stays text, and so does one
    of which a dictionary would lose some: a key twice, a number that no float holds.
    """
    if not isinstance(given, str):
        return {} if given is None else given
    try:
        value = strict_json.parse(given) if given.strip() else {}
    except ValueError:
        return given
    return {} if value is None else value if isinstance(value, dict) else given
