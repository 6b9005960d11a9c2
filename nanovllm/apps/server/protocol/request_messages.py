"""Messages of requests. Types only: `nanovllm.chat.openai_messages` prepares them for templates."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from nanovllm.apps.server.protocol.common import Objects, RequestModel
from nanovllm.chat.openai_messages import counts_as_absent, is_empty

MAX_ITEMS = 4096
"""Of a conversation."""
MAX_CALLS = 128
"""Of a message."""


class SentBack(RequestModel):
    """A part of an earlier answer. What client libraries add to it is dropped, and so is what is
    empty: it means what null does.
    """

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = cls.model_fields.keys()
        return {name: v for name, v in given.items() if name in known and not is_empty(v)}


class EarlierFunction(SentBack):
    """The function that a message calls."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """A JSON text; one that is not an object is passed on as it is."""


class EarlierCall(SentBack):
    """A call in a message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: EarlierFunction


class Message(RequestModel):
    """A message of a conversation. The chat template reads further fields where it knows them."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Objects | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = Field(default=None, max_length=MAX_CALLS, fail_fast=True)
    tool_call_id: str | None = None
    function_call: EarlierFunction | None = None
    """OpenAI's form before there were tools."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        """Let every field pass, but for empty ones that mean what null does."""
        if not isinstance(given, dict):
            return given
        return {name: v for name, v in given.items() if not counts_as_absent(name, v)}


def _few_calls(messages: Any) -> Any:
    """Refuse messages with very many calls in all: checking each of them takes time."""
    if isinstance(messages, list):
        calls = [m.get("tool_calls") for m in messages if isinstance(m, dict)]
        if sum(len(given) for given in calls if isinstance(given, list)) > MAX_ITEMS:
            raise PydanticCustomError(
                "too_many_calls", "must have at most {limit} tool_calls", {"limit": MAX_ITEMS}
            )
    return messages


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
    BeforeValidator(_few_calls),
]
"""A conversation."""
