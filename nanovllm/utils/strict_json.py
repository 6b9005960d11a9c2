"""Untrusted JSON, read strictly: each key once, finite numbers, and a bounded depth."""

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Of arrays and objects in each other. What writes or walks a value may then use recursion."""


class RepeatedKeyError(ValueError):
    """An object has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"it has the key {key[:80]!r} twice")
        self.key = key


class TooDeepError(ValueError):
    """Arrays and objects are nested too deep."""

    def __init__(self, max_depth: int) -> None:
        super().__init__(f"it is nested more than {max_depth} deep")


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
