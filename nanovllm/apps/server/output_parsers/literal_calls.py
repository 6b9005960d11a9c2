"""Reads tool calls whose arguments are literals, but not JSON's: Gemma's and Python's.

<|tool_call>call:f{city:<|"|>Rome<|"|>,days:[1,2]}<tool_call|>
<|tool_call_start|>[f(city='Rome', days=[1, 2])]<|tool_call_end|>
"""

import dataclasses
import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from nanovllm.apps.server.output_parsers.parameter_types import Function, ParameterTypes
from nanovllm.apps.server.output_parsers.parts import NotACall, Steps, prefix_at_end
from nanovllm.apps.server.output_parsers.tool_calls import (
    JSON_SCALAR,
    ToolCallParser,
    decoded,
    escaped,
    quoted,
)
from nanovllm.options.sampling_params import TOKEN_MARK

_NAME = re.compile(r"[-.:\w]")  # a character of a function's name
_JSON_BEGINS = {"}": "{", "]": "[", "": ""}

# Python's
_KEY = re.compile(r"[-.\w]")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS = frozenset((*_WORDS, *_WORDS.values()))
_WORDS |= {"set()": "[]", "list()": "[]", "tuple()": "[]", "dict()": "{}"}
_NUMBER = re.compile(r"[-+]?(?:[\d_]+\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?", re.ASCII)
_MAX_NUMBER = 64  # characters of a number that is written as JSON has it
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\""}
_CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits after a backslash and this letter
_FENCE = "```"
_BEGINS_CALL = re.compile(r"[\w{]")
_PREFIX = re.compile(r"[rbfuRBFU]")


@dataclasses.dataclass(slots=True)
class _Bracket:
    """A bracket that is open."""

    opening: str
    closing: str
    json_end: str | None  # what closes its JSON; None if that is not decided yet, nor what opens it
    place: int = 0  # where that stands in the text that is held back


class LiteralParser(ToolCallParser):
    """Reads arguments that are not JSON, and passes them on as JSON.

    A bare word is a string. A quote that cannot end its string stands for itself. What the model
    forgot to close is closed; what stands between two values is left out.
    """

    brackets: ClassVar[Mapping[str, tuple[str, str]]] = {"{": ("}", "}"), "[": ("]", "]")}
    """By the bracket that opens a value: the one that closes it, and the one that closes its
    JSON."""
    undecided: ClassVar[str] = ""
    """Brackets whose JSON depends on what follows: they hold an object if their first value is a
    key, otherwise a list; round ones may enclose a single value."""
    quotes: tuple[str, ...]  # what a string may begin with, and then ends with
    escapes: bool = False  # whether a backslash has a meaning in strings
    words_nest: ClassVar[bool] = False
    """Whether brackets in a bare word belong to it, up to those that close them."""

    def __init__(self, tags: Sequence[str], functions: Sequence[Function] = ()) -> None:
        super().__init__(tags, functions)
        self._types = {each.name: each.types for each in self._functions}
        self._parameters = ParameterTypes(None)  # of the function that is called
        self._parameter = ""  # of the value that is read; "" where it has quotes
        self._open: list[_Bracket] = []
        self._num_undecided = 0
        self._held: list[str] = []  # JSON, from the first bracket on that is not decided

    def _tags_after(self) -> tuple[str, ...]:
        return ()  # its strings look for them

    @abstractmethod
    def _as_json(self, word: str) -> str:
        """Return a value that has no quotes and no brackets as JSON."""

    def _read_call(self, name: str, closing: str, separator: str) -> Steps[None]:
        """Read the arguments up to their closing bracket, and pass the call on meanwhile.

        `separator` stands between a name and its value.
        """
        self._parameters = self._types.get(name, ParameterTypes(None))
        self._start(name)
        self._drop_read()
        self._write("{")
        self._open = [_Bracket("", closing, "}")]
        try:
            yield from self._arguments(separator)
        except NotACall:  # they are cut off: what there is was passed on
            self._pos = len(self._text)
            self._num_undecided = 0
            self._held.clear()
        self._drop_read()

    def _write(self, json_text: str) -> None:
        if self._num_undecided:
            self._held.append(json_text)
            json_text = ""
        super()._write(json_text)

    def _arguments(self, separator: str) -> Steps[None]:
        """Read what is between the brackets."""
        nothing = (self._open[0].closing, "")
        if (yield from self._next()) in nothing or (yield from self._is_next(self._end)):
            yield from self._is_closed()
            return
        has_key = False
        while True:
            if self._open[-1].json_end == "}" and not has_key:
                yield from self._member(separator if len(self._open) == 1 else ":")
            has_key = False
            opening = yield from self._peek()
            if opening in self.brackets:
                self._pos += 1
                if not (yield from self._opens_nothing(opening)):
                    continue
            else:
                yield from self._scalar()
                has_key = yield from self._was_key()
                if has_key:
                    continue
            if (yield from self._is_closed()):
                return

    def _opens_nothing(self, opening: str) -> Steps[bool]:
        """Open a bracket that was read; return whether nothing stands in it."""
        closing, json_end = self.brackets[opening]
        is_empty = (yield from self._next()) == closing
        bracket = _Bracket(opening, closing, json_end)
        self._open.append(bracket)
        if opening in self.undecided and not is_empty:
            bracket.json_end = None
            bracket.place = len(self._held)
            self._num_undecided += 1
            self._held.append("")
        else:
            self._write(_JSON_BEGINS[json_end])
        return is_empty

    def _decide(self, json_end: str) -> None:
        """Decide what the innermost bracket is, if that is not known; it ends so."""
        bracket = self._open[-1]
        if bracket.json_end is not None:
            return
        bracket.json_end = json_end
        self._held[bracket.place] = _JSON_BEGINS[json_end]
        self._num_undecided -= 1
        if not self._num_undecided:
            self._write("".join(self._held))
            self._held.clear()

    def _was_key(self) -> Steps[bool]:
        """Whether the value that was read is the first key of an object; then read the colon."""
        bracket = self._open[-1]
        if bracket.json_end is not None or bracket.opening != "{":
            return False
        if not (yield from self._accept_next(":")):
            return False
        key = "".join(self._held[bracket.place + 1 :])
        self._held[bracket.place + 1 :] = [key if key.startswith('"') else json.dumps(key)]
        self._decide("}")
        yield from self._skip_space()
        self._write(": ")
        return True

    @property
    def _ends(self) -> str:
        """What may follow a value."""
        closings = "".join(closing for closing, _ in self.brackets.values())
        may_be_key = self._open[-1].json_end is None and self._open[-1].opening == "{"
        return f",{closings}{':' if may_be_key else ''}"

    def _is_closed(self) -> Steps[bool]:
        """Read brackets that close something, up to a comma; return whether the call is closed."""
        while self._open:
            character = yield from self._following()
            if not character or (yield from self._is_next(self._end)):
                while self._open:
                    self._close()
                return True
            self._pos += 1
            if character == ",":
                self._decide("]")
                if (yield from self._next()) not in (*self._ends[1:], ""):
                    self._write(", ")
                    return False
            elif any(character == bracket.closing for bracket in self._open):
                while self._close() != character:
                    pass
        return True

    def _close(self) -> str:
        """Close the innermost bracket, and return what closes it."""
        bracket = self._open[-1]
        self._decide("" if bracket.opening == "(" else "]")
        self._write(bracket.json_end or "")
        self._open.pop()
        return bracket.closing

    def _member(self, separator: str) -> Steps[None]:
        """Read a key and the character after it, and pass them on."""
        yield from self._skip_space()
        self._parameter = ""
        if not (yield from self._is_quoted(separator)):
            key = yield from self._bare(separator + self._ends.replace("]", ""))
            value = decoded(key) if key.startswith('"') else None
            self._parameter = key if value is None else value
            self._write(quoted(self._parameter))
        yield from self._accept_next(separator)
        yield from self._skip_space()
        self._write(": ")

    def _scalar(self) -> Steps[None]:
        """Read a string, a number or a word, and pass it on."""
        if not (yield from self._is_quoted(self._ends)):
            self._write(self._as_json((yield from self._bare(self._ends))))

    def _bare(self, ends: str) -> Steps[str]:
        """Read up to one of these characters, or the end; return it without spaces around."""
        start = self._pos
        depth = 0
        while True:
            character = yield from self._peek()
            if not character and self._cut:
                raise NotACall
            is_end = not character or (not depth and character in ends)
            if is_end or (yield from self._is_next(self._end)):
                return self._text[start : self._pos].strip()
            depth += self.words_nest and character in self.brackets
            depth -= depth > 0 and character in ")]}"
            self._pos += 1

    def _is_quoted(self, ends: str) -> Steps[bool]:
        """Read a string that one of `ends` follows, and pass it on; return whether there is one."""
        for quote in self.quotes:
            if (yield from self._accept(quote)):
                yield from self._quoted(quote, ends)
                return True
        return False

    def _quoted(self, quote: str, ends: str) -> Steps[None]:
        # A token that ends the calls ends the string, too: the model forgot its quote.
        end = (self._end,) if self._end.startswith(TOKEN_MARK) else ()
        tags = (quote, *end, *("\\" * self.escapes))
        special = re.compile("|".join(map(re.escape, tags)))
        num_inner = 0  # quotes that did not end it
        self._write('"')
        while True:
            start = self._pos
            found = special.search(self._text, self._pos)
            self._pos = len(self._text) if found is None else found.start()
            if found is None and (self._cut or not self._ended):
                self._pos -= len(prefix_at_end(self._text[start:], tags))
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
                if (yield from self._is_end_of_string(ends, num_inner)):
                    break
                num_inner += 1
                self._write(escaped('"' if quote[0] in f"<{TOKEN_MARK}" else quote))
        self._write('"')

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

    def _is_end_of_string(self, ends: str, num_inner: int) -> Steps[bool]:
        """Whether a quote that was read ends its string, as `num_inner` before it did not: one of
        `ends`, or no text, follows.
        """
        start = self._pos
        following = yield from self._following()
        found = not following or following in ends or (yield from self._is_next(self._end))
        self._pos = start
        return found

    def _following(self) -> Steps[str]:
        """Return what `_next` does; raise NotACall if the answer was cut off before it."""
        character = yield from self._next()
        if not character and self._cut:
            raise NotACall
        return character


class GemmaParser(LiteralParser):
    """<|tool_call>call:f{key:<|"|>value<|"|>}<tool_call|>, one after the other; Gemma 4.

    Keys may be quoted; strings may be JSON's or have single quotes; calls may be JSON.
    """

    def __init__(self, tags: Sequence[str], functions: Sequence[Function] = ()) -> None:
        super().__init__(tags, functions)
        self._quote = tags[2]
        self.quotes = (self._quote, "'")

    def _calls(self) -> Steps[None]:
        if (yield from self._next()) == "{":
            yield from self._json_calls()
            return
        if not (yield from self._accept("call:")):
            yield from self._accept(":")
        yield from self._skip_space()
        name = yield from self._word(_NAME)
        if not name or not (yield from self._accept_next("{")):
            raise NotACall
        yield from self._read_call(name, "}", ":")

    def _scalar(self) -> Steps[None]:
        if (yield from self._peek()) != '"':
            yield from super()._scalar()
            return
        source = yield from self._value()
        value = decoded(source)
        self._write(quoted(source[1:-1] if value is None else value))

    def _as_json(self, word: str) -> str:
        word, quote, _ = word.partition(self._quote)
        is_declared = len(self._open) < 2 and self._parameter in self._parameters.declared
        is_string = is_declared and self._parameters.of(self._parameter) == {"string"}
        if quote or is_string:  # the model forgot the opening one, or both
            return quoted(word)
        word = "null" if word in ("None", "nil") else word
        return word if JSON_SCALAR.fullmatch(word) else quoted(word)


class PythonicParser(LiteralParser):
    """<|tool_call_start|>[f(key=value), g()]<|tool_call_end|>; LFM2.

    Values are Python's literals, or JSON; calls may be JSON objects. The chat template does not
    escape quotes, so models forget to: a quote ends its string if an argument may end there.
    """

    brackets: ClassVar[Mapping[str, tuple[str, str]]] = {**LiteralParser.brackets, "(": (")", "]")}
    undecided = "{("
    in_lines: ClassVar[bool] = False
    """Whether each call is on a separate line; otherwise there are commas between calls."""
    quotes = ("'''", '"""', "'", '"')
    escapes = True
    words_nest = True

    def _calls(self) -> Steps[None]:
        in_list = yield from self._accept_next("[")
        separator = True
        while separator:
            if (yield from self._next()) == "{":
                yield from self._call()
            elif name := (yield from self._call_name()):
                yield from self._read_call(name, ")", "=")
            else:
                raise NotACall
            yield from self._skip_space()
            separator = yield from self._separator()
        if in_list:
            yield from self._accept("]")

    def _separator(self) -> Steps[bool]:
        """Read what stands between two calls; return whether there is one more."""
        has_comma = yield from self._accept(",")
        begins_call = _BEGINS_CALL.match((yield from self._next())) is not None
        return begins_call and (has_comma or self.in_lines)

    def _call_name(self) -> Steps[str]:
        """Read the name of a call and its bracket; return "" if no argument and no end follows."""
        name = yield from self._word_before(_NAME, "(")
        yield from self._following()
        start = self._pos
        key = yield from self._word(_KEY)
        is_call = (yield from self._following()) == ("=" if key else ")")
        self._pos = start
        return name if is_call else ""

    def _scalar(self) -> Steps[None]:
        start = self._pos
        prefix = yield from self._word(_PREFIX)
        quote = yield from self._peek()
        if len(prefix) > 2 or quote not in ("'", '"'):
            self._pos = start
        elif "r" in prefix.lower():
            self.escapes = False
        yield from super()._scalar()
        self.escapes = True

    def _is_end_of_string(self, ends: str, num_inner: int) -> Steps[bool]:
        if "," not in ends:  # it is a key
            return (yield from super()._is_end_of_string(ends, num_inner))
        start = self._pos
        found = yield from self._is_after_value(ends, is_sure=num_inner % 2 == 0)
        self._pos = start
        return found

    def _is_after_value(self, ends: str, *, is_sure: bool) -> Steps[bool]:
        """Whether what comes next may follow a value: brackets that close, or another value.

        `is_sure` is whether no quote in the value waits for another one.
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
        declared = self._parameters.declared
        return has_key and (is_sure or not declared or key in declared)

    def _word_before(self, pattern: re.Pattern[str], bracket: str) -> Steps[str]:
        """Read a word of such characters and a bracket; return the word, "" without the bracket."""
        word = yield from self._word(pattern)
        yield from self._following()
        return word if (yield from self._accept(bracket)) else ""

    def _as_json(self, word: str) -> str:
        if word in _WORDS or JSON_SCALAR.fullmatch(word):
            return _WORDS.get(word, word)
        if len(word) <= _MAX_NUMBER and _NUMBER.fullmatch(word):
            for number in (int, float):
                try:
                    found = json.dumps(number(word))
                except ValueError:
                    continue
                if JSON_SCALAR.fullmatch(found):
                    return found
        return quoted(word)


class LlamaPythonicParser(PythonicParser):
    """[f(key=value), g()] at the start of an answer; Llama 3.2 with a template that asks for it."""

    only_known_keys = True
    at_start = r"\A\s*(?=\[)"


class OlmoParser(PythonicParser):
    """Calls on separate lines between tags; Olmo 3."""

    in_lines = True


class MiniCpmParser(OlmoParser):
    """Calls on separate lines of a block of Markdown; MiniCPM 3 and 4."""

    def _calls(self) -> Steps[None]:
        if (yield from self._accept_next(_FENCE)):
            yield from self._accept("python")
        yield from super()._calls()
        yield from self._accept_next(_FENCE)

    def _is_next(self, tag: str) -> Steps[bool]:
        found = yield from super()._is_next(tag)
        if not found and tag == self._end:  # the end of the block is that of the calls, too
            found = yield from super()._is_next(_FENCE)
        return found
