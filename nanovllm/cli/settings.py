"""The sampling parameters that a chat changes as it goes, with /set. Knows no model."""

import json
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import InvalidRequestError
from nanovllm.options.flags import fields_of
from nanovllm.options.sampling_params import MAX_TOKENS, SamplingParams
from nanovllm.options.validation import did_you_mean, shown

_FIXED = (
    *("n", "output_kind", "detokenize", "kept_token_ids", "marks_kept_tokens"),
    *("logits_processors", "logprobs", "prompt_logprobs"),
)
"""What an answer in a chat cannot have otherwise."""
NAMES = tuple(name for name in fields_of(SamplingParams) if name not in _FIXED)
"""The parameters that can be set."""


class Settings:
    """Parameters that have been set, over those that the chat began with.

    Args:
        first: what it began with, as far as it is known.
    """

    def __init__(self, first: Mapping[str, Any]) -> None:
        self._first = dict(first)
        self.changed: dict[str, Any] = {}
        """By name, the values that were set."""

    def set(self, argument: str) -> str:
        """Obey "NAME VALUE", or "NAME" for the first value; return what is so now.

        A value is JSON, or else text.

        Raises:
            InvalidRequestError: there is no such parameter, or it may not have this value.
        """
        if not argument:
            raise InvalidRequestError("/set needs a name and a value, such as /set temperature 0.5")
        given, _, text = argument.partition(" ")
        name = given.replace("-", "_")
        if name not in NAMES:
            raise InvalidRequestError(f"there is no parameter {shown(given)}{_hint(name)}")
        if not text.strip():
            self.changed.pop(name, None)
            return f"{name} is {_text(self._first[name])}" if name in self._first else f"no {name}"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text.strip()
        SamplingParams(**{"max_tokens": MAX_TOKENS, name: value})  # checks it
        self.changed[name] = value
        return f"{name} is {_text(value)}"

    def shown(self) -> dict[str, str]:
        """Return what the next answer is made with, by name."""
        return {name: _text(value) for name, value in {**self._first, **self.changed}.items()}


def _hint(name: str) -> str:
    if name in _FIXED:
        return " to set in a chat"
    meant = did_you_mean(name, NAMES)
    return meant if meant.startswith("; did") else "; /show lists some"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
