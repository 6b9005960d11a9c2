"""Blocks of /v1/messages: a request's to messages, and an answer's parts to blocks and events."""

import hashlib
import re
from collections.abc import Iterator, Sequence as Seq
from typing import Any

from pydantic_core import from_json

from nanovllm.apps.server.answers.parts import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.protocol.message_objects import (
    MessageEvent,
    MessageObject,
    OutputBlock,
    OutputTextBlock,
    OutputThinking,
    OutputToolUse,
)
from nanovllm.apps.server.protocol.messages import (
    AnyBlock,
    DocumentBlock,
    InputMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from nanovllm.apps.server.protocol.request_messages import Message

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""A line of Claude Code's that differs in each request. In the prompt, it would leave nothing of a
conversation to be found in the prefix cache."""


def messages_of(system: str | Seq[TextBlock] | None, given: Seq[InputMessage]) -> list[Message]:
    """Return the conversation of a request.

    What one side says in several messages becomes one message, as templates want it. The result of
    a tool is a message of its own.
    """
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    texts = [text for text in (_BILLING.sub("", text, count=1) for text in texts) if text]
    turns: list[dict[str, Any]] = []
    if texts:
        turns.append({"role": "system", "content": "\n\n".join(texts)})
    for message in given:
        if isinstance(message.content, str):
            _add_text(turns, message.role, message.content)
        else:
            for block in message.content:
                _add_block(turns, message.role, block)
    return [Message(**turn) for turn in turns]


def _add_block(turns: list[dict[str, Any]], role: str, block: AnyBlock) -> None:
    match block:
        case TextBlock() | DocumentBlock():
            _add_text(turns, role, _text_of(block))
        case ThinkingBlock():
            turn = _turn(turns, "assistant")
            thoughts = (turn.get("reasoning_content"), block.thinking)
            turn["reasoning_content"] = "\n".join(filter(None, thoughts))
        case ToolUseBlock():
            calls = _turn(turns, "assistant").setdefault("tool_calls", [])
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        case ToolResultBlock():
            given = block.content or ""
            text = given if isinstance(given, str) else "\n".join(map(_text_of, given))
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
            names = (
                call["function"]["name"]
                for turn in reversed(turns)
                for call in turn.get("tool_calls", ())
                if call["id"] == block.tool_use_id
            )
            name = next(names, None)
            turns.append(result if name is None else {**result, "name": name})


def _add_text(turns: list[dict[str, Any]], role: str, text: str) -> None:
    turn = _turn(turns, role)
    turn["content"] = "\n\n".join(filter(None, (turn.get("content"), text)))


def _turn(turns: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Return the turn at the end, a new one if the last is another side's."""
    if not turns or turns[-1]["role"] != role:
        turns.append({"role": role})
    return turns[-1]


def _text_of(block: TextBlock | DocumentBlock) -> str:
    if isinstance(block, TextBlock):
        return block.text
    return "\n".join(filter(None, (block.title, block.context, block.source.data)))


class MessageBuilder:
    """Puts the parts of an answer into `message`, which grows; each change of it is an event."""

    def __init__(self, message: MessageObject) -> None:
        self.message = message
        self._block: OutputBlock | None = None  # the last of the content, while it grows
        self._arguments = ""  # of the block, if it is a call

    def start(self) -> list[MessageEvent]:
        """Return the events before the first part."""
        message = self.message.model_dump(mode="json")
        return [_event("message_start", message=message), _event("ping")]

    def add(self, part: Part) -> Iterator[MessageEvent]:
        match part:
            case TextDelta():
                if not isinstance(self._block, OutputTextBlock):
                    yield from self._open(OutputTextBlock())
                assert isinstance(self._block, OutputTextBlock)
                self._block.text += part.text
                yield self._delta("text_delta", text=part.text)
            case ReasoningDelta():
                if not isinstance(self._block, OutputThinking):
                    yield from self._open(OutputThinking())
                assert isinstance(self._block, OutputThinking)
                self._block.thinking += part.text
                yield self._delta("thinking_delta", thinking=part.text)
            case ToolCallStart():
                yield from self._open(OutputToolUse(id=part.call_id, name=part.name))
            case ToolCallArguments():
                self._arguments += part.text
                yield self._delta("input_json_delta", partial_json=part.text)

    def finish(self) -> Iterator[MessageEvent]:
        """Close the message, whose usage and reason to stop are set."""
        yield from self._close()
        message = self.message
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield _event("message_delta", delta=delta, usage=message.usage.model_dump())
        yield _event("message_stop")

    def _open(self, block: OutputBlock) -> Iterator[MessageEvent]:
        """Close the block that grows and begin the next."""
        yield from self._close()
        self._block = block
        self.message.content.append(block)
        yield _event("content_block_start", index=self._index, content_block=block.model_dump())

    def _close(self) -> Iterator[MessageEvent]:
        """Close the block that grows."""
        match self._block:
            case OutputThinking() as block:
                block.signature = hashlib.sha256(block.thinking.encode()).hexdigest()
                yield self._delta("signature_delta", signature=block.signature)
            case OutputToolUse() as block:
                block.input = _object(self._arguments)
                self._arguments = ""
            case None:
                return
        yield _event("content_block_stop", index=self._index)
        self._block = None

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _delta(self, kind: str, **fields: Any) -> MessageEvent:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _event(kind: str, **fields: Any) -> MessageEvent:
    return MessageEvent.model_construct(type=kind, **fields)


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; of a call that was cut off, those that are there."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
