"""Reads tool calls that are JSON objects: in the formats of Hermes, Llama 3 and Mistral.

Pure text: knows no requests and no tokens.
"""

import re
import secrets
import string

from nanovllm.chat.call_arguments import NotACall
from nanovllm.chat.tool_calls import Steps, ToolCallParser

_NAME_CHARACTER = re.compile(r"[-.\w]")


class HermesParser(ToolCallParser):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>; Hermes, Qwen, SmolLM.

    The tags may hold several calls, in a list or one behind the other.
    """

    tag = "<tool_call>"
    closing = "</tool_call>"

    def _calls(self) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._peek()) == "[":
            yield from self._list()
        else:
            yield from self._call()
            yield from self._skip_space()
            while (yield from self._peek()) == "{":
                yield from self._call()
                yield from self._skip_space()
        yield from self._skip_space()
        yield from self._accept(self._end)


class LlamaParser(ToolCallParser):
    """{"name": "f", "parameters": {...}}, several separated by ";"; Llama 3.

    It begins a line, or follows <|python_tag|>.
    """

    tag = "<|python_tag|>"
    only_known_keys = True

    def _find(self) -> tuple[int, int] | None:
        start = "" if self._has_sent_text else r"|\A\s*(?=\{)"
        match = re.search(rf"{re.escape(self._opening)}{start}|\n[ \t]*(?=\{{)", self._text)
        return None if match is None else match.span()

    def _calls(self) -> Steps[None]:
        separator = True
        while separator:
            yield from self._skip_space()
            yield from self._call()
            yield from self._skip_space()
            separator = yield from self._accept(";")
            yield from self._skip_space()
            yield from self._accept(self._opening)


class MistralParser(ToolCallParser):
    """[TOOL_CALLS] with a JSON list of calls, or with name[ARGS]{...} for each call; Mistral."""

    tag = "[TOOL_CALLS]"

    def _new_call_id(self) -> str:
        """Return an id as Mistral's chat templates demand it."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _calls(self) -> Steps[None]:
        yield from self._skip_space()
        first = yield from self._peek()
        if first == "[":
            yield from self._list()
        elif first == "{":
            yield from self._call()
        else:
            name = yield from self._known_word()
            call_id = None
            if (yield from self._accept(self._tag("[CALL_ID]"))):
                call_id = yield from self._known_word()
            yield from self._accept(self._tag("[ARGS]"))
            yield from self._skip_space()
            if (yield from self._peek()) != "{":
                raise NotACall
            yield from self._named_call(name, call_id)

    def _known_word(self) -> Steps[str]:
        """Read a name or an id."""
        word = yield from self._word(_NAME_CHARACTER)
        if not word:
            raise NotACall
        return word
