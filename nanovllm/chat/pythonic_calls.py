"""Reads tool calls that are a Python list: <|tool_call_start|>[f(city='Rome')]<|tool_call_end|>.

Pure text: knows no requests and no tokens.
"""

import json
import re

from nanovllm.chat.call_arguments import JSON_SCALAR, NotACall, escaped
from nanovllm.chat.tool_calls import Steps, ToolCallParser

CALLS_START, CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"
_OPENINGS = {"{": ("}", "}"), "[": ("]", "]"), "(": (")", "]")}
"""By the bracket that opens a value: the one that closes it, and the one that closes its JSON."""
_ARGUMENTS = (")", "}")
_NAME, _KEY = re.compile(r"[-.:\w]"), re.compile(r"[-.\w]")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"[-+]?(?:[\d_]+\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?", re.ASCII)
_MAX_NUMBER = 64
"""Characters of a number that is written as JSON has it."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\""}
_CODES = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits behind a backslash and this letter."""


class PythonicParser(ToolCallParser):
    """<|tool_call_start|>[f(key=value), g()]<|tool_call_end|>; LFM2.

    The arguments are passed on as JSON. Values are Python's literals, or JSON; a bare word is a
    string. In a string, a quote that cannot end it stands for itself: the chat template does not
    escape quotes, so models forget to. Calls may be JSON objects instead.
    """

    tag = CALLS_START
    closing = CALLS_END

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
        self._start(name)
        self._drop_read()
        self._write("{")
        try:
            yield from self._arguments()
        except NotACall:  # they are cut off: what there is was passed on
            return
        self._drop_read()

    def _arguments(self) -> Steps[None]:
        """Read what is between the brackets of a call. `open_ends` are those of what is open."""
        open_ends = [_ARGUMENTS]
        if (yield from self._peek()) in (")", "") or (yield from self._is_next(self._end)):
            yield from self._is_closed(open_ends)
            return
        while True:
            if open_ends[-1][1] == "}":
                yield from self._named("=" if len(open_ends) == 1 else ":")
            opening = yield from self._peek()
            if opening in _OPENINGS:
                self._pos += 1
                ends = _OPENINGS[opening]
                open_ends.append(ends)
                self._write("{" if ends[1] == "}" else "[")
                yield from self._skip_space()
                if (yield from self._peek()) != ends[0]:
                    continue
            else:
                yield from self._literal()
            if (yield from self._is_closed(open_ends)):
                return

    def _is_closed(self, open_ends: list[tuple[str, str]]) -> Steps[bool]:
        """Read brackets that close something, up to a comma; return whether the call is closed.

        What the model forgot to close is closed; what stands between two values is left out.
        """
        while open_ends:
            yield from self._skip_space()
            character = yield from self._peek()
            if not character or (yield from self._is_next(self._end)):
                if not character and self._cut:
                    raise NotACall
                self._write("".join(end for _, end in reversed(open_ends)))
                return True
            if character == ",":
                self._pos += 1
                yield from self._skip_space()
                if (yield from self._peek()) not in (")", "]", "}", ""):
                    self._write(", ")
                    return False
            elif any(character == closing for closing, _ in open_ends):
                self._pos += 1
                while True:
                    closing, end = open_ends.pop()
                    self._write(end)
                    if closing == character:
                        break
            else:
                self._pos += 1
        return True

    def _named(self, separator: str) -> Steps[None]:
        """Read a key and the character behind it, and pass them on."""
        yield from self._skip_space()
        if (yield from self._peek()) in ("'", '"'):
            yield from self._quoted(separator)
        else:
            source = yield from self._bare(f"{separator},)}}")
            self._write(json.dumps(source, ensure_ascii=False))
        yield from self._skip_space()
        yield from self._accept(separator)
        yield from self._skip_space()
        self._write(": ")

    def _literal(self) -> Steps[None]:
        """Read a string, a number or a word, and pass it on."""
        if (yield from self._peek()) in ("'", '"'):
            yield from self._quoted(",)]}")
            return
        source = yield from self._bare(",)]}")
        self._write(as_json(source))

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

    def _quoted(self, ends: str) -> Steps[None]:
        """Read a string that one of `ends` follows, and pass it on meanwhile."""
        quote = yield from self._peek()
        self._pos += 1
        special = re.compile(rf"{quote}|\\")
        self._write('"')
        while True:
            found = special.search(self._text, self._pos)
            end = len(self._text) if found is None else found.start()
            text, self._pos = self._text[self._pos : end], end
            self._write(escaped(text))
            if found is None:
                if self._ended:
                    if not self._cut:
                        self._write('"')
                        return
                    raise NotACall
                yield from self._more()
            elif found[0] == "\\":
                yield from self._escape()
            else:
                self._pos += 1
                if (yield from self._is_end_of_string(ends)):
                    self._write('"')
                    return
                self._write(escaped(quote))

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
