"""Answers of /v1/messages, and the events of a stream of them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class OutputTextBlock(BaseModel):
    """What the model said."""

    type: Literal["text"] = "text"
    text: str = ""


class OutputThinking(BaseModel):
    """What the model thought before."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""
    """Clients send it back with the thoughts; it means nothing here."""


class OutputToolUse(BaseModel):
    """A tool that the model calls."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


OutputBlock = OutputTextBlock | OutputThinking | OutputToolUse


class ThinkingTokens(BaseModel):
    """What the answer's tokens are for."""

    thinking_tokens: int = 0


class MessageUsage(BaseModel):
    """How many tokens a message took. The prompt has `input_tokens` and those of the cache."""

    input_tokens: int = 0
    """Those that were computed."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    """Those whose KV came from the prefix cache."""
    output_tokens: int = 0
    output_tokens_details: ThinkingTokens = ThinkingTokens()


class MessageObject(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage = MessageUsage()


class TokenCount(BaseModel):
    """How many tokens a conversation has."""

    input_tokens: int


class MessageEvent(BaseModel):
    """An event of a streamed message; its other fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
