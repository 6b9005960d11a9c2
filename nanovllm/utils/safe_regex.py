"""Regular expressions from files, matched in a time that is linear in the text.

Python's `re` takes exponential time for some. Rust's engine, which pydantic has, takes none so: it
has no look-around and no back-reference.
"""

import re
from typing import Annotated

MAX_LENGTH = 1_000
"""Characters of a pattern."""
_REPEAT = r"(?:[*+?]|\{(?:\d{1,3}|\d{0,3},\d{0,3})\})"
_TOKEN = re.compile(
    rf"(?P<refused>\(\?(?!:).?|{_REPEAT}\??+(?={_REPEAT})|\\(?:[^\W_dDwWsS]|$))"
    rf"|(?P<repeat>{_REPEAT}\??)"
    r"|(?P<set>\[\^?\]?(?:\\.|[^\]\[\\])*\])"
    r"|(?P<brace>[{}])|\[|\\.|.",
    re.DOTALL,
)
_SET_OPERATION = re.compile("&&|--|~~")


class SafeRegex:
    """A regular expression, as Python reads it with DOTALL.

    Raises:
        ValueError: the syntax is wrong, or not the same in Python and in Rust.
    """

    def __init__(self, pattern: str) -> None:
        # Here, because it takes 0.2 s and few checkpoints have such patterns.
        from pydantic import StringConstraints, TypeAdapter
        from pydantic_core import SchemaError

        if len(pattern) > MAX_LENGTH:
            raise ValueError(f"it has {len(pattern)} characters, at most {MAX_LENGTH} are read")
        inner = _TOKEN.sub(_in_rust, pattern)
        try:
            for whole in (inner, rf"\A(?s:{inner})"):  # a ")" of its own must not end the group
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
