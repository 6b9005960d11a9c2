"""Readers of a text that is still arriving: characters, words, tags and JSON values."""

import functools
import json
import re
from abc import abstractmethod
from collections.abc import Collection, Generator, Iterator, Mapping
from typing import TypeVar

from nanovllm.apps.server.output_parsers.parts import PartsReader
from nanovllm.options.sampling_params import TOKEN_MARK

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A piece of a reader's work. It yields where it needs more text."""

JSON_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_SCALAR = re.compile(r"[-+.\w]")


class NotACall(Exception):
    """What began like a call is not one: it is text."""


class TextReader(PartsReader):
    """Reads on from where it stopped, and waits for text that has not arrived yet."""

    def __init__(self) -> None:
        super().__init__()
        self._pos = 0  # how much of the text was read
        self._stops: tuple[str, ...] = ()  # tags that end a value which was not ended

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
        """Read a JSON string and return what it stands for; "" is neither a key nor a name."""
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
                yield from self._take()
            elif (yield from self._is_stop(found)):
                self._pos -= len(found)
                raise NotACall

    @abstractmethod
    def _is_stop(self, tag: str) -> Steps[bool]:
        """Whether a tag that was read in a string ends the value; then the string is broken."""

    def _search(self, characters: str) -> Steps[str]:
        """Read up to the next of these characters or of `_stops`, and return it."""
        pattern = _any_of(characters, self._stops)
        while (match := pattern.search(self._text, self._pos)) is None:
            rest = self._text[self._pos :]
            held = max((prefix_at_end(rest, tag) for tag in self._stops), key=len, default="")
            is_text = self._ended and not self._cut
            self._pos = len(self._text) - (0 if is_text else len(held))
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
        """Read white space, and a tag as often as it is repeated."""
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


class TagsReader(PartsReader):
    """Reads an answer as tags and the text between them."""

    _tags: Mapping[str, str]
    """The tags as they stand in the text, and their names."""

    @abstractmethod
    def _read(self, text: str) -> None:
        """Read text that has no tag."""

    @abstractmethod
    def _read_tag(self, tag: str) -> None:
        """Read a tag of this name."""

    def _pieces(self) -> Iterator[None]:
        """Read the answer to its end. What is held back is the beginning of a tag, maybe."""
        any_tag = re.compile("|".join(map(re.escape, self._tags)))
        while not self._ended:
            end = 0
            for match in any_tag.finditer(self._text):
                self._read(self._text[end : match.start()])
                self._read_tag(self._tags[match[0]])
                end = match.end()
            text = self._text[end:]
            self._text = max((prefix_at_end(text, tag) for tag in self._tags), key=len)
            self._read(text.removesuffix(self._text))
            yield
        if not self._cut:
            self._read(self._text)


@functools.lru_cache(maxsize=256)
def _any_of(characters: str, tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, (*tags, *characters))))


def marked_tag(tag: str, marked: Collection[str]) -> str:
    """Return a tag as the text has it: a special token has TOKEN_MARK before it."""
    return TOKEN_MARK + tag if tag in marked else tag


def prefix_at_end(text: str, tag: str) -> str:
    """Return the longest end of a text with which a tag may begin; not the whole tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return tag[:length]
    return ""


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


def escaped(text: str) -> str:
    """Return text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
