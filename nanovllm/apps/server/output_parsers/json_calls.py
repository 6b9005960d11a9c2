"""Reads tool calls whose arguments are JSON: in the formats of Hermes, Llama 3, Kimi and others."""

import re
import secrets
import string
from collections.abc import Sequence

from nanovllm.apps.server.output_parsers.parameter_types import Function
from nanovllm.apps.server.output_parsers.parts import NotACall, Steps
from nanovllm.apps.server.output_parsers.tool_calls import ToolCallParser
from nanovllm.options.sampling_params import TOKEN_MARK

FUNCTOOLS = "functools["
_FENCE = "```"
_NAME_CHARACTER = re.compile(r"[-.\w]")
_UNTAGGED_NAME = re.compile(rf"[^\s`{{}}<>\[\]{TOKEN_MARK}]")


class HermesParser(ToolCallParser):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>; Hermes, Qwen, SmolLM.

    The tags may hold several calls. Nemotron before version 3 has a list between other tags.
    """

    def _calls(self) -> Steps[None]:
        yield from self._json_calls()


class LlamaParser(HermesParser):
    """{"name": "f", "parameters": {...}}, several separated by ";" or in a list; Llama 3.

    It begins a line, or follows <|python_tag|>.
    """

    only_known_keys = True
    at_start = r"\A\s*(?=[\[{])"
    in_line = r"\n[ \t]*(?=[\[{])"


class MistralParser(ToolCallParser):
    """[TOOL_CALLS] with a JSON list of calls, or with name[ARGS]{...} for each call; Mistral."""

    def _new_call_id(self) -> str:
        """Return an id as Mistral's chat templates demand it."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _calls(self) -> Steps[None]:
        if (yield from self._next()) in ("[", "{"):
            yield from self._json_calls()
            return
        name = yield from self._known_word()
        call_id = None
        if (yield from self._accept_next(self._tag("[CALL_ID]"))):
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


class GraniteParser(HermesParser):
    """<|tool_call|>[{"name": "f", "arguments": {...}}]; Granite 3.

    Version 3.1 also writes <tool_call> after the tag, or in its place.
    """

    other_openings = ("<tool_call>",)

    def _calls(self) -> Steps[None]:
        yield from self._skip_tags(self._openings[1])
        yield from super()._calls()


class Phi4Parser(HermesParser):
    """functools[{"name": "f", "arguments": {...}}], or the list between tags; Phi-4-mini."""

    other_openings = (FUNCTOOLS,)

    def _calls(self) -> Steps[None]:
        if self._text[: self._pos].endswith(FUNCTOOLS):
            self._pos -= 1  # the bracket belongs to the list
        yield from super()._calls()


class CohereParser(HermesParser):
    """[{"tool_name": "f", "parameters": {...}}] between tags; Command R7B, A."""

    name_keys = ("tool_name", "name")


class SectionParser(HermesParser):
    """Calls in a section, each between tags of its own: a header with the name, then arguments.

    So write HunYuan and Apriel. The arguments may be a block of Markdown. Models forget the tags of
    the section, and write JSON in its place.
    """

    calls_are_json = False

    def __init__(self, tags: Sequence[str], functions: Sequence[Function] = ()) -> None:
        super().__init__(tags, functions)
        self._call_tag, self._call_end = self._tags[2:4]
        self._openings = (self._opening, self._call_tag)
        self._call_ids: set[str] = set()

    def _tags_after(self) -> tuple[str, ...]:
        return (self._call_end, *super()._tags_after())

    def _calls(self) -> Steps[None]:
        is_tagged = self._text[: self._pos].endswith(self._call_tag)
        if not is_tagged:
            is_tagged = yield from self._accept_next(self._call_tag)
        if not is_tagged:
            yield from super()._calls()
            return
        while is_tagged:
            yield from self._tagged_call()
            is_tagged = yield from self._accept(self._call_tag)

    def _tagged_call(self) -> Steps[None]:
        """Read a call after its tag, up to the tag that closes it."""
        yield from self._skip_tags(self._call_tag)
        if (yield from self._peek()) == "{":
            yield from self._call()
        else:
            name, call_id = yield from self._header()
            yield from self._accept_next(_FENCE)
            yield from self._accept("json")
            if not name or (yield from self._next()) != "{":
                raise NotACall
            yield from self._named_call(name, call_id)
            yield from self._accept_next(_FENCE)
        yield from self._skip_tags(self._call_end)

    def _header(self) -> Steps[tuple[str, str | None]]:
        """Read what stands before the arguments; return the name and the id of the call."""
        return (yield from self._word(_UNTAGGED_NAME)), None


class DeepSeekParser(SectionParser):
    """A name and JSON between tags; in version 3 a type, a name and a block of JSON; DeepSeek."""

    def _header(self) -> Steps[tuple[str, str | None]]:
        name = yield from self._word(_UNTAGGED_NAME)
        if (yield from self._accept(self._tags[4])):
            yield from self._skip_space()
            name = (yield from self._word(_UNTAGGED_NAME)) or name
        return name, None


class KimiParser(SectionParser):
    """functions.f:0 and JSON between tags; Kimi. What stands before the JSON is the call's id."""

    def _header(self) -> Steps[tuple[str, str | None]]:
        call_id = yield from self._word(_UNTAGGED_NAME)
        yield from self._accept_next(self._tags[4])
        name, _, number = call_id.rpartition(":")
        is_whole = name != "" and number.isdecimal() and call_id not in self._call_ids
        self._call_ids.add(call_id)
        name = name if number.isdecimal() else call_id
        return name.removeprefix("functions."), call_id if is_whole else None
