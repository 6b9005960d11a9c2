"""Reads tool calls whose parameters are in tags, as Qwen 3.5, GLM and MiniMax write them.

<tool_call>
<function=f>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>
"""

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Sequence, Set
from typing import ClassVar

from nanovllm.apps.server.output_parsers.json_calls import HermesParser
from nanovllm.apps.server.output_parsers.parameter_types import Function, ParameterTypes
from nanovllm.apps.server.output_parsers.parts import NotACall, Steps
from nanovllm.apps.server.output_parsers.tool_calls import decoded, escaped, quoted
from nanovllm.options.sampling_params import TOKEN_MARK

_HELD = re.compile(rf"\n?{TOKEN_MARK}?(?:<[/a-z:_=\" ]{{0,24}})?\Z")
"""At the end of the text: what may begin the end of a value."""
_GLM_NAME = re.compile(rf"[^\s<>{{}}\[\]{TOKEN_MARK}]")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0*", re.ASCII)
_MAX_LITERAL = 2**16
"""Characters of a literal of Python's: its syntax tree takes a hundred times more."""
_WORDS = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}


class TaggedParser(HermesParser):
    """<tool_call><function=f><parameter=key>value</parameter></function></tool_call>.

    A value is a string, passed on as it arrives, unless the schema of the function has other types
    for the parameter: then it is JSON of such a type, where it can be read so. A line end on each
    side belongs to the tags. Models forget <tool_call>, and tags that close something. JSON in the
    outer tags is read as in the Hermes format; a JSON object in the inner ones is the arguments.
    """

    function: ClassVar[tuple[str, str]] = ("<function=", "</function>")
    """The tags around a call; the first ends before the name."""
    parameter: ClassVar[tuple[str, str]] = ("<parameter=", "</parameter>")
    """The tags around a value, likewise."""
    name_end: ClassVar[str] = ">"  # what follows a name; no name contains it
    trims_values: ClassVar[bool] = True
    """Whether a line end on each side of a value belongs to the tags."""

    def __init__(self, tags: Sequence[str], functions: Sequence[Function] = ()) -> None:
        super().__init__(tags, functions)
        self._begin, self._finish = map(self._tag, self.function)
        self._key_begin, self._value_finish = map(self._tag, self.parameter)
        self._openings = (self._opening, self._begin)
        closing = ("\n?" if self.trims_values else "") + self._value_finish
        following = f"{self._key_begin}|{self._finish}"
        self._name_character = re.compile(rf"[^<>\n{self.name_end[0]}{TOKEN_MARK}]")
        self._value_end = re.compile(rf"{closing}|\n(?={following})")
        self._types = {each.name: each.types for each in self._functions}

    def _calls(self) -> Steps[None]:
        if not self._text[: self._pos].endswith(self._begin):
            if (yield from self._next()) in ("{", "["):
                yield from super()._calls()
                return
            if not (yield from self._accept(self._begin)):
                raise NotACall
        yield from self._function()
        while (yield from self._accept_next(self._begin)):
            yield from self._function()
        yield from self._accept_next(self._end)

    def _function(self) -> Steps[None]:
        """Read a call from its name on."""
        name = yield from self._function_name()
        if (yield from self._next()) == "{":
            yield from self._named_call(name)
            yield from self._skip_tags(self._finish)
            return
        self._start(name)
        self._drop_read()
        types = self._types.get(name) or ParameterTypes(None)
        separator = ""
        self._send_arguments("{")
        with contextlib.suppress(NotACall):  # it is cut off: what there is was passed on
            while (yield from self._has_parameter()):
                try:
                    key = yield from self._key_of_value()
                except NotACall:
                    continue
                self._send_arguments(f"{separator}{quoted(key)}: ")
                separator = ", "
                yield from self._parameter(types.of(key))
            self._send_arguments("}")
        self._drop_read()

    def _function_name(self) -> Steps[str]:
        """Read a name and what stands after it."""
        name = (yield from self._word(self._name_character)).strip(" \t\"'")
        if not name or not (yield from self._accept(self.name_end)):
            raise NotACall
        return name

    def _key_of_value(self) -> Steps[str]:
        """Read a parameter's name up to its value."""
        return (yield from self._function_name())

    def _has_parameter(self) -> Steps[bool]:
        """Read up to the next parameter or the end of the call; return whether there is one.

        Anything else is ignored. Like `_parameter`, raises NotACall if the answer was cut off.
        """
        while True:
            if (yield from self._accept_next(self._key_begin)):
                return True
            if (yield from self._accept(self._finish)):
                return False
            if not (yield from self._peek()):
                if self._cut:
                    raise NotACall
                return False
            for tag in (self._end, *self._openings):
                if (yield from self._is_next(tag)):
                    return False
            self._pos += 1

    def _parameter(self, types: Set[str]) -> Steps[None]:
        """Read a value and the tag after it, and pass it on."""
        if self.trims_values:
            yield from self._accept("\n")
        pieces: list[str] | None = None if types == {"string"} else []  # a string is passed on
        self._send_arguments('"' if pieces is None else "")
        while True:
            found = self._value_end.search(self._text, self._pos)
            if found is None:
                held = _HELD.search(self._text, self._pos)
                assert held is not None
                is_whole = self._ended and not self._cut
                end = len(self._text.removesuffix("\n")) if is_whole else held.start()
                self._take_value(end, pieces)
                if self._ended:
                    self._pos = len(self._text)
                if is_whole:
                    break
                yield from self._more()
                continue
            self._take_value(found.start(), pieces)
            start = self._pos
            self._pos += len(found[0])
            if (yield from self._is_end_of_value()):
                break
            end = self._pos
            self._pos = start
            self._take_value(end, pieces)
        self._send_arguments('"' if pieces is None else as_json("".join(pieces), types))

    def _take_value(self, end: int, pieces: list[str] | None) -> None:
        """Read the text up to `end`: pass it on as a part of a string, or add it to `pieces`."""
        text = self._text[self._pos : end]
        self._pos = end
        if pieces is not None:
            pieces.append(text)
        self._write(escaped(text) if pieces is None else "")

    def _is_end_of_value(self) -> Steps[bool]:
        """Whether a tag that closes a value does: only the next tag, or nothing, may follow."""
        start = self._pos
        tags = (self._key_begin, self._finish, self._end, *self._openings)
        yield from self._skip_space()
        begin = self._pos
        self._pos = start
        while not (rest := self._text[begin:]).startswith(tags):
            if not any(tag.startswith(rest) for tag in tags):
                return False
            if self._ended:
                break
            yield from self._more()
        return True


class InvokeParser(TaggedParser):
    """<invoke name="f"><parameter name="key">value</parameter></invoke> in a tag; MiniMax M2."""

    function = ('<invoke name="', "</invoke>")
    parameter = ('<parameter name="', "</parameter>")
    name_end = '">'
    trims_values = False


class GlmParser(TaggedParser):
    """<tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>; GLM 4.5 on.

    So do Ling 3 and Laguna write. There may be white space between the tags.
    """

    function = ("<tool_call>", "</tool_call>")
    parameter = ("<arg_key>", "</arg_value>")
    trims_values = False

    def _calls(self) -> Steps[None]:
        if (yield from self._next()) in ("{", "["):
            yield from self._json_calls()
        else:
            yield from self._function()

    def _function_name(self) -> Steps[str]:
        name = yield from self._word(_GLM_NAME)
        yield from self._skip_space()
        for tag in (self._key_begin, self._finish, "{"):
            if name and (yield from self._is_next(tag)):
                return name
        raise NotACall

    def _key_of_value(self) -> Steps[str]:
        key = (yield from self._word(self._name_character)).strip()
        for tag in self._tags[3:5]:
            if not key or not (yield from self._accept_next(tag)):
                raise NotACall
        return key


def as_json(text: str, types: Set[str]) -> str:
    """Return a value as JSON of one of these types, or else as a string.

    It may be Python's, as chat templates write values: True, ['a', None], and 7.0 an integer.
    """
    value = text.strip()
    if _WORDS.get(value.lower()) in types:
        return value.lower().replace("none", "null")
    number = "integer" if value.lstrip("-").isdecimal() else "number"
    if types & {number, "number"} and _NUMBER.fullmatch(value):
        return value
    if "integer" in types and (whole := _WHOLE.fullmatch(value)):
        return whole[1]
    kind = {"{": "object", "[": "array", "(": "array"}.get(value[:1])
    if kind in types and (found := _object_or_list(value)) is not None:
        return found
    inner = decoded(value) if value.startswith('"') and "string" not in types else None
    return quoted(text) if inner is None else as_json(inner, types)


def _object_or_list(text: str) -> str | None:
    """Return an object or a list as JSON, whether it is JSON or Python's; None: it is neither."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    with contextlib.suppress(ValueError, RecursionError):
        json.loads(text, parse_constant=refuse)
        return text
    if len(text) > _MAX_LITERAL:
        return None
    try:
        with warnings.catch_warnings():  # of a backslash that escapes nothing
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text)
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        found.encode()  # half of a surrogate pair cannot be sent
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return found if found[0] in "{[" else None
