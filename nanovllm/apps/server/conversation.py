"""What the routes of conversations share: the way from a conversation to a prompt, and from an
answer's text to its parts.

`render` and `prepare` block while the chat template runs: call them in a thread.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence as Seq
from itertools import chain
from typing import Any, TypeVar

from fastapi import Request

from nanovllm.apps.server import generation
from nanovllm.apps.server.error_bodies import APIError, naming_params
from nanovllm.apps.server.output_parsers.parts import (
    Part,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.protocol import MAX_CALLS, ConversationRequest, Message, Tool
from nanovllm.apps.server.state import ServerState, state_of
from nanovllm.chat.templates import template_options
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import InvalidRequestError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import CompletionOutput

Body = TypeVar("Body", bound=ConversationRequest)


def render(
    server: ServerState,
    messages: Seq[Message],
    *,
    tools: Seq[Tool] = (),
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """Return the prompt of a conversation, rendered by the chat template.

    Raises:
        APIError, InvalidRequestError: a message is invalid, the template refuses it, or the
            request brings a template: a template is a program.
    """
    if "chat_template" in (chat_template_kwargs or {}):
        raise APIError(
            400,
            "chat_template_kwargs must not have a chat_template: templates are not taken from "
            "requests",
            param="chat_template_kwargs",
        )
    continues = bool(continue_final_message)
    fields = set(Tool.model_fields)
    dumped = [tool.model_dump(include=fields, exclude_none=True) for tool in tools]
    options = template_options(
        not continues if add_generation_prompt is None else add_generation_prompt,
        continues,
        [{"type": "function", "function": tool} for tool in dumped] or None,
        server.chat_template,
        {**(server.options.default_chat_template_kwargs or {}), **(chat_template_kwargs or {})},
    )
    processor = server.llm.engine.input_processor
    # Before the template, which takes its time; also for one that is to be cut.
    processor.limit.check_text("the prompt", *chain.from_iterable(map(_texts, messages)))
    conversation: Seq[Any] = messages  # pydantic objects will do
    _ = server.answer_format  # found out here, in a thread
    return processor.render(conversation, options, server.locate)


def _texts(message: Message) -> list[str]:
    if not isinstance(message.content, list):
        return [message.content or ""]
    return [text for part in message.content if isinstance(text := part.get("text"), str)]


class Turns:
    """Collects the turns of a conversation, in time linear in the size of the request.

    Args:
        too_many: the error for more than MAX_CALLS calls in succession.
    """

    def __init__(self, too_many: str) -> None:
        self.all: list[dict[str, Any]] = []
        """Fields of messages."""
        self._too_many = too_many
        self._names: dict[str, str] = {}  # of tools, by the id of a call

    def turn(self, role: str, before: Collection[str] = ()) -> dict[str, Any]:
        """Return the last turn, or a new one if its role differs or it has a field in `before`."""
        last = self.all[-1] if self.all else {}
        if last.get("role") != role or any(name in last for name in before):
            self.all.append({"role": role})
        return self.all[-1]

    def add_call(self, call_id: str, name: str, arguments: Any) -> None:
        """Add a call to the model's turn; raise InvalidRequestError if that has very many."""
        calls = self.turn("assistant").setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            raise InvalidRequestError(self._too_many)
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
        self._names[call_id] = name

    def add_result(self, call_id: str, content: Any) -> None:
        """Add what a tool returned, with the tool's name if its call is known."""
        result = {"role": "tool", "tool_call_id": call_id, "content": content}
        name = self._names.get(call_id)
        self.all.append(result if name is None else {**result, "name": name})


def prepare(
    server: ServerState,
    body: Body,
    render: Callable[[ServerState, Body], Prompt],
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    **changes: Any,
) -> tuple[Prompt, SamplingParams]:
    """Return a request's prompt, and the parameters with which it runs: see `AnswerFormat.params`.

    Args:
        changes: parameters that the route decides.
    """
    defaults = server.llm.get_default_sampling_params()
    recommended = server.llm.engine.generation_config.get("max_new_tokens")
    # A sequence ends at max_model_len anyway: so this is what the context has room for.
    most = server.max_model_len if recommended is None else defaults.max_tokens
    if count := generation.num_logprobs(server, logprobs):
        most = max(1, min(most, generation.MAX_ANSWER_LOGPROBS // count))
    if max_tokens is not None:
        changes["max_tokens"] = max_tokens
    params = generation.sampling_params(  # first, for its checks cost little
        server, body, default_max_tokens=most, logprobs=logprobs, **changes
    )
    prompt = render(server, body)
    text = prompt.text or ""
    generation.check_logprobs(server, params, [len(text)])
    params = server.answer_format.params(
        params, text, body.functions, body.choice, parallel_tool_calls=body.may_repeat
    )
    return dataclasses.replace(prompt, salt=body.cache_salt), params


async def count_tokens(
    request: Request, body: Body, render: Callable[[ServerState, Body], Prompt], field: str
) -> int:
    """Return the number of prompt tokens of the conversation in `field`."""
    server = state_of(request)
    server.check_model(body.model)
    token_ids = server.llm.engine.input_processor.token_ids
    with naming_params(type(body).model_fields, field):
        place = generation.admit(request, 1)
        prompt = await place.prepare(render, server, body)
        return len(await place.prepare(token_ids, await generation.opened(place, prompt)))


class AnswerReader:
    """Reads the text of one answer, as it comes."""

    def __init__(self, server: ServerState, body: ConversationRequest, prompt: str) -> None:
        self._parser = server.answer_format.parser(
            prompt, body.functions, parallel_tool_calls=body.may_repeat
        )
        self._with_reasoning = body.include_reasoning is not False
        self._tokenizer: Any = server.llm.engine.input_processor.tokenizer
        self._reasoning = ""
        self._arguments: str | None = None  # of the last call
        self.num_output = 0
        """How many tokens came."""

    def parts(self, completion: CompletionOutput) -> list[Part]:
        """Return what is certain after the next piece of the answer."""
        self.num_output += len(completion.token_ids)
        parts = self._parser.feed(completion.text)
        self._note(parts)
        if completion.finish_reason is not None:
            at_stop_string = isinstance(completion.stop_reason, str)
            in_call = self._is_in_call() or self._parser.holds_call
            cut = completion.finish_reason != "stop" or (at_stop_string and in_call)
            last = self._parser.finish(cut=cut)
            self._note(last)
            parts += last
        if not self._with_reasoning:
            parts = [part for part in parts if not isinstance(part, ReasoningDelta)]
        return parts

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """Return why the answer ended; a stop string inside a call does not end a call."""
        if completion.finish_reason != "stop" or self._arguments is None:
            return completion.finish_reason
        is_cut = isinstance(completion.stop_reason, str) and self._is_in_call()
        return "stop" if is_cut else "tool_calls"

    def _note(self, parts: Seq[Part]) -> None:
        for part in parts:
            match part:
                case ReasoningDelta():
                    self._reasoning += part.text
                case ToolCallStart():
                    self._arguments = ""
                case ToolCallArguments():
                    self._arguments = (self._arguments or "") + part.text

    def _is_in_call(self) -> bool:
        """Whether the arguments of the last call are not whole."""
        try:
            json.loads("{}" if self._arguments is None else self._arguments)
        except (ValueError, RecursionError):
            return True
        return False

    @property
    def num_reasoning_tokens(self) -> int:
        """How many tokens the reasoning so far has; its tags do not count."""
        if not self._reasoning:
            return 0
        token_ids = self._tokenizer.encode(self._reasoning, add_special_tokens=False)
        return min(len(token_ids), self.num_output)
