"""Conversations to text: checks messages in OpenAI's format and renders them by a chat template.

Knows no requests and no token ids.
"""

from collections.abc import Mapping, Sequence as Seq
from typing import Any

from nanovllm.chat.reasoning import is_harmony
from nanovllm.chat.template_process import TemplateError, TemplateProcess
from nanovllm.chat.tool_messages import (
    for_harmony,
    for_pythonic,
    knows_tools,
    plain_calls,
    shows_pythonic_calls,
    with_tools_as_text,
)
from nanovllm.checkpoint.kept_tokenizer import KeptTokenizer
from nanovllm.errors import InvalidRequestError
from nanovllm.options.validation import shown

Message = Mapping[str, Any]
"""One message of a conversation, such as {"role": "user", "content": "Hello!"}. A pydantic object
with these fields, such as those of the openai package, will do."""

_TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Types of content parts that are text, and the key that holds it."""

_NO_TEMPLATE_VARIABLES = {
    "messages",
    "tokenize",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
    "sanitize_control_tokens",
}
"""Arguments of transformers' apply_chat_template that have no meaning here."""

_END_OF_MESSAGE = "CONTINUE_FINAL_MESSAGE "
"""Marks where the final message ends in the rendered text. A template that strips the message
strips the last space of the mark, too."""


def is_message(value: Any) -> bool:
    """Whether `value` is a message rather than a conversation."""
    return isinstance(value, Mapping) or (
        hasattr(value, "model_dump") and not isinstance(value, type)
    )


def as_conversations(messages: Any) -> Any:
    """Return the conversations of an argument that is one conversation or a list of them.

    Raises:
        InvalidRequestError: it is neither.
    """
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(
            f"messages must be a conversation or a list of them, got {shown(messages)}"
        )
    return [messages] if messages and is_message(messages[0]) else messages


def template_options(
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[dict[str, Any]] | None,
    chat_template: str | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the options of `render` for the arguments of `LLM.chat`.

    An entry of `chat_template_kwargs` replaces the argument of the same name.

    Raises:
        InvalidRequestError: `chat_template_kwargs` is not a dictionary with strings as keys.
    """
    kwargs = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InvalidRequestError(
            f"chat_template_kwargs must be a dictionary of names to values, got {shown(kwargs)}"
        )
    return {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": tools,
        "chat_template": chat_template,
        **kwargs,
    }


class ChatTemplates:
    """Renders conversations by the tokenizer's templates, or others, in a process of its own."""

    def __init__(self, tokenizer: KeptTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._process = TemplateProcess()

    def shutdown(self) -> None:
        """End the process. It is started again when needed."""
        self._process.shutdown()

    def render(self, messages: Seq[Message], options: Mapping[str, Any]) -> str:
        """Return the text of a conversation: its special tokens are in it.

        Args:
            options: chat_template, tools, add_generation_prompt, continue_final_message, and
                further variables of the template.

        Raises:
            InvalidRequestError: there is no tokenizer, or no template; the messages or options are
                invalid, or the template fails.
        """
        if (tokenizer := self._tokenizer) is None:
            raise InvalidRequestError("this engine has no tokenizer, so there is no chat template")
        conversation = _conversation(messages)
        variables = {"tools": None, "documents": None, "add_generation_prompt": False, **options}
        chat_template = variables.pop("chat_template", None)
        continues = bool(variables.pop("continue_final_message", False))
        unknown = sorted(_NO_TEMPLATE_VARIABLES & variables.keys())
        if unknown:
            raise InvalidRequestError(
                f"{unknown[0]} is not an option of a conversation: leave it out"
            )
        if continues:
            if variables["add_generation_prompt"]:
                raise InvalidRequestError(
                    "continue_final_message continues the last message and add_generation_prompt "
                    "starts a new one: set add_generation_prompt=False"
                )
            if not isinstance(conversation[-1].get("content"), str):
                raise InvalidRequestError(
                    "the final message has no content that could be continued"
                )
            conversation[-1]["content"] += _END_OF_MESSAGE
        if chat_template is None and tokenizer.chat_template is None:
            raise InvalidRequestError(
                "this checkpoint has no chat template: give chat_template, or use generate"
            )
        try:
            template: Any = tokenizer.get_chat_template(chat_template, tools=variables["tools"])
            if not isinstance(template, str):
                raise TemplateError(f"a template is a string, got {shown(template)}")
            if is_harmony(template):
                conversation, tools = for_harmony(conversation, variables["tools"])
                variables["tools"] = tools
            elif shows_pythonic_calls(template):
                conversation = for_pythonic(conversation, template)
            elif not knows_tools(template):
                conversation = with_tools_as_text(conversation, variables["tools"])
            variables = {**tokenizer.special_tokens_map, **variables, "messages": conversation}
            text = self._process.render(template, variables)
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the chat template cannot render this: {error}") from error
        return _before_mark(text) if continues else text


def _conversation(messages: Any) -> list[dict[str, Any]]:
    """Return the messages as dictionaries whose content is a string, or absent."""
    if not isinstance(messages, Seq) or not messages or not all(map(is_message, messages)):
        raise InvalidRequestError(
            f'a conversation is a list of {{"role": ..., "content": ...}}, got {shown(messages)}'
        )
    return [_message(f"message {index}", message) for index, message in enumerate(messages)]


def _message(name: str, given: Any) -> dict[str, Any]:
    """Return a message with its content parts joined, and without the keys that hold None."""
    fields = given if isinstance(given, Mapping) else given.model_dump()
    message = {key: value for key, value in fields.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f'{name} has no "role", such as "user" or "assistant": {shown(given)}'
        )
    if "reasoning" in message:  # its newer name; templates read the older one
        message.setdefault("reasoning_content", message["reasoning"])
    if "tool_calls" in message:
        message["tool_calls"] = plain_calls(message["tool_calls"])
    content = message.get("content", "")
    if isinstance(content, list | tuple):  # one line for each part, as vLLM joins them
        message["content"] = "\n".join(_text(name, part) for part in content)
    elif not isinstance(content, str):
        raise InvalidRequestError(
            f"the content of {name} must be a string or a list of parts, got {shown(content)}"
        )
    return message


def _text(name: str, given: Any) -> str:
    """Return the text of a content part."""
    if isinstance(given, str):
        return given
    part = given if isinstance(given, Mapping) or not is_message(given) else given.model_dump()
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXT_OF_PART:
        raise InvalidRequestError(
            f"{name} has a content part of type {shown(kind)}, but the model reads text only: "
            f'give {{"type": "text", "text": ...}}, got {shown(given)}'
        )
    key = _TEXT_OF_PART[kind]
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(
            f'{name}: the "{key}" of a content part must be a string, got {shown(given)}'
        )
    return text


def _before_mark(text: str) -> str:
    """Return the text up to the mark at the end of the final message."""
    before, mark, after = text.rpartition(_END_OF_MESSAGE.strip())
    if not mark:
        raise InvalidRequestError(
            "the chat template leaves out the final message, so it cannot be continued"
        )
    return before if after.startswith(" ") else before.rstrip()
