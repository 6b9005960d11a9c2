"""Which conversation a request belongs to, read from its HTTP body. Knows no Ray and no tokens.

The key of a conversation's first turn is the key of all its turns, because only its beginning
counts: what a later turn has in common with the first one is what a prefix cache can have.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

SESSION_HEADER = b"x-session-id"
"""A client's own name for a conversation; Ray Serve's header for the same."""
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_NUM_CHARS = 256
_NUM_TOKENS = 64
"""So much of a plain prompt counts: a conversation that is sent as a plain prompt grows at its
end."""


def conversation_key(path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> str:
    """Return a name for the request's conversation, "" if it has none.

    Counts, the first that is given: the header X-Session-Id; the field `prompt_cache_key`; the
    messages up to the first of the user; the first 256 characters or 64 tokens of a plain prompt.
    A `cache_salt` and the `model` count with the last one, because prompts with different salts, or
    of different adapters, share nothing.

    Args:
        path: of the URL; other paths than those that generate have no conversation.
        headers: names in lower case, and values.
        body: JSON. What is no JSON, or has other types than the API, has no conversation: the
            server refuses it.
    """
    if path not in _PATHS:
        return ""
    for name, value in headers:
        if name == SESSION_HEADER and value:
            return _digest("session", value.decode("latin-1"))
    try:
        return _key_of_body(json.loads(body))
    except (ValueError, RecursionError):
        return ""


def _key_of_body(fields: Any) -> str:
    if not isinstance(fields, dict):
        return ""
    if isinstance(named := fields.get("prompt_cache_key"), str) and named:
        return _digest("named", named)
    beginning = _beginning(fields)
    if beginning is None:
        return ""
    return _digest("beginning", beginning, fields.get("cache_salt"), fields.get("model"))


def _beginning(fields: dict[str, Any]) -> Any:
    """Return what all turns of the conversation begin with, None if there is nothing."""
    if "prompt" in fields:
        return _beginning_of_prompt(fields["prompt"])
    messages = fields.get("messages", fields.get("input"))
    if not isinstance(messages, str | list) or not messages:
        return None
    if isinstance(messages, list):
        messages = _to_first_question(messages)
    return fields.get("instructions"), messages  # instructions stand before the input


def _to_first_question(messages: list[Any]) -> list[Any]:
    for index, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[: index + 1]
    return messages[:1]


def _beginning_of_prompt(prompt: Any) -> Any:
    """Return the beginning of a text or of token ids; of several prompts, that of the first."""
    if isinstance(prompt, str):
        return prompt[:_NUM_CHARS] or None
    if isinstance(prompt, list) and prompt:
        first = prompt[0]
        return prompt[:_NUM_TOKENS] if isinstance(first, int) else _beginning_of_prompt(first)
    return None


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
