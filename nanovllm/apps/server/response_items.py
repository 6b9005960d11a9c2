"""Items of /v1/responses: a request's items to messages, an answer's parts to items and events."""

import base64
import copy
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from typing import Any

from pydantic import TypeAdapter

from nanovllm.apps.server.output_parsers.parts import (
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.protocol.chat import Message
from nanovllm.apps.server.protocol.response_tools import (
    CalledTool,
    custom_arguments,
    custom_input,
)
from nanovllm.apps.server.protocol.responses import (
    AnyInputItem,
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputMessage,
    InputReasoning,
    InputReference,
)
from nanovllm.apps.server.response_store import StoredResponse

Event = dict[str, Any]

_ITEMS: TypeAdapter[list[AnyInputItem]] = TypeAdapter(list[AnyInputItem])
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
"""What the ids of items begin with."""
_ENCODED = "nanovllm:"


def messages_of(instructions: str | None, items: Iterable[AnyInputItem]) -> list[Message]:
    """Return the conversation of a request.

    Reasoning, text and calls of one turn of the model become one message.
    """
    turns: list[dict[str, Any]] = []
    if instructions:
        turns.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    for item in items:
        _add_item(turns, names, item)
    return [Message(**turn) for turn in turns]


def items_of(
    given: str | list[AnyInputItem], referenced: Mapping[str, StoredResponse]
) -> list[AnyInputItem]:
    """Return a request's input as items.

    Args:
        referenced: by the id of an item that stands in the input, the response that has it.
    """
    if isinstance(given, str):
        return [InputMessage(role="user", content=given)]
    known: dict[str, AnyInputItem] = {}
    for stored in {each.response_id: each for each in referenced.values()}.values():
        output = json.loads(stored.output)["output"]
        known |= zip((item["id"] for item in output), _ITEMS.validate_python(output), strict=True)
    return [known[item.id] if isinstance(item, InputReference) else item for item in given]


def stored_items(items: Iterable[AnyInputItem]) -> bytes:
    """Return items as JSON, in the form in which they are listed."""
    return json.dumps([_listed(item) for item in items], ensure_ascii=False).encode()


def _listed(item: AnyInputItem) -> dict[str, Any]:
    fields = item.model_dump(mode="json", exclude_none=True)
    if isinstance(item, InputMessage) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": item.content}]
    return {"id": new_id(_PREFIXES[item.type]), "status": "completed", **fields}


def listed_items(chain: Seq[StoredResponse]) -> list[dict[str, Any]]:
    """Return what the last response of a conversation answers, as it is listed."""
    found: list[dict[str, Any]] = []
    for stored in chain[:-1]:
        found += json.loads(stored.input_items)
        found += json.loads(stored.output)["output"]
    found += json.loads(chain[-1].input_items)
    return found


def conversation_of(chain: Iterable[StoredResponse]) -> list[AnyInputItem]:
    """Return the items of a conversation so far, with the answers."""
    found: list[AnyInputItem] = []
    for stored in chain:
        found += _ITEMS.validate_json(stored.input_items)
        found += _ITEMS.validate_python(json.loads(stored.output)["output"])
    return found


def _add_item(turns: list[dict[str, Any]], names: dict[str, str], item: AnyInputItem) -> None:
    """Add an item to the turns. `names` are those of the functions, by the id of a call."""
    match item:
        case InputMessage(role="assistant"):
            turn = _own_turn(turns, before=("content", "tool_calls"))
            turn["content"] = item.content
        case InputMessage():
            turns.append({"role": item.role, "content": item.content})
        case InputReasoning():
            if text := _thought(item):
                turn = _own_turn(turns, before=("reasoning_content", "content", "tool_calls"))
                turn["reasoning_content"] = text
        case InputCall() | InputCustomCall():
            name = CalledTool(item.name, item.namespace).function_name
            arguments = (
                item.arguments if isinstance(item, InputCall) else custom_arguments(item.input)
            )
            function = {"name": name, "arguments": arguments}
            calls = _own_turn(turns, before=()).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
            names[item.call_id] = name
        case InputCallOutput():
            message = {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            if item.call_id in names:
                message["name"] = names[item.call_id]
            turns.append(message)


def _thought(item: InputReasoning) -> str:
    """Return the text of reasoning: its content, or what this server has put into it."""
    if not item.content and (given := item.encrypted_content or "").startswith(_ENCODED):
        try:
            return base64.b64decode(given[len(_ENCODED) :], validate=True).decode()
        except ValueError:  # also of UTF-8
            return ""
    return "\n".join(str(part.get("text", "")) for part in item.content or item.summary or ())


def _own_turn(turns: list[dict[str, Any]], before: Seq[str]) -> dict[str, Any]:
    """Return the model's turn at the end; a new one if it has one of the fields `before`."""
    last = turns[-1] if turns else {}
    if last.get("role") != "assistant" or any(name in last for name in before):
        turns.append({"role": "assistant"})
    return turns[-1]


class ResponseBuilder:
    """Puts the parts of an answer into `response`, which grows; each change of it is an event.

    Args:
        response: with an empty `output`.
        tools: what the client calls each tool, by the name of the function in its place.
        encodes_reasoning: whether items of reasoning carry their text encoded, too.
    """

    def __init__(
        self,
        response: dict[str, Any],
        tools: Mapping[str, CalledTool] | None = None,
        *,
        encodes_reasoning: bool = False,
    ) -> None:
        self.response = response
        self._tools = tools or {}
        self._encodes_reasoning = encodes_reasoning
        self._arguments = ""  # of the item, if it is a call of a custom tool
        self._num_events = 0
        self._item: dict[str, Any] | None = None  # the last of the output, while it grows

    def start(self) -> list[Event]:
        """Return the events before the first part."""
        return [self._state("created"), self._state("in_progress")]

    def add(self, part: Part) -> Iterator[Event]:
        match part:
            case TextDelta():
                if self._kind != "message":
                    yield from self._open_message()
                yield from self._grow_text(part.text, logprobs=[])
            case ReasoningDelta():
                if self._kind != "reasoning":
                    text = {"type": "reasoning_text", "text": ""}
                    yield from self._open("reasoning", text, summary=[], content=[])
                yield from self._grow_text(part.text)
            case ToolCallStart():
                tool = self._tools.get(part.name, CalledTool(part.name))
                kind = "custom_tool_call" if tool.is_custom else "function_call"
                fields: dict[str, Any] = {"input" if tool.is_custom else "arguments": ""}
                if tool.namespace is not None:
                    fields["namespace"] = tool.namespace
                yield from self._open(kind, call_id=part.call_id, name=tool.name, **fields)
            case ToolCallArguments() if self._kind == "custom_tool_call":
                self._arguments += part.text  # the text in it is certain at its end
            case ToolCallArguments():
                assert self._item is not None
                self._item["arguments"] += part.text
                yield self._of_item("function_call_arguments.delta", delta=part.text)

    def close(self, status: str) -> Iterator[Event]:
        """Close the item that grows."""
        item = self._item
        if item is None:
            return
        item["status"] = status
        if self._kind == "custom_tool_call":
            text = item["input"] = custom_input(self._arguments)
            self._arguments = ""
            yield self._of_item("custom_tool_call_input.delta", delta=text)
            yield self._of_item("custom_tool_call_input.done", input=text)
        elif self._kind == "function_call":
            fields = {name: item[name] for name in ("name", "arguments")}
            yield self._of_item("function_call_arguments.done", **fields)
        else:
            (part,) = item["content"]
            text = part["text"]
            more: dict[str, Any] = {"logprobs": []} if self._kind == "message" else {}
            if self._kind == "reasoning" and self._encodes_reasoning:
                item["encrypted_content"] = _ENCODED + base64.b64encode(text.encode()).decode()
            yield self._of_item(f"{part['type']}.done", content_index=0, text=text, **more)
            yield self._of_item("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", output_index=self._index, item=item)
        self._item = None

    def finish(self, status: str) -> Iterator[Event]:
        """Close the response, whose usage and details are set."""
        if not self.response["output"] and status != "failed":
            yield from self._open_message()
        yield from self.close("completed" if status == "completed" else "incomplete")
        self.response["status"] = status
        yield self._state(status)

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    @property
    def _kind(self) -> str | None:
        return None if self._item is None else self._item["type"]

    def _open_message(self) -> Iterator[Event]:
        text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._open("message", text, role="assistant", content=[])

    def _open(
        self, kind: str, text: dict[str, Any] | None = None, **fields: Any
    ) -> Iterator[Event]:
        """Close the item that grows and begin the next, with an empty text if it has one."""
        yield from self.close("completed")
        head = {"id": new_id(_PREFIXES[kind]), "type": kind, "status": "in_progress"}
        self._item = {**head, **fields}
        self.response["output"].append(self._item)
        yield self._event("output_item.added", output_index=self._index, item=self._item)
        if text is not None:
            self._item["content"].append(text)
            yield self._of_item("content_part.added", content_index=0, part=text)

    def _grow_text(self, text: str, **fields: Any) -> Iterator[Event]:
        assert self._item is not None
        (part,) = self._item["content"]
        part["text"] += text
        yield self._of_item(f"{part['type']}.delta", content_index=0, delta=text, **fields)

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=self._index, **fields)

    def _state(self, kind: str) -> Event:
        return self._event(kind, response=self.response)

    def _event(self, kind: str, **fields: Any) -> Event:
        """Return an event with what its fields are now: they may grow afterwards."""
        number = self._num_events
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": number, **copy.deepcopy(fields)}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
