"""JSON of strangers, read strictly: each key once, finite numbers, and a bounded depth.

Knows neither requests nor files.
"""

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
    """Arrays and objects are nested more than `MAX_DEPTH` deep."""

    def __init__(self) -> None:
        super().__init__(f"it is nested more than {MAX_DEPTH} deep")


def parse(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        RepeatedKeyError: an object has a key twice.
        TooDeepError: it is nested too deeply.
        ValueError: it is no JSON (`json.JSONDecodeError` says where), or has NaN or a number that
            is too large for a float.
    """
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite
        )
    except RecursionError:
        raise TooDeepError from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
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


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        parents = [item for item in level if isinstance(item, dict | list)]
        level = [v for p in parents for v in (p.values() if isinstance(p, dict) else p)]
        if not level:
            return
    raise TooDeepError
