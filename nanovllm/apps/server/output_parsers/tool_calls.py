"""Reads tool calls out of a model's text, while it arrives.

`tool_formats` says how each model writes calls.
"""

import contextlib
import functools
import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

from nanovllm.apps.server.output_parsers.parameter_types import Function
from nanovllm.apps.server.output_parsers.parts import (
    NotACall,
    PartsReader,
    Steps,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    new_call_id,
    prefix_at_end,
)
from nanovllm.options.sampling_params import TOKEN_MARK

JSON_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_SCALAR = re.compile(r"[-+.\w]")
_ARGUMENTS = ("arguments", "parameters")
_MOST_READ = 4096
_LONGEST_TAG = 64
MAX_CALLS = 128  # calls in an answer; a message of a request may have as many


class ToolCallParser(PartsReader):
    """Splits an answer into text and calls.

    A call is certain, and begins, once its name and the first character of its arguments are known.
    From then on the arguments are passed on as they arrive. A call that goes wrong before is text,
    with its tags, and so is one after `MAX_CALLS` others; one that is cut off before is dropped.
    White space around calls belongs to them.

    Args:
        tags: those of the format, as they stand in the text. The first opens a call; the second
            closes it, or all, but models forget it: "" for none.
        functions: those that may be called, for formats that leave types to their schemas.
    """

    other_openings: ClassVar[tuple[str, ...]] = ()
    """What calls may begin with besides the first tag."""
    at_start: ClassVar[str] = ""  # what may come before a call without a tag that begins an answer
    in_line: ClassVar[str] = ""  # likewise before one that begins a line
    name_keys: ClassVar[tuple[str, ...]] = ("name",)
    """What the name is called in a call that is JSON."""
    only_known_keys: ClassVar[bool] = False  # whether an object with further keys is not a call
    calls_are_json: ClassVar[bool] = True  # whether JSON follows the opening of a call

    def __init__(self, tags: Sequence[str], functions: Sequence[Function] = ()) -> None:
        super().__init__()
        self._tags = tags
        self._functions = functions
        self._opening, self._end = tags[:2]
        self._openings = (self._opening, *map(self._tag, self.other_openings))
        self._stops: tuple[str, ...] = ()  # tags that end a value which was not ended
        self._source: list[str] = []  # what was read since the opening of the last call
        self._num_calls = 0
        self._is_streaming = False  # the text read is arguments of the last call
        self._is_after_call = False  # no text since the last call
        self._has_sent_text = False  # since the answer began, or since the last call

    def fresh(self) -> Self:
        """Return a parser of the same format that has read nothing."""
        return type(self)(self._tags, self._functions)

    def _find(self) -> tuple[int, int] | None:
        """Return where in the unread text the opening of a call begins and ends."""
        patterns = [*map(re.escape, self._openings), self.in_line]
        if not self._has_sent_text:
            patterns.append(self.at_start)
        match = re.search("|".join(filter(None, patterns)), self._text)
        return None if match is None else match.span()

    @abstractmethod
    def _calls(self) -> Steps[None]:
        """Read what follows the opening of a call.

        Raises:
            NotACall: it is text, from what was read after the last whole call.
        """

    def _tags_after(self) -> tuple[str, ...]:
        """Return the tags that may follow JSON in a call."""
        return tuple(filter(None, (self._end, *self._openings)))

    def _skip_repeated(self, begin: int) -> Steps[None]:
        """Read what models write once more after the closing tag: all that was between the tags,
        from the place `begin` in what was read since the opening.
        """
        whole = ("".join(self._source) + self._text[: self._pos])[begin:].strip()
        body = whole.removesuffix(self._end).strip()
        while self._end and body != whole and body:
            while not self._ended and body.startswith(self._text[self._pos :]):
                yield
            if not self._text.startswith(body, self._pos):
                break
            self._pos += len(body)
            yield from self._skip_tags(self._end)
        if self._cut and body.startswith(self._text[self._pos :]):
            self._pos = len(self._text)

    def _tag(self, tag: str) -> str:
        """Return a tag as it stands in the text."""
        marked = TOKEN_MARK + tag
        return marked if marked in self._tags else tag

    def _new_call_id(self) -> str:
        return new_call_id()

    def _answer(self) -> Steps[None]:
        while True:
            found = self._find()
            if found is not None:
                begin, end = found
                has_tag = any(tag in self._text[begin:end] for tag in self._openings)
                num_calls = self._num_calls
                num_spaces = begin - len(self._text[:begin].rstrip())
                self._send_text(begin - num_spaces)
                self._pos = end - begin + num_spaces
                self._source.clear()
                self._stops = self._tags_after()
                try:
                    if has_tag and self._text[: self._pos].endswith(self._opening):
                        yield from self._skip_tags(self._opening)  # models repeat it
                    begin = self._pos
                    is_token = self._opening.startswith(TOKEN_MARK) and self._end != ""
                    if is_token and (yield from self._accept(self._end)):
                        self._is_after_call = True  # tokens with nothing between them say nothing
                    else:
                        yield from self._calls()
                    yield from self._skip_tags(self._end)
                    yield from self._skip_repeated(begin)
                except NotACall:
                    if self._cut and (has_tag or self._num_calls > num_calls):
                        return  # of a call that cannot be made
                    is_last = self._ended and self._text.strip() == self._opening
                    if is_last and self._is_after_call:
                        return  # it stands for the closing tag
                    self._send_text(self._pos)
                else:
                    self._drop_read()
                continue
            held = prefix_at_end(self._text, self._openings)
            if self._ended and not (held and self._cut):
                self._send_text(len(self._text))
            else:
                self._send_text(len(self._text.removesuffix(held).rstrip()))
            if self._ended:
                return
            yield

    def _send_text(self, end: int) -> None:
        """Return the text up to `end`, without the white space after a call."""
        text = self._text[:end]
        self._text = self._text[end:]
        self._pos = 0
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._parts.append(TextDelta(text))
            self._is_after_call = False
            self._has_sent_text = True

    def _send_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCallArguments(self._num_calls - 1, text))

    def _write(self, json_text: str) -> None:
        """Pass on arguments, and seldom, because it is slow, drop the text that was read."""
        self._send_arguments(json_text)
        if self._pos >= _MOST_READ:
            self._drop_read()

    # What a call consists of. Each of these reads on from where the last one ended, and waits for
    # text that has not arrived yet.

    def _json_calls(self) -> Steps[None]:
        """Read calls that are JSON objects or lists of them, one after the other.

        There may be a comma or a semicolon between them, and brackets too many after one.
        """
        is_call = True
        while is_call:
            if (yield from self._next()) == "[":
                yield from self._list()
            else:
                yield from self._call()
            is_call = yield from self._is_another()

    def _is_another(self) -> Steps[bool]:
        """Whether one more JSON call follows; then what stands before it is read."""
        while (yield from self._next()) in ("}", "]"):
            self._pos += 1
        start = self._pos
        if not (yield from self._accept(",")):
            yield from self._accept(";")
        yield from self._skip_tags(self._opening)
        following = yield from self._peek()
        if following in ("{", "[") or (self._cut and not following):
            return following != ""
        self._pos = start
        return False

    def _list(self) -> Steps[None]:
        """Read a JSON list of calls, not empty. Models forget a comma, or write one too many."""
        yield from self._expect("[")
        yield from self._call()
        while (yield from self._next()) != "]":
            yield from self._accept(",")
            if (yield from self._next()) != "]":
                yield from self._call()
        self._pos += 1
        self._drop_read()

    def _call(self) -> Steps[None]:
        """Read a call: {"name": ..., "arguments": ...}, in any order; or {"function": a call}."""
        yield from self._expect("{")
        name = ""
        arguments = ""
        separator = ","
        while separator == ",":
            key = yield from self._key()
            if key in self.name_keys:
                name = yield from self._string()
            elif key == "function" and (yield from self._peek()) == "{":
                yield from self._call()
                yield from self._rest_of_call()
                return
            elif key in _ARGUMENTS and name:
                yield from self._named_call(name)
                yield from self._rest_of_call()
                return
            elif self.only_known_keys and key not in (*_ARGUMENTS, "type"):
                raise NotACall
            else:
                value = yield from self._value()
                arguments = value if key in _ARGUMENTS else arguments
            separator = yield from self._expect(",}")
        if not name or (self.only_known_keys and not arguments):
            raise NotACall
        plain = plain_object(arguments or "{}")
        self._start(name)
        self._send_arguments(plain)
        self._drop_read()

    def _named_call(self, name: str, call_id: str | None = None) -> Steps[None]:
        """Read the arguments of a call whose name is known, and pass them on meanwhile."""
        first = yield from self._peek()
        if first in ("{", "["):
            self._start(name, call_id)
            self._drop_read()
            self._is_streaming = True
            with contextlib.suppress(NotACall):  # they are cut off: what there is was passed on
                yield from self._skip_value()
            self._is_streaming = False
            self._send_arguments(self._drop_read())
        else:
            plain = plain_object((yield from self._value()))
            self._start(name, call_id)
            self._send_arguments(plain)
            self._drop_read()

    def _rest_of_call(self) -> Steps[None]:
        """Read what follows the arguments, up to the closing brace; without one it is text."""
        try:
            while (yield from self._expect(",}")) == ",":
                yield from self._key()
                yield from self._skip_value()
        except NotACall:
            self._pos = len(self._text) if self._cut else 0
        else:
            self._drop_read()

    def _start(self, name: str, call_id: str | None = None) -> None:
        if self._num_calls == MAX_CALLS:
            raise NotACall
        self._parts.append(ToolCallStart(self._num_calls, call_id or self._new_call_id(), name))
        self._num_calls += 1
        self._is_after_call = True
        self._has_sent_text = False

    def _drop_read(self) -> str:
        read = super()._drop_read()
        self._source.append(read)
        return read

    def _key(self) -> Steps[str]:
        """Read a key of an object, and what stands between it and its value."""
        key = yield from self._string()
        yield from self._expect(":")
        yield from self._skip_space()
        return key

    def _string(self) -> Steps[str]:
        """Read a JSON string and return what it stands for; "" is neither a key nor a name."""
        if (yield from self._next()) != '"':
            raise NotACall
        value = decoded((yield from self._value()))
        if not value:
            raise NotACall
        return value

    def _value(self) -> Steps[str]:
        """Read a JSON value and return its source."""
        start = self._pos
        yield from self._skip_value()
        return self._text[start : self._pos]

    def _skip_value(self) -> Steps[None]:
        """Read a JSON value. Of objects and lists only the brackets and strings are looked at.

        Raises:
            NotACall: it was not ended. What was read is up to the tag that comes instead.
        """
        first = yield from self._peek()
        if first not in ("{", "[", '"'):
            if not (yield from self._word(_SCALAR)):
                raise NotACall
            return
        depth = 0
        while True:
            found = yield from self._search('"{}[]')
            if found == '"':
                yield from self._rest_of_string()
            elif found in self._stops:
                self._pos -= len(found)
                raise NotACall
            else:
                depth += 1 if found in "{[" else -1
            if depth <= 0:
                return

    def _rest_of_string(self) -> Steps[None]:
        """Read a JSON string after its first quote."""
        while (found := (yield from self._search('"\\'))) != '"':
            if found == "\\":
                if not (yield from self._peek()):
                    raise NotACall
                self._pos += 1
            elif (yield from self._is_stop(found)):
                self._pos -= len(found)
                raise NotACall

    def _is_stop(self, tag: str) -> Steps[bool]:
        """Whether a tag in a string ends the call: a token does, and one that a call follows, or
        the end of the answer. Strings that quote calls have a backslash before their quotes.
        """
        if tag.startswith(TOKEN_MARK):
            return True
        if tag in self._openings:
            return False
        start = self._pos
        is_streaming, self._is_streaming = self._is_streaming, False
        found = (yield from self._next()) == ""
        found = found or (tag != self._end and (yield from self._is_next(self._end)))
        for opening in self._openings:
            if not found and (yield from self._accept(opening)):
                yield from self._skip_space()
                if found := not self.calls_are_json or (yield from self._accept("{")):
                    yield from self._skip_space()
                    found = not (yield from self._is_next("\\"))
        self._pos = start
        self._is_streaming = is_streaming
        return found

    def _search(self, characters: str) -> Steps[str]:
        """Read up to the next of these characters or of `_stops`, and return it."""
        pattern = _any_of(characters, self._stops)
        while (match := pattern.search(self._text, self._pos)) is None or self._may_be_stop(match):
            held = prefix_at_end(self._text[self._pos :], self._stops)
            is_text = self._ended and not self._cut
            self._pos = len(self._text) - (0 if is_text else len(held))
            yield from self._more()
        self._pos = match.end()
        return match[0]

    def _may_be_stop(self, match: re.Match[str]) -> bool:
        """Whether a bracket at the end of the text may belong to one of `_stops`: [TOOL_CALLS]."""
        begin = len(self._text) - _LONGEST_TAG
        if self._ended or match.end() < begin:
            return False
        held = prefix_at_end(self._text[max(self._pos, begin) :], self._stops)
        return match.end() > len(self._text) - len(held)

    def _expect(self, characters: str) -> Steps[str]:
        """Read white space and one character, which must be one of these, and return it."""
        character = yield from self._next()
        if not character or character not in characters:
            raise NotACall
        self._pos += 1
        return character

    def _more(self) -> Steps[None]:
        if self._is_streaming and not self._ended:
            self._send_arguments(self._drop_read())
        yield from super()._more()


@functools.lru_cache(maxsize=256)
def _any_of(characters: str, tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, (*tags, *characters))))


def decoded(source: str) -> str | None:
    """Return the string of a JSON value, without marks of tags; None if it cannot be sent."""
    try:
        value = json.loads(source.replace(TOKEN_MARK, ""), strict=False)
        return value if isinstance(value, str) and value.encode() is not None else None
    except ValueError:  # half of a surrogate pair cannot be encoded
        return None


def plain_object(source: str) -> str:
    """Return arguments as the text of a JSON object where they are one in disguise.

    Some models write the object as a string, and null or "" for no arguments.

    Raises:
        NotACall: it is not a JSON value.
    """
    if source in ("null", '""'):
        return "{}"
    if source.startswith(("{", "[")):
        return source
    if source.startswith('"'):
        return decoded(source) or source
    try:
        json.loads(source)
    except ValueError:
        raise NotACall from None
    return source


def quoted(text: str) -> str:
    """Return text as a JSON string, and as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return text as it stands inside a JSON string."""
    return quoted(text)[1:-1]
