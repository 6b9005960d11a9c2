"""Untrusted JSON, read strictly: each key once, finite numbers, and a bounded depth."""

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Of arrays and objects in each other. What writes or walks a value may then use recursion."""


class StrictJSONError(ValueError):
    """Bytes are not JSON that `read` accepts; `key` is the one that an object has twice, if any."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class RepeatedKeyError(ValueError):
    """An object has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"it has the key {key[:80]!r} twice")
        self.key = key


class TooDeepError(ValueError):
    """Arrays and objects are nested too deep."""

    def __init__(self, max_depth: int) -> None:
        super().__init__(f"it is nested more than {max_depth} deep")


def read(data: bytes, name: str) -> Any:
    """Return the value of JSON in UTF-8, which errors call `name`.

    Raises:
        StrictJSONError: it is not UTF-8, or `parse` refuses it.
    """
    try:
        return parse(data.decode())
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: {error.reason} at byte {error.start}"
    except RepeatedKeyError as error:
        raise StrictJSONError(f"{name} has the key {error.key[:80]!r} twice", error.key) from None
    except TooDeepError as error:
        reason = str(error).removeprefix("it ")
    except json.JSONDecodeError as error:
        reason = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except ValueError as error:
        reason = f"is not JSON: {error}"
        if "int_max_str_digits" in reason:  # Python's advice is for programmers
            reason = "has a number of thousands of digits"
    raise StrictJSONError(f"{name} {reason}") from None


def parse(text: str, *, max_depth: int = MAX_DEPTH, finite: bool = True) -> Any:
    """Return the value of a JSON text.

    Args:
        max_depth: of arrays and objects in each other.
        finite: False accepts NaN, Infinity and numbers too large for a float, as Python's json
            does.

    Raises:
        RepeatedKeyError: an object has a key twice.
        TooDeepError: it is nested too deeply.
        ValueError: it is not JSON (`json.JSONDecodeError` says where), or has a number that is not
            finite.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse if finite else None,
            parse_float=_finite if finite else None,
        )
    except RecursionError:
        raise TooDeepError(max_depth) from None
    if text.count("[") + text.count("{") > max_depth:
        _check_depth(value, max_depth)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RepeatedKeyError(key)
            seen.add(key)
    return fields


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it has no {name}")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:80]!r} is too large")
    return number


def _check_depth(value: Any, max_depth: int) -> None:
    level = [value]
    for _ in range(max_depth + 1):
        parents = [item for item in level if isinstance(item, dict | list)]
        level = [v for p in parents for v in (p.values() if isinstance(p, dict) else p)]
        if not level:
            return
    raise TooDeepError(max_depth)
