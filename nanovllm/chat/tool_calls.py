"""Reads tool calls out of a model's text, while it arrives.

Pure text: knows no requests and no tokens. `tool_formats` says how each model writes calls.
"""

import contextlib
import re
from abc import abstractmethod
from collections.abc import Collection, Generator, Sequence
from typing import ClassVar, Self, TypeVar

from nanovllm.chat.call_arguments import Function, NotACall, decoded, new_call_id, plain_object
from nanovllm.chat.parts import PartsReader, TextDelta, ToolCallArguments, ToolCallStart
from nanovllm.chat.reasoning import marked_tag, prefix_at_end

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A piece of the parser's work. It yields where it needs more text."""

_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_SCALAR = re.compile(r"[-+.\w]")
_ARGUMENTS = ("arguments", "parameters")
_MOST_READ = 4096
MAX_CALLS = 128
"""In an answer: a message of a request may have as many."""


class ToolCallParser(PartsReader):
    """Splits an answer into text and calls.

    A call is certain, and begins, once its name and the first character of its arguments are known.
    From then on the arguments are passed on as they arrive. A call that goes wrong before is text,
    with its tags, and so is one after `MAX_CALLS` others; one that is cut off before is dropped.
    White space around calls is theirs.

    Args:
        marked: tags that have TOKEN_MARK before them.
        functions: those that may be called, for formats that leave types to their schemas.
    """

    tag: ClassVar[str]
    """What a call begins with."""
    closing: ClassVar[str] = ""
    """The tag behind a call, or behind all; models forget it."""
    only_known_keys: ClassVar[bool] = False
    """Whether an object with further keys is no call."""

    def __init__(self, marked: Collection[str] = (), functions: Sequence[Function] = ()) -> None:
        super().__init__()
        self._marked = marked
        self._functions = functions
        self._opening, self._end = self._tag(self.tag), self._tag(self.closing)
        self._openings: tuple[str, ...] = (self._opening,)  # what calls may begin with
        self._pos = 0  # how much of the text was read
        self._num_calls = 0
        self._is_streaming = False  # the text read is arguments of the last call
        self._is_behind_call = False  # no text since the last call
        self._has_sent_text = False  # since the answer began, or since the last call

    def fresh(self) -> Self:
        """Return a parser of the same format that has read nothing."""
        return type(self)(self._marked, self._functions)

    def _find(self) -> tuple[int, int] | None:
        """Return where in the unread text the opening of a call begins and ends."""
        found = [(self._text.find(tag), tag) for tag in self._openings]
        places = [(begin, begin + len(tag)) for begin, tag in found if begin >= 0]
        return min(places, default=None)

    @abstractmethod
    def _calls(self) -> Steps[None]:
        """Read what follows the opening of a call.

        Raises:
            NotACall: it is text, from what was read after the last whole call.
        """

    def _tag(self, tag: str) -> str:
        return marked_tag(tag, self._marked)

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
                try:
                    yield from self._calls()
                except NotACall:
                    if self._cut and (has_tag or self._num_calls > num_calls):
                        return  # of a call that nobody can make
                    self._send_text(self._pos)
                else:
                    self._drop_read()
                continue
            held = max((prefix_at_end(self._text, tag) for tag in self._openings), key=len)
            if self._ended and not (held and self._cut):
                self._send_text(len(self._text))
            else:
                self._send_text(len(self._text.removesuffix(held).rstrip()))
            if self._ended:
                return
            yield

    def _send_text(self, end: int) -> None:
        """Return the text up to `end`, without the white space behind a call."""
        text, self._text, self._pos = self._text[:end], self._text[end:], 0
        if self._is_behind_call:
            text = text.lstrip()
        if text:
            self._parts.append(TextDelta(text))
            self._is_behind_call, self._has_sent_text = False, True

    def _drop_read(self) -> str:
        """Forget the text that was read, and return it."""
        read, self._text, self._pos = self._text[: self._pos], self._text[self._pos :], 0
        return read

    def _send_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolCallArguments(self._num_calls - 1, text))

    def _write(self, json_text: str) -> None:
        """Pass on arguments, and forget the text that was read for them: seldom, it takes long."""
        self._send_arguments(json_text)
        if self._pos >= _MOST_READ:
            self._drop_read()

    # What a call consists of. Each of these reads on from where the last one ended.

    def _list(self) -> Steps[None]:
        """Read a JSON list of calls."""
        yield from self._expect("[")
        separator = ","
        while separator == ",":
            yield from self._skip_space()
            yield from self._call()
            yield from self._skip_space()
            separator = yield from self._expect(",]")
        self._drop_read()

    def _call(self) -> Steps[None]:
        """Read a call: {"name": ..., "arguments": ...}, in any order."""
        yield from self._expect("{")
        name, arguments, separator = "", "", ","
        while separator == ",":
            yield from self._skip_space()
            key = yield from self._key()
            if key == "name":
                name = yield from self._string()
            elif key in _ARGUMENTS and name:
                yield from self._named_call(name)
                yield from self._rest_of_call()
                return
            elif self.only_known_keys and key not in (*_ARGUMENTS, "type"):
                raise NotACall
            else:
                value = yield from self._value()
                arguments = value if key in _ARGUMENTS else arguments
            yield from self._skip_space()
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
            yield from self._skip_space()
            while (yield from self._expect(",}")) == ",":
                yield from self._skip_space()
                yield from self._key()
                yield from self._skip_value()
                yield from self._skip_space()
        except NotACall:
            self._pos = len(self._text) if self._cut else 0
        else:
            self._drop_read()

    def _start(self, name: str, call_id: str | None = None) -> None:
        if self._num_calls == MAX_CALLS:
            raise NotACall
        self._parts.append(ToolCallStart(self._num_calls, call_id or self._new_call_id(), name))
        self._num_calls += 1
        self._is_behind_call, self._has_sent_text = True, False

    # JSON and characters.

    def _key(self) -> Steps[str]:
        """Read a key of an object, and what stands between it and its value."""
        key = yield from self._string()
        yield from self._skip_space()
        yield from self._expect(":")
        yield from self._skip_space()
        return key

    def _string(self) -> Steps[str]:
        """Read a JSON string and return what it stands for; "" is no key and no name."""
        if (yield from self._peek()) != '"':
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
        """Read a JSON value. Of objects and lists only the brackets and strings are looked at."""
        first = yield from self._peek()
        if first not in ("{", "[", '"'):
            if not (yield from self._word(_SCALAR)):
                raise NotACall
            return
        depth = 0
        while True:
            bracket = yield from self._search(_BRACKET_OR_QUOTE)
            if bracket == '"':
                while (yield from self._search(_QUOTE_OR_ESCAPE)) == "\\":
                    yield from self._take()
            else:
                depth += 1 if bracket in "{[" else -1
            if depth <= 0:
                return

    def _search(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read up to the next match of a pattern, one character, and return it."""
        while (match := pattern.search(self._text, self._pos)) is None:
            self._pos = len(self._text)
            yield from self._more()
        self._pos = match.end()
        return match[0]

    def _word(self, character: re.Pattern[str]) -> Steps[str]:
        """Read the characters that match a pattern, and return them."""
        start = self._pos
        while character.fullmatch((yield from self._peek())):
            self._pos += 1
        return self._text[start : self._pos]

    def _skip_space(self) -> Steps[None]:
        while (yield from self._peek()).isspace():
            self._pos += 1

    def _expect(self, characters: str) -> Steps[str]:
        """Read one character, which must be one of these, and return it."""
        character = yield from self._peek()
        if not character or character not in characters:
            raise NotACall
        self._pos += 1
        return character

    def _take(self) -> Steps[None]:
        """Read one character, whichever it is."""
        if not (yield from self._peek()):
            raise NotACall
        self._pos += 1

    def _accept(self, string: str) -> Steps[bool]:
        """Read a string if it comes next; return whether it does. What is cut off of it is read."""
        start = self._pos
        for character in string:
            found = yield from self._peek()
            if found != character:
                self._pos = self._pos if self._cut and not found else start
                return False
            self._pos += 1
        return True

    def _is_next(self, tag: str) -> Steps[bool]:
        """Whether a tag comes next. Nothing of it is read."""
        start = self._pos
        found = yield from self._accept(tag)
        self._pos = start
        return found

    def _peek(self) -> Steps[str]:
        """Return the next character; "" at the end of the answer."""
        while self._pos == len(self._text) and not self._ended:
            yield from self._more()
        return self._text[self._pos : self._pos + 1]

    def _more(self) -> Steps[None]:
        """Wait for more text; pass on the arguments that were read.

        Raises:
            NotACall: the answer has ended.
        """
        if self._ended:
            raise NotACall
        if self._is_streaming:
            self._send_arguments(self._drop_read())
        yield
