"""Conversations to text: checks messages in OpenAI's format and renders them by a chat template.

Where a template refuses a conversation or leaves some of it out, other forms of it are tried.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import Any

from nanovllm.chat.openai_messages import fields_of, is_message, listed, prepared
from nanovllm.chat.pictures import Locate, Rendered, Show, anywhere, forms, hide, with_pictures
from nanovllm.chat.template_process import TemplateError, TemplateProcess, TemplateRefusalError
from nanovllm.chat.template_shape import TemplateShape, find_shape
from nanovllm.chat.tool_messages import (
    completed,
    fitted,
    for_harmony,
    is_harmony,
    shows_pythonic_calls,
    with_thinking,
)
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.options.validation import shown

Message = Mapping[str, Any]
"""One message of a conversation, such as {"role": "user", "content": "Hello!"}. A pydantic object
with these fields, such as those of the openai package, will do."""

_NO_TEMPLATE_VARIABLES = {
    *("messages", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "padding", "truncation", "max_length", "sanitize_control_tokens"),
}
"""Arguments of transformers' apply_chat_template that have no meaning here."""

_MAX_SHAPES = 16  # templates of which is known how they take tools

_END_OF_MESSAGE = "CONTINUE_FINAL_MESSAGE "
"""Marks where the final message ends in the rendered text. A template that strips the message
strips the last space of the mark, too."""


def as_conversations(messages: Any) -> Any:
    """Return the conversations of an argument that is one conversation or a list of them.

    Raises:
        InvalidRequestError: it is neither.
    """
    messages = listed(messages)
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
    """Renders conversations with the tokenizer's templates, or others, in a separate process.

    Args:
        marker: what templates write for a picture; None: the model reads text only.
        placeholder: the text of a picture in a template that knows none.
    """

    def __init__(
        self, tokenizer: TextTokenizer | None, marker: str | None = None, placeholder: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self._marker = marker
        self._placeholder = placeholder
        self._process = TemplateProcess()
        self._shapes: dict[tuple[str, bool], TemplateShape] = {}

    def shutdown(self) -> None:
        """End the process. It is started again when needed."""
        self._process.shutdown()

    def render(
        self, messages: Seq[Message], options: Mapping[str, Any], locate: Locate = anywhere
    ) -> Rendered:
        """Return the text of a conversation: its special tokens are in it.

        Args:
            options: chat_template, tools, add_generation_prompt, continue_final_message, and
                further variables of the template.
            locate: finds the files of pictures.

        Raises:
            InvalidRequestError: there is no tokenizer, or no template; the messages or options are
                invalid, or the template fails.
        """
        if (tokenizer := self._tokenizer) is None:
            raise InvalidRequestError("this engine has no tokenizer, so there is no chat template")
        shown_pictures: list[Any] = []
        takes = None if self._marker is None else shown_pictures
        conversation = prepared(messages, takes, locate)
        variables = {"add_generation_prompt": False, **options}
        for name in ("tools", "documents"):  # templates ask only whether they are there
            variables[name] = variables.get(name) or None
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
            if fields_of(messages[-1]).get("content") is None or (
                conversation[-1]["role"] == "system"
            ):
                raise InvalidRequestError(
                    "the final message has no content that could be continued"
                )
            conversation[-1]["content"] += _END_OF_MESSAGE
        if chat_template is None and tokenizer.chat_template is None:
            raise InvalidRequestError(
                "this checkpoint has no chat template, so it may not know conversations: give "
                "chat_template (--chat-template), or continue texts: generate, /v1/completions"
            )
        with _template_errors():
            template: Any = tokenizer.get_chat_template(chat_template, tools=variables["tools"])
            if not isinstance(template, str):
                raise TemplateError(f"a template is a string, got {shown(template)}")
            if shown_pictures:
                found = self._with_pictures(template, conversation, variables, shown_pictures)
            else:
                found = Rendered(self._told(template, conversation, variables))
        return found._replace(text=_before_mark(found.text)) if continues else found

    def as_they_are(self, messages: Seq[Message], options: Mapping[str, Any]) -> str:
        """Return the text of messages by the checkpoint's own template, which may know any roles.

        Raises:
            InvalidRequestError: there is no template, or it fails.
        """
        assert self._tokenizer is not None
        variables = {"add_generation_prompt": False, "tools": None, "documents": None, **options}
        with _template_errors():
            template = self._tokenizer.get_chat_template()
            return self._render(template, {**variables, "messages": list(messages)})

    def _with_pictures(
        self,
        template: str,
        conversation: list[dict[str, Any]],
        variables: Mapping[str, Any],
        pictures: Seq[Any],
    ) -> Rendered:
        """Return the text of a conversation with pictures: of the first form in which the template
        shows them all.
        """
        assert self._marker is not None
        hidden = hide(variables, self._marker)
        refusal: TemplateError | None = None
        for form, show in forms(hide(conversation, self._marker), self._placeholder):
            try:
                text = self._told(template, form, hidden, show)
            except TemplateRefusalError as error:
                refusal = error
                continue
            if text.count(self._marker) == len(pictures):
                return with_pictures(text, self._marker, pictures)
        raise refusal or TemplateError(
            f"the conversation has {len(pictures)} pictures, and it does not show them all"
        )

    def shape(self, template: str) -> TemplateShape:
        """Return how a template takes tools; those that show none get them in the Hermes format."""
        try:
            return TemplateShape() if is_harmony(template) else self._shape(template, True)
        except TemplateError:
            return TemplateShape(tools=None)

    def _told(
        self,
        template: str,
        conversation: list[dict[str, Any]],
        variables: Mapping[str, Any],
        show: Show = dict,
    ) -> str:
        """Return the text of the first form of a conversation that the template takes whole, else
        of the last form that it takes; raise TemplateError if it takes none.
        """
        refusals: list[TemplateError] = []

        def attempt(form: list[dict[str, Any]]) -> str | None:
            try:
                return self._rendered(template, form, variables, show)
            except TemplateRefusalError as error:
                refusals.append(error)
                return None

        found: str | None = None
        for form in _retold(conversation):
            text = attempt(form)
            if text is not None and _is_told(form, text):
                return text
            found = text if text is not None else found
        if found is None and form[0]["role"] == "system":
            found = attempt(_without_system(form))
        if found is None:
            raise refusals[0]
        return found

    def _rendered(
        self,
        template: str,
        conversation: list[dict[str, Any]],
        variables: Mapping[str, Any],
        show: Show,
    ) -> str:
        """Return the text of a conversation: tools, calls and results are in it."""
        try:
            return self._render(template, self._fitted(template, conversation, variables, show))
        except TemplateRefusalError:
            tools = completed(variables["tools"])
            if tools == variables["tools"]:
                raise
        variables = {**variables, "tools": tools}
        return self._render(template, self._fitted(template, conversation, variables, show))

    def _fitted(
        self,
        template: str,
        conversation: list[dict[str, Any]],
        variables: Mapping[str, Any],
        show: Show,
    ) -> dict[str, Any]:
        """Return the variables of a rendering; an option of a variable's own name goes first.
        `show` says how messages with pictures are written.
        """
        tools = variables["tools"]
        more: dict[str, Any] = {}
        if shows_pythonic_calls(template) or "tool_plan" in template:
            conversation = with_thinking(conversation)
        if is_harmony(template):
            conversation, tools = for_harmony(conversation, tools)
        elif tools or any(m["role"] == "tool" or m.get("tool_calls") for m in conversation):
            shape = self._shape(template, bool(tools))
            conversation, more = fitted(conversation, tools, template, shape)
        return {**more, **variables, "tools": tools, "messages": list(map(show, conversation))}

    def _render(self, template: str, variables: Mapping[str, Any]) -> str:
        assert self._tokenizer is not None
        return self._process.render(template, {**self._tokenizer.special_tokens_map, **variables})

    def _shape(self, template: str, has_tools: bool) -> TemplateShape:
        """Return how a template takes tools and calls; it is found out once."""
        key = (template, has_tools)
        if key not in self._shapes:
            given = {"tools": None, "documents": None, "add_generation_prompt": True}
            found = find_shape(
                lambda variables: self._render(template, {**given, **variables}),
                template,
                has_tools=has_tools,
            )
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = found
        return self._shapes[key]


@contextlib.contextmanager
def _template_errors() -> Iterator[None]:
    """Raise what goes wrong with a template as an InvalidRequestError."""
    try:
        yield
    except (TemplateError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the chat template cannot render this: {error}") from error


def _before_mark(text: str) -> str:
    """Return the text up to the mark at the end of the final message."""
    before, mark, after = text.rpartition(_END_OF_MESSAGE.strip())
    if not mark:
        raise InvalidRequestError(
            "the chat template leaves out the final message, so it cannot be continued"
        )
    return before if after.startswith(" ") else before.rstrip()


def _retold(conversation: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation, then forms of it with the same text at other places.

    First, arguments that are not a JSON object become the value of one argument; then later system
    messages become words of the user.
    """
    yield conversation
    if any(_odd_arguments(conversation)):
        conversation = [_with_plain_arguments(message) for message in conversation]
        yield conversation
    if _has_odd_systems(conversation):
        yield _with_later_systems_said(conversation)


def _without_system(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose first, a system message, begins the user's first message."""
    first, *rest = conversation
    index = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if index is None:
        return [{**first, "role": "user"}, *rest]
    asked = _joined(first, rest[index])
    return [*rest[:index], {**rest[index], "content": asked}, *rest[index + 1 :]]


def _is_told(conversation: Seq[Mapping[str, Any]], text: str) -> bool:
    """Whether a rendered text has what templates tend to lose: further system messages, and
    arguments that are not a JSON object.
    """
    expected = list(_odd_arguments(conversation))
    if _has_odd_systems(conversation):
        expected += [m["content"].strip() for m in conversation if m["role"] == "system"]
    return all(
        given in text
        or any(json.dumps(given, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))
        for given in expected
    )


def _has_odd_systems(conversation: Seq[Mapping[str, Any]]) -> bool:
    """Whether there is a system message other than one at the start."""
    return any(message["role"] == "system" for message in conversation[1:])


def _with_later_systems_said(conversation: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose only system message is the first.

    Later ones stay in place, in a message of the user or a result: agents add one in each turn, and
    the text before it must not change, or its KV is computed again.
    """
    told: list[dict[str, Any]] = []
    is_alone = False  # the last message told has nothing but the text of system messages
    for message in conversation:
        role = message["role"]
        if role == "system" and told and told[-1]["role"] != "assistant":
            told[-1] = {**told[-1], "content": _joined(told[-1], message)}
        elif is_alone and role in ("user", "tool"):
            told[-1] = {**message, "content": _joined(told[-1], message)}
            is_alone = False
        else:
            is_alone = role == "system" and bool(told)
            told.append({**message, "role": "user"} if is_alone else message)
    return told


def _joined(*messages: Mapping[str, Any]) -> str:
    return "\n\n".join(message["content"] for message in messages if message["content"])


def _odd_arguments(conversation: Seq[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the arguments of calls that are texts."""
    for message in conversation:
        for call in message.get("tool_calls", ()):
            if isinstance(given := call.get("function", call)["arguments"], str):
                yield given


def _with_plain_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which arguments that are a text are the value of one argument."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        if isinstance(given := function["arguments"], str):
            function = {**function, "arguments": {"arguments": given}}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls} if calls else message
