"""Conversations of requests to prompts: what the chat template needs to know of the protocol.

Blocks while the template runs: call it in a thread.
"""

import json
from collections.abc import Mapping, Sequence as Seq
from itertools import chain
from typing import Any

from nanovllm.chat.templates import template_options
from nanovllm.options.validation import shown
from nanovllm.server.error_bodies import APIError
from nanovllm.server.protocol.chat import ChatTool, Message
from nanovllm.server.state import ServerState


def render(
    server: ServerState,
    messages: Seq[Message],
    *,
    tools: Seq[ChatTool] | None = None,
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
    options = template_options(
        not continues if add_generation_prompt is None else add_generation_prompt,
        continues,
        [tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        server.chat_template,
        chat_template_kwargs,
    )
    processor = server.llm.engine.input_processor
    # Before the template, which takes its time; also for one that is to be cut.
    processor.limit.check_text("the conversation", *chain.from_iterable(map(_texts, messages)))
    given = [_template_message(index, message) for index, message in enumerate(messages)]
    return processor.chat.render(given, options)


def _texts(message: Message) -> list[str]:
    if not isinstance(message.content, list):
        return [message.content or ""]
    return [text for part in message.content if isinstance(text := part.get("text"), str)]


def _template_message(index: int, message: Message) -> dict[str, Any]:
    """Return a message as templates read it: arguments of tool calls are objects."""
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":  # OpenAI's newer name
        fields["role"] = "system"
    fields.setdefault("content", "")
    for number, call in enumerate(fields.get("tool_calls", ())):
        function, place = call["function"], f"messages[{index}].tool_calls[{number}].function"
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise APIError(
                400,
                f"{place}.arguments must be the JSON text of an object, got "
                f"{shown(function['arguments'])}",
                param=f"{place}.arguments",
            )
        function["arguments"] = arguments
    return fields
