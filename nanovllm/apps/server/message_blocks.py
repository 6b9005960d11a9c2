"""Blocks of /v1/messages: a request's to messages, and an answer's parts to blocks and events."""

import hashlib
import re
from collections.abc import Iterator, Sequence as Seq
from typing import Any

from pydantic_core import from_json

from nanovllm.apps.server.output_parsers.parts import (
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
    ContentSource,
    DocumentBlock,
    FoundTool,
    MessageParam,
    PlainTextSource,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from nanovllm.apps.server.protocol.request_messages import MAX_CALLS, Message
from nanovllm.errors import InvalidRequestError

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""A line of Claude Code's that differs in each request. In the prompt, it would leave nothing of a
conversation to be found in the prefix cache."""


def messages_of(system: str | Seq[TextBlock] | None, given: Seq[MessageParam]) -> list[Message]:
    """Return the conversation of a request.

    What one side says in several messages becomes one message, as templates want it. The result of
    a tool is a message of its own.

    Raises:
        InvalidRequestError: there is no content, or a side calls very many tools at once.
    """
    turns = _Turns()
    first = [] if system is None else [MessageParam.model_construct(role="system", content=system)]
    for message in (*first, *given):
        if isinstance(message.content, str):
            turns.add_text(message.role, message.content)
        else:
            for block in message.content:
                turns.add_block(message.role, block)
    return turns.messages()


class _Turns:
    """Collects what the sides say. Its work is linear in the size of the request."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []  # fields of messages; texts are lists of parts
        self._tool_names: dict[str, str] = {}  # by the id of a call

    def add_text(self, role: str, text: str) -> None:
        if role == "system" and not (text := _BILLING.sub("", text, count=1)):
            return
        self._turn(role).setdefault("content", []).append(text)

    def add_block(self, role: str, block: AnyBlock) -> None:
        match block:
            case TextBlock() | DocumentBlock() | SearchResultBlock():
                self.add_text(role, _text_of(block))
            case ThinkingBlock():
                turn = self._turn("assistant")
                turn.setdefault("reasoning_content", []).append(block.thinking)
            case ToolUseBlock():
                calls = self._turn("assistant").setdefault("tool_calls", [])
                if len(calls) == MAX_CALLS:
                    raise InvalidRequestError(
                        f"messages must have at most {MAX_CALLS} tool_use blocks in succession"
                    )
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
                self._tool_names[block.id] = block.name
            case ToolResultBlock():
                given = block.content or ""
                parts = [given] if isinstance(given, str) else ["\n".join(map(_text_of, given))]
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": parts}
                name = self._tool_names.get(block.tool_use_id)
                self._turns.append(result if name is None else {**result, "name": name})

    def messages(self) -> list[Message]:
        if not self._turns:
            raise InvalidRequestError("messages must have some content, got empty lists of blocks")
        return [Message(**{name: _joined(name, v) for name, v in t.items()}) for t in self._turns]

    def _turn(self, role: str) -> dict[str, Any]:
        """Return the turn at the end, a new one if the last is another side's."""
        if not self._turns or self._turns[-1]["role"] != role:
            self._turns.append({"role": role})
        return self._turns[-1]


_BETWEEN_PARTS = {"content": "\n\n", "reasoning_content": "\n"}


def _joined(name: str, value: Any) -> Any:
    """Return the value of a message's field: if it is a text, its parts joined."""
    return _BETWEEN_PARTS[name].join(filter(None, value)) if name in _BETWEEN_PARTS else value


def _text_of(block: TextBlock | DocumentBlock | SearchResultBlock | FoundTool) -> str:
    match block:
        case TextBlock(text=text) | FoundTool(tool_name=text):
            return text
        case SearchResultBlock():
            parts: Any = [block.title, block.source, *(part.text for part in block.content)]
        case (
            DocumentBlock(source=PlainTextSource(data=text))
            | DocumentBlock(source=ContentSource(content=str(text)))
        ):
            parts = [block.title, block.context, text]
        case DocumentBlock(source=ContentSource(content=list(blocks))):
            parts = [block.title, block.context, *(part.text for part in blocks)]
    return "\n".join(filter(None, parts))


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
