"""Reads pieces of a text that is still arriving: characters, words, tags and JSON values.

Pure text: knows no calls and no requests.
"""

import re
from collections.abc import Generator
from typing import TypeVar

from nanovllm.server.answers.call_arguments import NotACall, decoded
from nanovllm.server.answers.parts import PartsReader

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A piece of a reader's work. It yields where it needs more text."""

_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_SCALAR = re.compile(r"[-+.\w]")


class TextReader(PartsReader):
    """Reads on from where it has read. What is not there yet is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._pos = 0  # how much of the text was read

    def _drop_read(self) -> str:
        """Forget the text that was read, and return it."""
        read = self._text[: self._pos]
        self._text = self._text[self._pos :]
        self._pos = 0
        return read

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

    def _skip_tags(self, tag: str) -> Steps[None]:
        """Read white space, and a tag as often as it comes next."""
        yield from self._skip_space()
        while tag and (yield from self._accept(tag)):
            yield from self._skip_space()

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
        """Whether a tag comes next; "" never does. Nothing of it is read."""
        start = self._pos
        found = tag != "" and (yield from self._accept(tag))
        self._pos = start
        return found

    def _peek(self) -> Steps[str]:
        """Return the next character; "" at the end of the answer."""
        while self._pos == len(self._text) and not self._ended:
            yield from self._more()
        return self._text[self._pos : self._pos + 1]

    def _more(self) -> Steps[None]:
        """Wait for more text.

        Raises:
            NotACall: the answer has ended.
        """
        if self._ended:
            raise NotACall
        yield
