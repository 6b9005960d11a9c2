"""Reads Gemma 4's tool calls, whose arguments are no JSON: {city:<|"|>Rome<|"|>,days:[1,2]}.

Pure text: knows no requests and no tokens.
"""

import json
import re
from collections.abc import Collection, Sequence

from nanovllm.chat.call_arguments import JSON_SCALAR, Function, NotACall, decoded, escaped
from nanovllm.chat.reasoning import prefix_at_end
from nanovllm.chat.tool_calls import Steps, ToolCallParser

CLOSING, QUOTE = "<tool_call|>", '<|"|>'
_BRACKETS = {"{": "}", "[": "]"}
_NAME = re.compile(r"[-.:\w]")


class Gemma4Parser(ToolCallParser):
    """<|tool_call>call:f{key:<|"|>value<|"|>}<tool_call|>, one behind the other; Gemma 4.

    The arguments are passed on as JSON. Keys may be quoted, and strings be JSON's. A bare word is a
    string. The token of quotes stands for a plain quote where the string cannot end.
    """

    tag = "<|tool_call>"
    closing = CLOSING

    def __init__(self, marked: Collection[str] = (), functions: Sequence[Function] = ()) -> None:
        super().__init__(marked, functions)
        self._quote = self._tag(QUOTE)

    def _calls(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._accept("call:")
        name = yield from self._word(_NAME)
        yield from self._skip_space()
        if not name or (yield from self._peek()) != "{":
            raise NotACall
        self._start(name)
        self._drop_read()
        try:
            yield from self._arguments()
        except NotACall:  # they are cut off: what there is was passed on
            return
        yield from self._skip_space()
        yield from self._accept(self._end)

    def _arguments(self) -> Steps[None]:
        """Read an object. `ends` are the brackets that close what is open."""
        ends: list[str] = []
        while True:
            yield from self._skip_space()
            if ends and ends[-1] == "}":
                yield from self._member()
            opening = yield from self._peek()
            if opening in _BRACKETS:
                self._pos += 1
                self._write(opening)
                ends.append(_BRACKETS[opening])
                yield from self._skip_space()
                if (yield from self._peek()) not in ("}", "]"):
                    continue
            else:
                yield from self._scalar()
            if not (yield from self._close(ends)):
                return

    def _close(self, ends: list[str]) -> Steps[bool]:
        """Read brackets that close something, up to a comma; return whether something is open.

        What the model forgot to close is closed; what stands between two values is left out.
        """
        while ends:
            character = yield from self._peek()
            if not character:
                raise NotACall
            if (yield from self._is_next(self._end)):
                self._send_arguments("".join(reversed(ends)))
                return False
            self._pos += 1
            if character == ",":
                yield from self._skip_space()
                if (yield from self._peek()) not in ("}", "]"):
                    self._write(", ")
                    return True
            elif character in ends:
                while (end := ends.pop()) != character:
                    self._send_arguments(end)
                self._write(end)
        return False

    def _member(self) -> Steps[None]:
        """Read a key and the colon behind it, and pass them on."""
        if (yield from self._accept(self._quote)):
            yield from self._quoted(":")
        else:
            source = yield from self._bare(":,}")
            self._write(json.dumps(_unquoted(source), ensure_ascii=False))
        yield from self._skip_space()
        yield from self._accept(":")
        yield from self._skip_space()
        self._write(": ")

    def _scalar(self) -> Steps[None]:
        """Read a string, a number or a word, and pass it on."""
        if (yield from self._accept(self._quote)):
            yield from self._quoted(",}]")
        elif (yield from self._peek()) == '"':
            source = yield from self._value()
            value = decoded(source)
            self._write(json.dumps(source[1:-1] if value is None else value, ensure_ascii=False))
        else:
            source = yield from self._bare(",}]")
            if (yield from self._accept(self._quote)):  # the model forgot the opening one
                self._write(json.dumps(source, ensure_ascii=False))
            else:
                source = "null" if source in ("None", "nil") else source
                is_json = JSON_SCALAR.fullmatch(source) is not None
                self._write(source if is_json else json.dumps(source, ensure_ascii=False))

    def _bare(self, ends: str) -> Steps[str]:
        """Read up to one of these characters, or a tag; return it without spaces around."""
        start = self._pos
        while True:
            character = yield from self._peek()
            if not character:
                raise NotACall
            if character in ends or (yield from self._is_next(self._quote)):
                break
            if (yield from self._is_next(self._end)):
                break
            self._pos += 1
        return self._text[start : self._pos].strip()

    def _quoted(self, ends: str) -> Steps[None]:
        """Read a string up to the quotes that end it, before one of `ends`, and pass it on."""
        # A token that ends the call ends the string, too: the model forgot the token of quotes.
        tags = (self._quote, self._end) if CLOSING in self._marked else (self._quote,)
        any_tag = re.compile("|".join(map(re.escape, tags)))
        self._write('"')
        while True:
            start, found = self._pos, any_tag.search(self._text, self._pos)
            self._pos = len(self._text) if found is None else found.start()
            if found is None and (self._cut or not self._ended):
                self._pos -= max(len(prefix_at_end(self._text[start:], tag)) for tag in tags)
            self._write(escaped(self._text[start : self._pos]))
            if found is None:
                yield from self._more()
                continue
            is_end = found[0] == self._end
            if not is_end:
                self._pos += len(self._quote)
                start = self._pos
                yield from self._skip_space()
                is_end = (yield from self._peek()) in (*ends, "") or (
                    yield from self._is_next(self._end)
                )
                self._pos = start
            self._write('"' if is_end else '\\"')
            if is_end:
                return


def _unquoted(source: str) -> str:
    """Return a key without the quotes of JSON around it."""
    value = decoded(source) if source.startswith('"') else None
    return source if value is None else value
