"""Arguments of tool calls as JSON text.

Pure text: knows no requests and no tokens.
"""

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from nanovllm.options.sampling_params import TOKEN_MARK

JSON_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)


class Function(Protocol):
    """A function that a model may call."""

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, Any] | None: ...


class NotACall(Exception):
    """What began like a call is none: it is text."""


def new_call_id() -> str:
    """Return an id as OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


def decoded(source: str) -> str | None:
    """Return the string that a JSON value is, without marks of tags; None if it cannot be sent."""
    try:
        value = json.loads(source.replace(TOKEN_MARK, ""), strict=False)
        return value if isinstance(value, str) and value.encode() is not None else None
    except ValueError:  # half of a surrogate pair cannot be encoded
        return None


def plain_object(source: str) -> str:
    """Return arguments as the text of a JSON object where they are one in disguise.

    Some models write the object as a string, and null or "" for no arguments.

    Raises:
        NotACall: it is no JSON value.
    """
    if source in ("null", '""'):
        return "{}"
    if source.startswith(("{", "[")):
        return source
    if source.startswith('"'):
        return decoded(source) or source
    try:
        json.loads(source)
    except ValueError:
        raise NotACall from None
    return source


def escaped(text: str) -> str:
    """Return text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
