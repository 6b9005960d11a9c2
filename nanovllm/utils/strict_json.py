"""Untrusted JSON, read strictly: each key once, finite numbers, and a bounded depth."""

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Of arrays and objects in each other. What writes or walks a value may then use recursion."""


class StrictJSONError(ValueError):
    """JSON is not accepted; `key` is the one that an object has twice, if any."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


def read(data: bytes, name: str) -> Any:
    """Return the value of JSON in UTF-8, which errors call `name`.

    Raises:
        StrictJSONError: it is not UTF-8, or `parse` refuses it.
    """
    key = None
    try:
        return parse(data.decode())
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: {error.reason} at byte {error.start}"
    except StrictJSONError as error:
        reason = str(error).removeprefix("it ")
        key = error.key
    except json.JSONDecodeError as error:
        reason = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except ValueError as error:
        reason = f"is not JSON: {error}"
        if "int_max_str_digits" in reason:  # Python's advice is for programmers
            reason = "has a number of thousands of digits"
    raise StrictJSONError(f"{name} {reason}", key) from None


def parse(text: str, *, max_depth: int = MAX_DEPTH, finite: bool = True) -> Any:
    """Return the value of a JSON text.

    Args:
        max_depth: of arrays and objects in each other.
        finite: False accepts NaN, Infinity and numbers too large for a float, as Python's json
            does.

    Raises:
        StrictJSONError: an object has a key twice, or it is nested too deeply.
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
        raise _too_deep(max_depth) from None
    if text.count("[") + text.count("{") > max_depth:
        _check_depth(value, max_depth)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise StrictJSONError(f"it has the key {key[:80]!r} twice", key)
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
    raise _too_deep(max_depth)


def _too_deep(max_depth: int) -> StrictJSONError:
    return StrictJSONError(f"it is nested more than {max_depth} deep")
