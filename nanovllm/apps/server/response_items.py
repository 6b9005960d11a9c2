"""Items of /v1/responses: a request's items to messages, an answer's parts to items and events."""

import uuid
from collections.abc import Iterator, Sequence as Seq
from typing import Any

from pydantic import BaseModel

from nanovllm.apps.server.answers.parts import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.protocol.request_messages import Message
from nanovllm.apps.server.protocol.response_objects import (
    Event,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseObject,
    Status,
)
from nanovllm.apps.server.protocol.responses import (
    AnyInputItem,
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
)


def messages_of(instructions: str | None, given: str | Seq[AnyInputItem]) -> list[Message]:
    """Return the conversation of a request.

    Reasoning, text and calls of one turn of the model become one message.
    """
    turns: list[dict[str, Any]] = []
    if instructions:
        turns.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        turns.append({"role": "user", "content": given})
    else:
        names: dict[str, str] = {}
        for item in given:
            _add_item(turns, names, item)
    return [Message(**turn) for turn in turns]


def _add_item(turns: list[dict[str, Any]], names: dict[str, str], item: AnyInputItem) -> None:
    """Add an item to the turns. `names` are those of the functions, by the id of a call."""
    match item:
        case InputMessage(role="assistant"):
            turn = _own_turn(turns, before=("content", "tool_calls"))
            turn["content"] = item.content
        case InputMessage():
            turns.append({"role": item.role, "content": item.content})
        case InputReasoning():
            texts = [str(part.get("text", "")) for part in item.content or item.summary or ()]
            if texts:
                turn = _own_turn(turns, before=("reasoning_content", "content", "tool_calls"))
                turn["reasoning_content"] = "\n".join(texts)
        case InputCall():
            function = {"name": item.name, "arguments": item.arguments}
            calls = _own_turn(turns, before=()).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
            names[item.call_id] = item.name
        case InputCallOutput():
            message = {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            name = names.get(item.call_id)
            turns.append(message if name is None else {**message, "name": name})


def _own_turn(turns: list[dict[str, Any]], before: Seq[str]) -> dict[str, Any]:
    """Return the model's turn at the end; a new one if it has one of the fields `before`."""
    last = turns[-1] if turns else {}
    if last.get("role") != "assistant" or any(name in last for name in before):
        turns.append({"role": "assistant"})
    return turns[-1]


class ResponseBuilder:
    """Puts the parts of an answer into `response`, which grows; each change of it is an event."""

    def __init__(self, response: ResponseObject) -> None:
        self.response = response
        self._num_events = 0
        self._item: OutputItem | None = None  # the last of the output, while it grows

    def start(self) -> list[Event]:
        """Return the events before the first part."""
        return [self._state("created"), self._state("in_progress")]

    def add(self, part: Part) -> Iterator[Event]:
        match part:
            case TextDelta():
                if not isinstance(self._item, OutputMessage):
                    yield from self._open_message()
                yield from self._grow_text("output_text", part.text)
            case ReasoningDelta():
                if not isinstance(self._item, OutputReasoning):
                    yield from self._open(OutputReasoning(id=new_id("rs")), ReasoningText(text=""))
                yield from self._grow_text("reasoning_text", part.text)
            case ToolCallStart():
                call = OutputCall(id=new_id("fc"), call_id=part.call_id, name=part.name)
                yield from self._open(call)
            case ToolCallArguments():
                assert isinstance(self._item, OutputCall)
                self._item.arguments += part.text
                yield self._of_item("function_call_arguments.delta", delta=part.text)

    def close(self, status: Status) -> Iterator[Event]:
        """Close the item that grows."""
        item = self._item
        if item is None:
            return
        item.status = status
        if isinstance(item, OutputCall):
            yield self._of_item(
                "function_call_arguments.done", name=item.name, arguments=item.arguments
            )
        else:
            text = item.content[0].text
            part = item.content[0].model_dump()
            if isinstance(item, OutputMessage):
                yield self._of_item("output_text.done", content_index=0, text=text, logprobs=[])
            else:
                yield self._of_item("reasoning_text.done", content_index=0, text=text)
            yield self._of_item("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", output_index=self._index, item=_dump(item))
        self._item = None

    def finish(self, status: Status) -> Iterator[Event]:
        """Close the response, whose usage and details are set."""
        if not self.response.output and status != "failed":
            yield from self._open_message()
        yield from self.close("completed" if status == "completed" else "incomplete")
        self.response.status = status
        yield self._state(status)

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _open_message(self) -> Iterator[Event]:
        return self._open(OutputMessage(id=new_id("msg")), OutputText(text=""))

    def _open(self, item: OutputItem, text: Any = None) -> Iterator[Event]:
        """Close the item that grows and begin the next, with an empty text if it has one."""
        yield from self.close("completed")
        self._item = item
        self.response.output.append(item)
        yield self._event("output_item.added", output_index=self._index, item=_dump(item))
        if not isinstance(item, OutputCall):
            item.content.append(text)
            yield self._of_item("content_part.added", content_index=0, part=_dump(text))

    def _grow_text(self, kind: str, text: str) -> Iterator[Event]:
        assert isinstance(self._item, OutputMessage | OutputReasoning)
        self._item.content[0].text += text
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "output_text":
            fields["logprobs"] = []
        yield self._of_item(f"{kind}.delta", **fields)

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        return self._event(kind, item_id=self._item.id, output_index=self._index, **fields)

    def _state(self, kind: str) -> Event:
        return self._event(kind, response=_dump(self.response))

    def _event(self, kind: str, **fields: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        return Event.model_construct(type=f"response.{kind}", sequence_number=number, **fields)


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _dump(value: BaseModel) -> dict[str, Any]:
    """Return what a model is now; it may grow afterwards."""
    return value.model_dump(mode="json")
