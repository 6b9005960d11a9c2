"""Reads tool calls whose arguments are no JSON: Gemma 4's, and those that are a Python list.

    <|tool_call>call:f{city:<|"|>Rome<|"|>,days:[1,2]}<tool_call|>
    <|tool_call_start|>[f(city='Rome', days=[1, 2])]<|tool_call_end|>

Pure text: knows no requests and no tokens.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from nanovllm.chat.call_arguments import JSON_SCALAR, Function, NotACall, decoded, escaped
from nanovllm.chat.reasoning import prefix_at_end
from nanovllm.chat.tool_calls import Steps, ToolCallParser

CLOSING, QUOTE = "<tool_call|>", '<|"|>'
CALLS_START, CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"
_NAME, _KEY = re.compile(r"[-.:\w]"), re.compile(r"[-.\w]")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"[-+]?(?:[\d_]+\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?", re.ASCII)
_MAX_NUMBER = 64
"""Characters of a number that is written as JSON has it."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\""}
_CODES = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits behind a backslash and this letter."""


class LiteralParser(ToolCallParser):
    """Passes arguments on as JSON that are written in another way.

    A bare word is a string. A quote that cannot end its string stands for itself. What the model
    forgot to close is closed; what stands between two values is left out.
    """

    brackets: ClassVar[Mapping[str, tuple[str, str]]] = {"{": ("}", "}"), "[": ("]", "]")}
    """By the bracket that opens a value: the one that closes it, and the one that closes its
    JSON."""
    quotes: tuple[str, ...]
    """What a string may begin with, and then ends with."""
    breaks: tuple[str, ...]
    """What means something in a string beside its quotes: a backslash, or a tag that ends it."""

    @abstractmethod
    def _as_json(self, word: str) -> str:
        """Return a value that has no quotes and no brackets as JSON."""

    def _read_call(self, name: str, closing: str, separator: str) -> Steps[None]:
        """Read the arguments behind their bracket, and pass the call on meanwhile.

        Args:
            closing: the bracket behind them.
            separator: what stands between a name and its value.
        """
        self._start(name)
        self._drop_read()
        self._write("{")
        try:
            yield from self._arguments(closing, separator)
        except NotACall:  # they are cut off: what there is was passed on
            self._pos = len(self._text)
        self._drop_read()

    def _arguments(self, closing: str, separator: str) -> Steps[None]:
        """Read what is between the brackets. `open_ends` are those that close what is open."""
        open_ends = [(closing, "}")]
        yield from self._skip_space()
        if (yield from self._peek()) in (closing, "") or (yield from self._is_next(self._end)):
            yield from self._is_closed(open_ends)
            return
        while True:
            if open_ends[-1][1] == "}":
                yield from self._member(separator if len(open_ends) == 1 else ":")
            opening = yield from self._peek()
            if opening in self.brackets:
                self._pos += 1
                ends = self.brackets[opening]
                open_ends.append(ends)
                self._write("{" if ends[1] == "}" else "[")
                yield from self._skip_space()
                if (yield from self._peek()) != ends[0]:
                    continue
            else:
                yield from self._scalar()
            if (yield from self._is_closed(open_ends)):
                return

    @property
    def _ends(self) -> str:
        """What may follow a value."""
        return "," + "".join(closing for closing, _ in self.brackets.values())

    def _is_closed(self, open_ends: list[tuple[str, str]]) -> Steps[bool]:
        """Read brackets that close something, up to a comma; return whether the call is closed."""
        while open_ends:
            yield from self._skip_space()
            character = yield from self._peek()
            if not character or (yield from self._is_next(self._end)):
                if not character and self._cut:
                    raise NotACall
                self._write("".join(end for _, end in reversed(open_ends)))
                return True
            self._pos += 1
            if character == ",":
                yield from self._skip_space()
                if (yield from self._peek()) not in (*self._ends[1:], ""):
                    self._write(", ")
                    return False
            elif any(character == closing for closing, _ in open_ends):
                closing = ""
                while closing != character:
                    closing, end = open_ends.pop()
                    self._write(end)
        return True

    def _member(self, separator: str) -> Steps[None]:
        """Read a key and the character behind it, and pass them on."""
        yield from self._skip_space()
        if not (yield from self._is_quoted(separator)):
            key = yield from self._bare(separator + self._ends.replace("]", ""))
            value = decoded(key) if key.startswith('"') else None
            self._write(json.dumps(key if value is None else value, ensure_ascii=False))
        yield from self._skip_space()
        yield from self._accept(separator)
        yield from self._skip_space()
        self._write(": ")

    def _scalar(self) -> Steps[None]:
        """Read a string, a number or a word, and pass it on."""
        if not (yield from self._is_quoted(self._ends)):
            self._write(self._as_json((yield from self._bare(self._ends))))

    def _bare(self, ends: str) -> Steps[str]:
        """Read up to one of these characters, or the end; return it without spaces around."""
        start = self._pos
        while True:
            character = yield from self._peek()
            if not character and self._cut:
                raise NotACall
            if not character or character in ends or (yield from self._is_next(self._end)):
                return self._text[start : self._pos].strip()
            self._pos += 1

    def _is_quoted(self, ends: str) -> Steps[bool]:
        """Read a string that one of `ends` follows, and pass it on; return whether there is one."""
        for quote in self.quotes:
            if (yield from self._accept(quote)):
                yield from self._quoted(quote, ends)
                return True
        return False

    def _quoted(self, quote: str, ends: str) -> Steps[None]:
        tags = (quote, *self.breaks)
        special = re.compile("|".join(map(re.escape, tags)))
        self._write('"')
        while True:
            start, found = self._pos, special.search(self._text, self._pos)
            self._pos = len(self._text) if found is None else found.start()
            if found is None and (self._cut or not self._ended):
                self._pos -= max(len(prefix_at_end(self._text[start:], tag)) for tag in tags)
            self._write(escaped(self._text[start : self._pos]))
            if found is None:
                if self._ended and not self._cut:
                    break
                yield from self._more()
            elif found[0] == "\\":
                yield from self._escape()
            elif found[0] == self._end:
                break
            else:
                self._pos += len(quote)
                if (yield from self._is_end_of_string(ends)):
                    break
                self._write("'" if quote == "'" else '\\"')
        self._write('"')

    def _is_end_of_string(self, ends: str) -> Steps[bool]:
        """Whether a quote that was read ends its string: one of `ends`, or no text, follows."""
        start = self._pos
        yield from self._skip_space()
        following = yield from self._peek()
        found = not following or following in ends or (yield from self._is_next(self._end))
        self._pos = start
        return found

    def _escape(self) -> Steps[None]:
        """Read a backslash and what belongs to it, and pass on what it stands for."""
        self._pos += 1
        letter = yield from self._peek()
        if not letter:
            if self._cut:
                raise NotACall
            self._write("\\\\")
            return
        start = self._pos
        self._pos += 1
        if letter in _CODES:
            while self._pos - start <= _CODES[letter] and re.fullmatch(
                r"[0-9a-fA-F]", (yield from self._peek())
            ):
                self._pos += 1
            digits = self._text[start + 1 : self._pos]
            code = int(digits or "110000", 16)
            if len(digits) == _CODES[letter] and code < 0x110000 and not 0xD800 <= code < 0xE000:
                self._write(escaped(chr(code)))
                return
            self._pos = start + 1
        self._write(escaped(_ESCAPES.get(letter, f"\\{letter}")))


class Gemma4Parser(LiteralParser):
    """<|tool_call>call:f{key:<|"|>value<|"|>}<tool_call|>, one behind the other; Gemma 4.

    Keys may be quoted, and strings be JSON's.
    """

    tag = "<|tool_call>"
    closing = CLOSING

    def __init__(self, marked: Collection[str] = (), functions: Sequence[Function] = ()) -> None:
        super().__init__(marked, functions)
        self._quote = self._tag(QUOTE)
        self.quotes = (self._quote,)
        # A token that ends the call ends the string, too: the model forgot the token of quotes.
        self.breaks = (self._end,) if CLOSING in marked else ()

    def _calls(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._accept("call:")
        name = yield from self._word(_NAME)
        yield from self._skip_space()
        if not name or not (yield from self._accept("{")):
            raise NotACall
        yield from self._read_call(name, "}", ":")
        yield from self._skip_space()
        yield from self._accept(self._end)

    def _scalar(self) -> Steps[None]:
        if (yield from self._peek()) != '"':
            yield from super()._scalar()
            return
        source = yield from self._value()
        value = decoded(source)
        self._write(json.dumps(source[1:-1] if value is None else value, ensure_ascii=False))

    def _as_json(self, word: str) -> str:
        word, quote, _ = word.partition(self._quote)
        if quote:  # the model forgot the opening one
            return json.dumps(word, ensure_ascii=False)
        word = "null" if word in ("None", "nil") else word
        return word if JSON_SCALAR.fullmatch(word) else json.dumps(word, ensure_ascii=False)


class PythonicParser(LiteralParser):
    """<|tool_call_start|>[f(key=value), g()]<|tool_call_end|>; LFM2.

    Values are Python's literals, or JSON. The chat template does not escape quotes, so models
    forget to. Calls may be JSON objects instead.
    """

    tag = CALLS_START
    closing = CALLS_END
    brackets: ClassVar[Mapping[str, tuple[str, str]]] = {
        **LiteralParser.brackets,
        "(": (")", "]"),
    }
    quotes = ("'", '"')
    breaks = ("\\",)

    def _calls(self) -> Steps[None]:
        yield from self._skip_space()
        in_list = yield from self._accept("[")
        separator = True
        while separator:
            yield from self._skip_space()
            if (yield from self._peek()) == "{":
                yield from self._call()
            else:
                yield from self._pythonic_call()
            yield from self._skip_space()
            separator = yield from self._accept(",")
        if in_list:
            yield from self._accept("]")
        yield from self._skip_space()
        yield from self._accept(self._end)

    def _pythonic_call(self) -> Steps[None]:
        name = yield from self._word(_NAME)
        yield from self._skip_space()
        if not name or not (yield from self._accept("(")):
            raise NotACall
        yield from self._skip_space()
        start = self._pos
        key = yield from self._word(_KEY)
        yield from self._skip_space()
        if (yield from self._peek()) != ("=" if key else ")"):
            raise NotACall
        self._pos = start
        yield from self._read_call(name, ")", "=")

    def _as_json(self, word: str) -> str:
        return as_json(word)


def as_json(source: str) -> str:
    """Return Python's number or word as JSON; what is neither is a string."""
    source = _WORDS.get(source, source)
    if JSON_SCALAR.fullmatch(source):
        return source
    if len(source) <= _MAX_NUMBER and _NUMBER.fullmatch(source):
        try:
            return str(int(source))
        except ValueError:
            pass
        try:
            found = json.dumps(float(source))
        except ValueError:
            pass
        else:
            if JSON_SCALAR.fullmatch(found):
                return found
    return json.dumps(source, ensure_ascii=False)
