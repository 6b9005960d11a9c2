"""What a prompt may be: text, token ids, or a dictionary with either. Knows no tokenizer."""

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from nanovllm.errors import InvalidRequestError
from nanovllm.options.validation import shown

Prompt = str | Seq[int] | Mapping[str, Any]
"""Text; token ids, also as a numpy array or torch tensor; or vLLM's {"prompt": text} or
{"prompt_token_ids": ids}, which may have the text as "prompt" beside them. With a "cache_salt" in
the dictionary, cached blocks are shared only with prompts of the same salt."""

_MAX_SALT_LENGTH = 128
"""Characters, as in vLLM: the prefix cache keeps the salts of its blocks."""


def array_to_list(value: Any) -> Any:
    """Return a numpy array or torch tensor of integers as lists, and anything else as it is.

    Raises:
        InvalidRequestError: the array holds no integers.
    """
    if not (hasattr(value, "tolist") and hasattr(value, "dtype")):
        return value
    if "int" not in str(value.dtype):
        raise InvalidRequestError(f"token ids must be integers, got an array of {value.dtype}")
    return value.tolist()


def text_and_tokens(prompt: Mapping[str, Any]) -> tuple[str | None, Any]:
    """Return (text, prompt) of a prompt dictionary: token ids if it has them, else the text."""
    given = {key: value for key, value in prompt.items() if value is not None}
    given.pop("cache_salt", None)
    unknown = [key for key in given if key not in ("prompt", "prompt_token_ids")]
    if unknown or not given:
        found = f"got {shown(unknown[0])}" if unknown else "got neither"
        raise InvalidRequestError(
            f'a prompt dictionary has the key "prompt" (text) or "prompt_token_ids", {found}; '
            "the model reads nothing else"
        )
    text = given.get("prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(
            f'the "prompt" of a prompt dictionary must be a string, got {shown(text)}'
        )
    if "prompt_token_ids" not in given:
        return text, text
    token_ids = given["prompt_token_ids"]
    if isinstance(token_ids, str):
        raise InvalidRequestError(
            f"prompt_token_ids must be a list of token ids, got {shown(token_ids)}"
        )
    return text, token_ids


def cache_salt(prompt: Prompt) -> str | None:
    """Return the "cache_salt" of a prompt dictionary, None if it has none."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is None or (isinstance(salt, str) and 0 < len(salt) <= _MAX_SALT_LENGTH):
        return salt
    found = f"{len(salt)}" if isinstance(salt, str) else type(salt).__name__  # it is a secret
    raise InvalidRequestError(
        f"cache_salt must be a string of 1 to {_MAX_SALT_LENGTH} characters, got {found}"
    )


def check_unicode(what: str, text: str) -> None:
    """Raise InvalidRequestError if a text has half a surrogate pair, which nothing can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{what} is not valid Unicode text: {error}") from error
