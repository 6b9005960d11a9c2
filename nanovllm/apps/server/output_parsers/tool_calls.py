"""Reads tool calls out of a model's text, while it arrives.

`tool_formats` says how each model writes calls.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, Self

from nanovllm.apps.server.output_parsers.parameter_types import Function, typed
from nanovllm.apps.server.output_parsers.parts import (
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    new_call_id,
)
from nanovllm.apps.server.output_parsers.text_reader import (
    NotACall,
    Steps,
    TextReader,
    marked_tag,
    plain_object,
    prefix_at_end,
)
from nanovllm.options.sampling_params import TOKEN_MARK

_ARGUMENTS = ("arguments", "parameters")
_MOST_READ = 4096
MAX_CALLS = 128
"""Calls in an answer; a message of a request may have as many."""


class ToolCallParser(TextReader):
    """Splits an answer into text and calls.

    A call is certain, and begins, once its name and the first character of its arguments are known.
    From then on the arguments are passed on as they arrive. A call that goes wrong before is text,
    with its tags, and so is one after `MAX_CALLS` others; one that is cut off before is dropped.
    White space around calls belongs to them.

    Args:
        marked: tags that have TOKEN_MARK before them.
        functions: those that may be called, for formats that leave types to their schemas.
    """

    tag: ClassVar[str]
    """What a call begins with."""
    closing: ClassVar[str] = ""
    """The tag after a call, or after all; models forget it."""
    name_keys: ClassVar[tuple[str, ...]] = ("name",)
    """What the name is called in a call that is JSON."""
    only_known_keys: ClassVar[bool] = False
    """Whether an object with further keys is not a call."""
    calls_are_json: ClassVar[bool] = True
    """Whether JSON follows the opening of a call."""

    def __init__(self, marked: Collection[str] = (), functions: Sequence[Function] = ()) -> None:
        super().__init__()
        self._marked = marked
        self._functions = typed(functions)
        self._opening = self._tag(self.tag)
        self._end = self._tag(self.closing)
        self._openings: tuple[str, ...] = (self._opening,)  # what calls may begin with
        self._source: list[str] = []  # what was read since the opening of the last call
        self._num_calls = 0
        self._is_streaming = False  # the text read is arguments of the last call
        self._is_after_call = False  # no text since the last call
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

    def _tags_after(self) -> tuple[str, ...]:
        """Return the tags that may follow JSON in a call."""
        return tuple(filter(None, (self._end, *self._openings)))

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
        yield from self._skip_space()
        found = (yield from self._peek()) == ""
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

    def _drop_read(self) -> str:
        read = super()._drop_read()
        self._source.append(read)
        return read

    def _skip_repeated(self, begin: int) -> Steps[None]:
        """Read what models write once more after the closing tag: all that was between the tags.

        Args:
            begin: where that begins in what was read since the opening.
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
                self._source.clear()
                self._stops = self._tags_after()
                try:
                    if has_tag and self._text[: self._pos].endswith(self._opening):
                        yield from self._skip_tags(self._opening)  # models repeat it
                    begin = self._pos
                    is_token = self.tag in self._marked and self._end != ""
                    if is_token and (yield from self._accept(self._end)):
                        self._is_after_call = True  # tokens with nothing between them say nothing
                    else:
                        yield from self._calls()
                    yield from self._skip_tags(self._end)
                    yield from self._skip_repeated(begin)
                except NotACall:
                    if self._cut and (has_tag or self._num_calls > num_calls):
                        return  # of a call that cannot be made
                    if self._is_after_call and self._text.strip() == self._opening:
                        return  # it stands for the closing tag, and the answer has ended
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

    # What a call consists of. Each of these reads on from where the last one ended.

    def _json_calls(self) -> Steps[None]:
        """Read calls that are JSON objects or lists of them, one after the other.

        There may be a comma or a semicolon between them, and brackets too many after one.
        """
        is_call = True
        while is_call:
            yield from self._skip_space()
            if (yield from self._peek()) == "[":
                yield from self._list()
            else:
                yield from self._call()
            is_call = yield from self._is_another()

    def _is_another(self) -> Steps[bool]:
        """Whether one more JSON call follows; then what stands before it is read."""
        yield from self._skip_space()
        while (yield from self._accept("}")) or (yield from self._accept("]")):
            yield from self._skip_space()
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
        yield from self._skip_space()
        yield from self._call()
        yield from self._skip_space()
        while (yield from self._peek()) != "]":
            yield from self._accept(",")
            yield from self._skip_space()
            if (yield from self._peek()) != "]":
                yield from self._call()
                yield from self._skip_space()
        self._pos += 1
        self._drop_read()

    def _call(self) -> Steps[None]:
        """Read a call: {"name": ..., "arguments": ...}, in any order; or {"function": a call}."""
        yield from self._expect("{")
        name = ""
        arguments = ""
        separator = ","
        while separator == ",":
            yield from self._skip_space()
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
        self._is_after_call = True
        self._has_sent_text = False

    def _more(self) -> Steps[None]:
        """Wait for more text; pass on the arguments that were read."""
        if self._is_streaming and not self._ended:
            self._send_arguments(self._drop_read())
        yield from super()._more()
