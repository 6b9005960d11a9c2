"""Reads tool calls that are a list of Python's calls, as LFM2 writes them.

<|tool_call_start|>[f(city='Rome', days=[1, 2])]<|tool_call_end|>
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from nanovllm.apps.server.output_parsers.literal_calls import NAME, LiteralParser
from nanovllm.apps.server.output_parsers.parameter_types import Function
from nanovllm.apps.server.output_parsers.text_reader import JSON_SCALAR, NotACall, Steps, escaped

_KEY = re.compile(r"[-.\w]")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS = frozenset((*_WORDS, *_WORDS.values()))
_WORDS |= {"set()": "[]", "list()": "[]", "tuple()": "[]", "dict()": "{}"}
_NUMBER = re.compile(r"[-+]?(?:[\d_]+\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?", re.ASCII)
_MAX_NUMBER = 64
"""Characters of a number that is written as JSON has it."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\""}
_CODES = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits after a backslash and this letter."""
_FENCE = "```"
_BEGINS_CALL = re.compile(r"[\w{]")
_PREFIX = re.compile(r"[rbfuRBFU]")


class PythonicParser(LiteralParser):
    """<|tool_call_start|>[f(key=value), g()]<|tool_call_end|>; LFM2.

    Values are Python's literals, or JSON. The chat template does not escape quotes, so models
    forget to: then a quote ends its string if what follows may follow an argument. Calls may be
    JSON objects instead.
    """

    tag = "<|tool_call_start|>"
    closing = "<|tool_call_end|>"
    brackets: ClassVar[Mapping[str, tuple[str, str]]] = {
        **LiteralParser.brackets,
        "(": (")", "]"),
    }
    undecided = "{("
    in_lines: ClassVar[bool] = False
    """Whether each call is on a separate line; otherwise there are commas between calls."""
    quotes = ("'''", '"""', "'", '"')

    def __init__(self, marked: Collection[str] = (), functions: Sequence[Function] = ()) -> None:
        super().__init__(marked, functions)
        # A token that ends the calls ends the string, too: the model forgot its quote.
        self.breaks = ("\\", self._end) if self.closing in marked else ("\\",)

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
            separator = yield from self._separator()
        if in_list:
            yield from self._accept("]")

    def _separator(self) -> Steps[bool]:
        """Read what stands between two calls; return whether there is one more."""
        has_comma = yield from self._accept(",")
        yield from self._skip_space()
        begins_call = _BEGINS_CALL.match((yield from self._peek())) is not None
        return begins_call and (has_comma or self.in_lines)

    def _pythonic_call(self) -> Steps[None]:
        name = yield from self._call_name()
        if not name:
            raise NotACall
        yield from self._read_call(name, ")", "=")

    def _call_name(self) -> Steps[str]:
        """Read the name of a call and its bracket; return "" if no argument and no end follows."""
        name = yield from self._word_before(NAME, "(")
        yield from self._following()
        start = self._pos
        key = yield from self._word(_KEY)
        is_call = (yield from self._following()) == ("=" if key else ")")
        self._pos = start
        return name if is_call else ""

    def _scalar(self) -> Steps[None]:
        start = self._pos
        breaks = self.breaks
        prefix = yield from self._word(_PREFIX)
        quote = yield from self._peek()
        if len(prefix) > 2 or quote not in ("'", '"'):
            self._pos = start
        elif "r" in prefix.lower():  # a backslash stands for itself
            self.breaks = breaks[1:]
        yield from super()._scalar()
        self.breaks = breaks

    def _bare(self, ends: str) -> Steps[str]:
        """Read as `LiteralParser` does, over brackets that the value itself has."""
        start = self._pos
        depth = 0
        while True:
            character = yield from self._peek()
            if not character and self._cut:
                raise NotACall
            is_end = not character or (not depth and character in ends)
            if is_end or (yield from self._is_next(self._end)):
                return self._text[start : self._pos].strip()
            depth += character in self.brackets
            depth -= depth > 0 and character in ")]}"
            self._pos += 1

    def _is_end_of_string(self, ends: str, num_inner: int) -> Steps[bool]:
        if "," not in ends:  # it is a key
            return (yield from super()._is_end_of_string(ends, num_inner))
        start = self._pos
        found = yield from self._is_after_value(ends, is_sure=num_inner % 2 == 0)
        self._pos = start
        return found

    def _is_after_value(self, ends: str, *, is_sure: bool) -> Steps[bool]:
        """Whether what comes next may follow a value: brackets that close, or another value.

        Args:
            is_sure: whether no quote in the value waits for another one.
        """
        depth = len(self._open)
        while True:
            character = yield from self._following()
            if not character or (yield from self._is_next(self._end)):
                return True
            if depth == 0 and character not in ",]":
                return is_sure or (self.in_lines and (yield from self._call_name()) != "")
            self._pos += 1
            if character == ",":
                return (yield from self._is_next_value(depth, is_sure=is_sure))
            if depth == 0:
                return True
            if character == ":":
                return ":" in ends
            while depth > 0 and self._open[depth - 1].closing != character:
                depth -= 1
            if depth == 0:
                return False
            depth -= 1

    def _is_next_value(self, depth: int, *, is_sure: bool) -> Steps[bool]:
        """Whether a value or call comes next, after a comma in so many brackets."""
        character = yield from self._following()
        if not character or character in ")]}":
            return True
        if depth > 1:
            if is_sure or character in "'\"[{(+-.0123456789":
                return True
            word = yield from self._word(_KEY)
            yield from self._following()
            return word in _CONSTANTS
        if depth == 0:
            return character == "{" or (yield from self._call_name()) != ""
        key = yield from self._word_before(_KEY, "=")
        has_key = key != "" and (yield from self._following()) != "="
        declared = self._parameters.declared if self._parameters else ()
        return has_key and (is_sure or not declared or key in declared)

    def _word_before(self, pattern: re.Pattern[str], bracket: str) -> Steps[str]:
        """Read a word of such characters and a bracket; return the word, "" without the bracket."""
        word = yield from self._word(pattern)
        yield from self._following()
        return word if (yield from self._accept(bracket)) else ""

    def _as_json(self, word: str) -> str:
        return as_json(word)

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


class LlamaPythonicParser(PythonicParser):
    """[f(key=value), g()] at the start of an answer; Llama 3.2 with a template that asks for it."""

    tag = "<|python_tag|>"
    closing = ""
    only_known_keys = True

    def _find(self) -> tuple[int, int] | None:
        start = "" if self._has_sent_text else r"|\A\s*(?=\[)"
        match = re.search(rf"{re.escape(self._opening)}{start}", self._text)
        return None if match is None else match.span()


class MiniCpmParser(PythonicParser):
    """Calls on separate lines of a block of Markdown; MiniCPM 3 and 4."""

    in_lines = True

    def _calls(self) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._accept(_FENCE)):
            yield from self._accept("python")
        yield from super()._calls()
        yield from self._skip_space()
        yield from self._accept(_FENCE)

    def _is_next(self, tag: str) -> Steps[bool]:
        found = yield from super()._is_next(tag)
        if not found and tag == self._end:  # the end of the block is that of the calls, too
            found = yield from super()._is_next(_FENCE)
        return found


class OlmoParser(PythonicParser):
    """Calls on separate lines between tags; Olmo 3."""

    tag = "<function_calls>"
    closing = "</function_calls>"
    in_lines = True


def as_json(source: str) -> str:
    """Return Python's number or word as JSON; what is neither is a string."""
    if source in _WORDS or JSON_SCALAR.fullmatch(source):
        return _WORDS.get(source, source)
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
