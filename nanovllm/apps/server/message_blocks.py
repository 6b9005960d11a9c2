"""Blocks of /v1/messages: a request's to messages, and an answer's parts to blocks and events."""

import copy
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
from nanovllm.apps.server.protocol.chat import MAX_CALLS, Message
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
from nanovllm.errors import InvalidRequestError

Event = dict[str, Any]

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
    """Puts the parts of an answer into `message`, which grows; each change of it is an event.

    Args:
        message: with an empty `content`.
    """

    def __init__(self, message: dict[str, Any]) -> None:
        self.message = message
        self._block: dict[str, Any] | None = None  # the last of the content, while it grows
        self._arguments = ""  # of the block, if it is a call

    def start(self) -> list[Event]:
        """Return the events before the first part."""
        return [_event("message_start", message=self.message), _event("ping")]

    def add(self, part: Part) -> Iterator[Event]:
        match part:
            case TextDelta():
                yield from self._grow("text", part.text)
            case ReasoningDelta():
                yield from self._grow("thinking", part.text, signature="")
            case ToolCallStart():
                block = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
                yield from self._open(block)
            case ToolCallArguments():
                self._arguments += part.text
                yield self._delta("input_json_delta", partial_json=part.text)

    def finish(self) -> Iterator[Event]:
        """Close the message, whose usage and reason to stop are set."""
        yield from self._close()
        message = self.message
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=delta, usage=message["usage"])
        yield _event("message_stop")

    def _grow(self, kind: str, text: str, **fields: Any) -> Iterator[Event]:
        if self._block is None or self._block["type"] != kind:
            yield from self._open({"type": kind, kind: "", **fields})
        assert self._block is not None
        self._block[kind] += text
        yield self._delta(f"{kind}_delta", **{kind: text})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        """Close the block that grows and begin the next."""
        yield from self._close()
        self._block = block
        self.message["content"].append(block)
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[Event]:
        """Close the block that grows."""
        block, self._block = self._block, None
        if block is None:
            return
        if block["type"] == "thinking":  # clients send it back with the thoughts; it means nothing
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._delta("signature_delta", signature=block["signature"])
        elif block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
            self._arguments = ""
        yield _event("content_block_stop", index=self._index)

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    def _delta(self, kind: str, **fields: Any) -> Event:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _event(kind: str, **fields: Any) -> Event:
    """Return an event with what its fields are now: they may grow afterwards."""
    return {"type": kind, **copy.deepcopy(fields)}


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; of a call that was cut off, those that are there."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
