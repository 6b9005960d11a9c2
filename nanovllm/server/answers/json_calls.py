"""Reads tool calls that are JSON objects: in the formats of Hermes, Llama 3 and Mistral.

Pure text: knows no requests and no tokens.
"""

import re
import secrets
import string

from nanovllm.server.answers.call_arguments import NotACall
from nanovllm.server.answers.text_reader import Steps
from nanovllm.server.answers.tool_calls import ToolCallParser

_NAME_CHARACTER = re.compile(r"[-.\w]")


class HermesParser(ToolCallParser):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>; Hermes, Qwen, SmolLM.

    The tags may hold several calls.
    """

    tag = "<tool_call>"
    closing = "</tool_call>"

    def _calls(self) -> Steps[None]:
        yield from self._json_calls()


class LlamaParser(ToolCallParser):
    """{"name": "f", "parameters": {...}}, several separated by ";" or in a list; Llama 3.

    It begins a line, or follows <|python_tag|>.
    """

    tag = "<|python_tag|>"
    only_known_keys = True

    def _find(self) -> tuple[int, int] | None:
        start = "" if self._has_sent_text else r"|\A\s*(?=[\[{])"
        match = re.search(rf"{re.escape(self._opening)}{start}|\n[ \t]*(?=[\[{{])", self._text)
        return None if match is None else match.span()

    def _calls(self) -> Steps[None]:
        yield from self._json_calls()


class MistralParser(ToolCallParser):
    """[TOOL_CALLS] with a JSON list of calls, or with name[ARGS]{...} for each call; Mistral."""

    tag = "[TOOL_CALLS]"

    def _new_call_id(self) -> str:
        """Return an id as Mistral's chat templates demand it."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _calls(self) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._peek()) in ("[", "{"):
            yield from self._json_calls()
            return
        name = yield from self._known_word()
        call_id = None
        yield from self._skip_space()
        if (yield from self._accept(self._tag("[CALL_ID]"))):
            call_id = yield from self._known_word()
        start = self._pos
        yield from self._skip_tags(self._tag("[ARGS]"))
        has_tag = self._pos > start
        first = yield from self._peek()
        if has_tag and not first and not self._cut:  # models leave out empty arguments
            self._start(name, call_id)
            self._send_arguments("{}")
        elif first == "{":
            yield from self._named_call(name, call_id)
        else:
            raise NotACall

    def _known_word(self) -> Steps[str]:
        """Read a name or an id."""
        word = yield from self._word(_NAME_CHARACTER)
        if not word:
            raise NotACall
        return word
