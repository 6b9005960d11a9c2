"""Regular expressions from files, matched in a time that is linear in the text.

Python's `re` takes exponential time for some. Rust's engine, which pydantic has, takes none so: it
has no look-around and no back-reference.
"""

import re
from typing import Annotated

MAX_LENGTH = 1_000
"""Characters of a pattern."""
_MAX_SIZE = 10_000
"""Of a pattern whose counted repetitions are written out, see `_size`. The time to match is in
proportion to it, too: a few milliseconds for a name."""
_CLASS_SIZE = 100
"""What a class of all letters of Unicode, such as \\w, counts for."""
_REPEAT = r"(?:[*+?]|\{(?:\d{1,3}|\d{0,3},\d{0,3})\})"
_TOKEN = re.compile(
    rf"(?P<refused>\(\?(?!:).?|{_REPEAT}\??+(?={_REPEAT})|\\(?:[^\W_dDwWsS]|$))"
    rf"|(?P<repeat>{_REPEAT}\??)"
    r"|(?P<set>\[\^?\]?(?:\\.|[^\]\[\\])*\])"
    r"|(?P<brace>[{}])|\[|\\.|.",
    re.DOTALL,
)
_DIGITS = re.compile(r"\d+")
_CLASS = re.compile(r"\\[dDwWsS]")
_SET_OPERATION = re.compile("&&|--|~~")


class SafeRegex:
    """A regular expression, as Python reads it with DOTALL.

    Raises:
        ValueError: the syntax is wrong, not the same in Python and in Rust, or asks for too much.
    """

    def __init__(self, pattern: str) -> None:
        # Here, because it takes 0.2 s and few checkpoints have such patterns.
        from pydantic import StringConstraints, TypeAdapter
        from pydantic_core import SchemaError

        if len(pattern) > MAX_LENGTH:
            raise ValueError(f"it has {len(pattern)} characters, at most {MAX_LENGTH} are read")
        if (size := _size(pattern)) > _MAX_SIZE:
            raise ValueError(f"its repetitions make it {size} long, at most {_MAX_SIZE} is read")
        inner = _TOKEN.sub(_in_rust, pattern)
        try:
            for whole in (inner, rf"\A(?s:{inner})"):  # its own ")" must not end the group
                self._beginning = TypeAdapter(Annotated[str, StringConstraints(pattern=whole)])
        except SchemaError as error:
            reason = str(error).splitlines()[-1].strip()
            raise ValueError(re.sub("^(SchemaError|error): ", "", reason)) from error

    def match(self, text: str) -> bool:
        """Return whether a beginning of `text` matches, as `re.match` does."""
        from pydantic import ValidationError

        try:
            self._beginning.validate_python(text)
        except ValidationError:
            return False
        return True


def _size(pattern: str) -> int:
    """Return the number of tokens in `pattern` when its counted repetitions are written out."""
    totals, last = [0], 0  # of each open group, without its last part; of that part
    for token in _TOKEN.finditer(pattern):
        word = token[0]
        if token["repeat"]:
            last *= max([1, *map(int, _DIGITS.findall(word))])
            continue
        totals[-1] += last
        last = _CLASS_SIZE if _CLASS.search(word) else 1
        if word == "(":
            totals.append(0)
        elif word == ")" and len(totals) > 1:
            last += totals.pop()
    return sum(totals) + last


def _in_rust(token: re.Match[str]) -> str:
    """Return a token of Python's syntax in Rust's.

    Raises:
        ValueError: it has another meaning there, or none.
    """
    word = token[0]
    if token["refused"] or word == "[" or (token["set"] and _SET_OPERATION.search(word)):
        raise ValueError(f"{word!r} is not read")
    if token["brace"]:
        return f"\\{word}"
    return word.replace("{,", "{0,") if token["repeat"] else word
