"""Checks shared by the value types: keyword names, types and ranges.

Knows nothing of what the values mean; the caller gives the error class to raise.
"""

import difflib
import inspect
import math
import numbers
import operator
import reprlib
from collections.abc import Collection
from typing import Any, ClassVar

from nanovllm.errors import NanoVLLMError

_MAX_SHOWN = 80


def shown(value: Any) -> str:
    """Return repr(value), cut to 80 characters: how messages show what was given.

    Looks at the first few elements only, so that a value of any size costs little.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = _MAX_SHOWN
    try:
        text = short.repr(value)
    except ValueError:  # an integer of thousands of digits has no repr
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return "; did you mean 'x'?" for the nearest of `known`, or else a list of them all."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or [k for k in known if name in k][:1]
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


class StrictKeywords:
    """Mixin for dataclasses: an unknown keyword raises `error`, which names the nearest field."""

    error: ClassVar[type[NanoVLLMError]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        known = inspect.signature(cls).parameters
        for name in kwargs:
            if name not in known:
                raise cls.error(f"{cls.__name__} has no field {name!r}{did_you_mean(name, known)}")
        return super().__new__(cls)


def check_int(
    error: type[NanoVLLMError], name: str, value: Any, low: int, high: int | None = None
) -> int:
    """Return `value` as int if it is an integer (not a bool) in [low, high], else raise `error`."""
    rule = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # arrays of several elements have __index__ too, but it raises
        number = None
    if number is None:
        raise error(f"{name} must be {rule}, got {shown(value)} ({type(value).__name__})")
    if number < low or (high is not None and number > high):
        raise error(f"{name} must be {rule}, got {shown(value)}")
    return number


def check_float(
    error: type[NanoVLLMError], name: str, value: Any, low: float, high: float = math.inf
) -> float:
    """Return `value` as float if it is a finite real number in [low, high], else raise `error`."""
    rule = f"a finite number >= {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise error(f"{name} must be {rule}, got {value!r} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:  # an integer larger than any float
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise error(f"{name} must be {rule}, got {value!r}")
    return number


def check_bool(error: type[NanoVLLMError], name: str, value: Any) -> bool:
    """Return `value` if it is True or False, else raise `error`."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


def check_choice(
    error: type[NanoVLLMError], name: str, value: Any, choices: Collection[str]
) -> str:
    """Return `value` if it is one of `choices`, else raise `error`, which names the nearest."""
    if not isinstance(value, str) or value not in choices:
        hint = did_you_mean(str(value), choices)
        raise error(f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}")
    return value
