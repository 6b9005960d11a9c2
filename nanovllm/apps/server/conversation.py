"""What the routes of conversations share: a conversation to a prompt, which is answered, and an
answer's text to its parts.

`render` blocks while the chat template runs: call it in a thread.
"""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence as Seq
from itertools import chain
from typing import Any

from nanovllm.apps.server import generation
from nanovllm.apps.server.error_bodies import APIError
from nanovllm.apps.server.output_parsers.parameter_types import TypedFunction
from nanovllm.apps.server.output_parsers.parts import (
    Part,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from nanovllm.apps.server.params import check_logprobs
from nanovllm.apps.server.protocol.chat import ConversationRequest, Message, Tool
from nanovllm.apps.server.state import ServerState
from nanovllm.chat.templates import template_options
from nanovllm.engine.prompt import Prompt
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import CompletionOutput, RequestOutput


def render(
    server: ServerState,
    messages: Seq[Message],
    *,
    tools: Seq[Tool] = (),
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a conversation, rendered by the chat template.

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
    return processor.chat.render(conversation, options)


def _texts(message: Message) -> list[str]:
    if not isinstance(message.content, list):
        return [message.content or ""]
    return [text for part in message.content if isinstance(text := part.get("text"), str)]


def params_in_form(
    server: ServerState, body: ConversationRequest, prompt: str, params: SamplingParams
) -> SamplingParams:
    """Return the parameters with which a request runs; see `AnswerFormat.params`."""
    check_logprobs(server, params, [len(prompt)])
    functions = body.functions
    return server.answer_format.params(
        params,
        prompt,
        functions,
        body.choice,
        parallel_tool_calls=body.may_repeat,
        strict={function.name for function in functions if function.strict},
    )


async def run(
    place: generation.AdmittedRequest,
    body: ConversationRequest,
    prompt: str,
    params: SamplingParams,
) -> AsyncGenerator[RequestOutput, None]:
    """Generate the answer to a rendered conversation, as `generation.run` does."""
    given = Prompt(prompt, rendered=True, salt=body.cache_salt)
    return await generation.run(place, given, params, stream=bool(body.stream))


class AnswerReader:
    """Reads the text of one answer, as it comes.

    Args:
        functions: the tools of `body`; answers of one request share them.
    """

    def __init__(
        self,
        server: ServerState,
        body: ConversationRequest,
        prompt: str,
        functions: Seq[TypedFunction],
    ) -> None:
        self._parser = server.answer_format.parser(
            has_tools=bool(functions),
            starts_in_reasoning=server.answer_format.starts_in_reasoning(prompt),
            starts_in_answer=server.answer_format.starts_in_answer(prompt),
            parallel_tool_calls=body.may_repeat,
            tools=functions,
        )
        self._with_reasoning = body.include_reasoning is not False
        self._tokenizer: Any = server.llm.engine.input_processor.tokenizer
        self._reasoning = ""
        self._arguments: str | None = None  # of the last call
        self._num_output = 0

    def parts(self, completion: CompletionOutput) -> list[Part]:
        """Return what is certain after the next piece of the answer."""
        self._num_output += len(completion.token_ids)
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
        return min(len(token_ids), self._num_output)
