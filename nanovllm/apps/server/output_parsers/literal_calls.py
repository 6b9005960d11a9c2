"""Reads tool calls whose arguments are not JSON, such as Gemma 4's.

<|tool_call>call:f{city:<|"|>Rome<|"|>,days:[1,2]}<tool_call|>
"""

import dataclasses
import json
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from nanovllm.apps.server.output_parsers.parameter_types import Function, ParameterTypes
from nanovllm.apps.server.output_parsers.text_reader import (
    JSON_SCALAR,
    NotACall,
    Steps,
    decoded,
    escaped,
    prefix_at_end,
)
from nanovllm.apps.server.output_parsers.tool_calls import ToolCallParser

NAME = re.compile(r"[-.:\w]")
"""A character of a function's name."""
_JSON_BEGINS = {"}": "{", "]": "[", "": ""}


@dataclasses.dataclass(slots=True)
class _Bracket:
    """A bracket that is open."""

    opening: str
    closing: str
    json_end: str | None
    """What closes its JSON; None if that is not decided yet, nor what opens it."""
    place: int = 0
    """Where that stands in the text that is held back."""


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
    quotes: tuple[str, ...]
    """What a string may begin with, and then ends with."""
    breaks: tuple[str, ...]
    """What has a meaning in a string besides its quotes: a backslash, or a tag that ends it."""

    def __init__(self, marked: Collection[str] = (), functions: Sequence[Function] = ()) -> None:
        super().__init__(marked, functions)
        self._types = {each.name: each.types for each in self._functions}
        self._parameters: ParameterTypes | None = None  # of the function that is called
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
        """Read the arguments after their bracket, and pass the call on meanwhile.

        Args:
            closing: the bracket after them.
            separator: what stands between a name and its value.
        """
        self._parameters = self._types.get(name)
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
        yield from self._skip_space()
        nothing = (self._open[0].closing, "")
        if (yield from self._peek()) in nothing or (yield from self._is_next(self._end)):
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
                yield from self._skip_space()
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
        is_empty = (yield from self._peek()) == closing
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
        yield from self._skip_space()
        if not (yield from self._accept(":")):
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
            yield from self._skip_space()
            character = yield from self._peek()
            if not character or (yield from self._is_next(self._end)):
                if not character and self._cut:
                    raise NotACall
                while self._open:
                    self._close()
                return True
            self._pos += 1
            if character == ",":
                self._decide("]")
                yield from self._skip_space()
                if (yield from self._peek()) not in (*self._ends[1:], ""):
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
            self._write(json.dumps(self._parameter, ensure_ascii=False))
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
                yield from self._quoted(quote, self.breaks, ends)
                return True
        return False

    def _quoted(self, quote: str, breaks: tuple[str, ...], ends: str) -> Steps[None]:
        tags = (quote, *breaks)
        special = re.compile("|".join(map(re.escape, tags)))
        num_inner = 0  # quotes that did not end it
        self._write('"')
        while True:
            start = self._pos
            found = special.search(self._text, self._pos)
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
                if (yield from self._is_end_of_string(ends, num_inner)):
                    break
                num_inner += 1
                self._write(escaped(self._inner_quote(quote)))
        self._write('"')

    def _inner_quote(self, quote: str) -> str:
        """Return what a quote stands for that does not end its string."""
        return quote

    def _escape(self) -> Steps[None]:
        """Read a backslash and what belongs to it, and pass on what it stands for."""
        raise NotImplementedError

    def _is_end_of_string(self, ends: str, num_inner: int) -> Steps[bool]:
        """Whether a quote that was read ends its string: one of `ends`, or no text, follows.

        Args:
            num_inner: how many quotes in the string did not.
        """
        start = self._pos
        following = yield from self._following()
        found = not following or following in ends or (yield from self._is_next(self._end))
        self._pos = start
        return found

    def _following(self) -> Steps[str]:
        """Return the next character after white space; "" at the end of the answer.

        Raises:
            NotACall: the answer was cut off before it.
        """
        yield from self._skip_space()
        character = yield from self._peek()
        if not character and self._cut:
            raise NotACall
        return character


class Gemma4Parser(LiteralParser):
    """<|tool_call>call:f{key:<|"|>value<|"|>}<tool_call|>, one after the other; Gemma 4.

    Keys may be quoted, and strings be JSON's or have single quotes. Calls may be JSON.
    """

    tag = "<|tool_call>"
    closing = "<tool_call|>"
    quote_tag: ClassVar[str] = '<|"|>'
    """What is around strings."""

    def __init__(self, marked: Collection[str] = (), functions: Sequence[Function] = ()) -> None:
        super().__init__(marked, functions)
        self._quote = self._tag(self.quote_tag)
        self.quotes = (self._quote, "'")
        # A token that ends the call ends the string, too: the model forgot the token of quotes.
        self.breaks = (self._end,) if self.closing in marked else ()

    def _calls(self) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._peek()) == "{":
            yield from self._json_calls()
            return
        if not (yield from self._accept("call:")):
            yield from self._accept(":")
        yield from self._skip_space()
        name = yield from self._word(NAME)
        yield from self._skip_space()
        if not name or not (yield from self._accept("{")):
            raise NotACall
        yield from self._read_call(name, "}", ":")

    def _scalar(self) -> Steps[None]:
        if (yield from self._peek()) != '"':
            yield from super()._scalar()
            return
        source = yield from self._value()
        value = decoded(source)
        self._write(json.dumps(source[1:-1] if value is None else value, ensure_ascii=False))

    def _inner_quote(self, quote: str) -> str:
        return '"' if quote == self._quote else quote

    def _as_json(self, word: str) -> str:
        word, quote, _ = word.partition(self._quote)
        if quote or self._is_string():  # the model forgot the opening one, or both
            return json.dumps(word, ensure_ascii=False)
        word = "null" if word in ("None", "nil") else word
        return word if JSON_SCALAR.fullmatch(word) else json.dumps(word, ensure_ascii=False)

    def _is_string(self) -> bool:
        """Whether the schema wants nothing but a string for the value that is read."""
        types = self._parameters
        if types is None or len(self._open) > 1 or self._parameter not in types.declared:
            return False
        return types.of(self._parameter) == {"string"}


class FunctionGemmaParser(Gemma4Parser):
    """Gemma 4's format with other tags; FunctionGemma."""

    tag = "<start_function_call>"
    closing = "<end_function_call>"
    quote_tag = "<escape>"
