"""Checks shared by the value types: keyword names, types and ranges.

The caller gives the error class to raise.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import json
import logging
import math
import numbers
import operator
import os
import reprlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, dataclass_transform

from nanovllm.errors import ConfigError, InvalidRequestError, NanoVLLMError, UnsupportedModelError

if TYPE_CHECKING:
    from nanovllm.options.other_names import OtherName

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

Error = type[NanoVLLMError]
"""What a check raises."""

_MAX_SHOWN = 80


def shown(value: Any) -> str:
    """Return repr(value), cut to 80 characters: how messages show what was given.

    Looks at the first few elements only, so that a value of any size costs little.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = _MAX_SHOWN
    short.maxlevel = 2
    try:
        text = short.repr(value)
    except ValueError:  # an integer of thousands of digits has no repr
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def listed(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first `most` of `items`, and how many more there are: for errors."""
    rest = len(items) - most
    return separator.join([*items[:most], *([f"and {rest} more"] if rest > 0 else [])])


def unsupported(name: str, value: Any, supported: str) -> UnsupportedModelError:
    """Return the error for a setting whose value is not implemented."""
    return UnsupportedModelError(f"{name} {shown(value)} is not supported (only {supported})")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def checked_dataclass(error: Error, owner: str = "") -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass whose fields are checked, see `check_fields`, before its own
    `__post_init__`. It raises `error`, also for a keyword that is neither a field nor known.

    The message names the field that was meant, or says what to use instead of another engine's
    option. The message of an assignment says how to make a changed copy.

    Args:
        owner: what errors write before a field's name.
    """

    def decorate(cls: type[T]) -> type[T]:
        check_more = getattr(cls, "__post_init__", None)

        def __post_init__(self: T) -> None:
            check_fields(error, self, owner)
            if check_more is not None:
                check_more(self)

        cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
        cls = dataclasses.dataclass(frozen=True)(cls)
        init = cls.__init__
        known = inspect.signature(cls).parameters
        copy = "x = x.clone(" if hasattr(cls, "clone") else "x = dataclasses.replace(x, "

        @functools.wraps(init)
        def __init__(self: T, /, *args: Any, **kwargs: Any) -> None:
            for name in [name for name in kwargs if name not in known]:
                value = kwargs.pop(name)
                other = _other_name(cls.__name__, name)
                if other and other.accepts(value):
                    if value is not None:
                        logger.info("%s=%s changes nothing", name, shown(value))
                elif other and other.remedy:
                    raise error(f"{name}={shown(value)} is not supported: {other.remedy}")
                else:
                    hint = did_you_mean(name, known)
                    raise error(f"{cls.__name__} has no field {shown(name)}{hint}")
            init(self, *args, **kwargs)

        def __setattr__(self: T, name: str, value: Any) -> NoReturn:
            if name not in known:
                other = _other_name(cls.__name__, name)
                remedy = other and other.remedy
                hint = f": {remedy}" if remedy else did_you_mean(name, known)
                raise AttributeError(f"{cls.__name__} has no field {shown(name)}{hint}")
            raise dataclasses.FrozenInstanceError(
                f"{cls.__name__} never changes once made; for a copy with another {name} use "
                f"{copy}{name}={shown(value)})"
            )

        cls.__init__ = __init__  # type: ignore[method-assign, assignment]
        cls.__setattr__ = __setattr__  # type: ignore[method-assign, assignment]
        return cls

    return decorate


def takes_other_keywords(method: Callable[P, T]) -> Callable[P, T]:
    """Let a method take vLLM's further keywords: those that ask for what happens anyway.

    The method then raises InvalidRequestError where a keyword of vLLM's asks for something else.
    """
    known = inspect.signature(method).parameters

    @functools.wraps(method)
    def checked(*args: P.args, **keywords: P.kwargs) -> T:
        for name in [name for name in keywords if name not in known]:
            if other := _other_name("methods", name):
                value = keywords[name]
                if other.accepts(value):
                    del keywords[name]
                elif other.remedy:
                    given = f"{name}={shown(value)}"
                    raise InvalidRequestError(f"{given} is not supported: {other.remedy}")
        return method(*args, **keywords)

    return checked


def _other_name(owner: str, name: str) -> "OtherName | None":
    """Return what is known of another engine's option of a class."""
    from nanovllm.options.other_names import OTHER_NAMES, find_other  # few programs need it

    return find_other(OTHER_NAMES.get(owner, {}), name)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return "; did you mean 'x'?" for the one of `known` that was meant, or else list them all.

    A name is suggested if `name` misspells or shortens it. A name in which another word stands,
    such as presence_penalty for length_penalty, means something else.
    """
    name = name[:100]  # the comparison takes time with the square of the length
    ratios = {other: _similarity(_letters(name), _letters(other)) for other in known}
    near = [other for other in known if ratios[other] >= 0.88 or _same_words(name, other)]
    near = [other for other in near if ratios[other] == max(ratios[item] for item in near)]
    near = near or [other for other in known if _same_words(name, other, num_left_out=1)]
    near = [other for other in near if other[:1] == name[:1]] or near  # "stopp": not top_p
    if len(near) == 1:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(sorted(known))}"


def check_fields(error: Error, checked: Any, owner: str) -> None:
    """Check the fields of a new frozen dataclass by their types, and keep what the checks return.

    A bool is True or False. That of `Annotated[kind, check, *limits]` is what
    `check(error, name, value, *limits)` returns; a default is not checked, so one that is
    None by default may be None.

    Args:
        owner: what errors write before a field's name.
    """
    for name, field in checked.__dataclass_fields__.items():
        value = getattr(checked, name)
        if field.type is bool:
            check_bool(error, owner + name, value)
        elif value is field.default:  # None may be one; it needs no check
            continue
        elif metadata := getattr(field.type, "__metadata__", None):
            check, *limits = metadata
            object.__setattr__(checked, name, check(error, owner + name, value, *limits))


def check_int(error: Error, name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as int if it is an integer (not a bool) in [low, high]; else raise `error`."""
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


def check_float(error: Error, name: str, value: Any, low: float, high: float = math.inf) -> float:
    """Return `value` as float if it is a finite real number in [low, high], else raise `error`."""
    rule = f"a finite number >= {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise error(f"{name} must be {rule}, got {shown(value)} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:  # an integer larger than any float
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise error(f"{name} must be {rule}, got {shown(value)}")
    return number


def check_bool(error: Error, name: str, value: Any) -> bool:
    """Return `value` if it is True or False, else raise `error`."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, got {shown(value)} ({type(value).__name__})")
    return value


def check_choice(error: Error, name: str, value: Any, choices: Collection[str]) -> str:
    """Return `value` if it is one of `choices`, else raise `error`.

    The message says what to use instead of another engine's value, or names the choice that was
    meant.
    """
    if not isinstance(value, str) or value not in choices:
        from nanovllm.options.other_names import REMEDIES

        meant = did_you_mean(shown(value).strip("'"), choices)
        remedy = isinstance(value, str) and REMEDIES.get(f"{name}={value}")
        hint = f": {remedy}" if remedy else meant * meant.startswith("; did")  # no second list
        raise error(f"{name} must be one of {', '.join(choices)}, got {shown(value)}{hint}")
    return plain_text(value)


def as_class(value: T, cls: type[T]) -> T:
    """Return `value`, an instance of the dataclass `cls`, as one of no subclass."""
    if type(value) is cls:
        return value
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return cls(**{field.name: getattr(value, field.name) for field in fields if field.init})


def plain_text(text: str) -> str:
    """Return `text` as a str and no subclass, such as an Enum: str() of its members is their name,
    and other processes may not have the class.
    """
    return str.__str__(text)


def check_text(error: Error, name: str, value: Any) -> str:
    """Return `value` if it is a string that is not empty, else raise `error`."""
    if not isinstance(value, str) or not value:
        raise error(f"{name} must be a string that is not empty, got {shown(value)}")
    return plain_text(value)


def check_texts(error: Error, name: str, value: Any, is_secret: bool = False) -> tuple[str, ...]:
    """Return `value` as a tuple if it is a list of strings, else raise `error`."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise error(f"{name} must be a list of strings" + (not is_secret) * f", got {shown(value)}")
    return tuple(map(plain_text, value))


def check_path(
    error: Error, name: str, value: Any, rule: str, kinds: Any = str | os.PathLike
) -> str:
    """Return `value` as a string if it is a path that is not empty, else raise `error`."""
    path = os.fspath(value) if isinstance(value, kinds) else None
    if not isinstance(path, str) or not path:
        raise error(f"{name} must be {rule}, got {shown(value)}")
    return plain_text(path)


def check_installed(extra: str, *packages: str, what: str = "this command") -> None:
    """Raise ConfigError if a package of an extra is not installed, which `what` needs."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed, and {what} needs it: "
                f"pip install -e '.[{extra}]' -c constraints.txt"
            )


def check_place(name: str, path: str) -> None:
    """Raise ConfigError if the file that an option names cannot be written: before the work whose
    result it would hold.
    """
    if os.path.isdir(path):
        raise ConfigError(f"{name} {shown(path)} is a directory: name a file in it")
    if not os.access(path if os.path.exists(path) else os.path.dirname(path) or ".", os.W_OK):
        raise ConfigError(
            f"{name} {shown(path)} cannot be written: name a file in a directory that is there and "
            "yours to write to"
        )


@contextlib.contextmanager
def writing(name: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise ConfigError if the file that an option names cannot be written inside.

    torch writes files, too, and raises ValueError and RuntimeError.
    """
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(
            f"{name} {shown(os.fspath(path))} cannot be written: {reason}; name another file"
        ) from error


def check_json_object(error: Error, name: str, value: Any) -> dict[str, Any]:
    """Return a copy of `value`, which must be a dictionary that JSON can write."""
    try:
        copied = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as reason:
        raise error(
            f"{name} must be a dictionary of JSON values, got {shown(value)}: {reason}"
        ) from reason
    if not isinstance(copied, dict):
        raise error(f"{name} must be a dictionary, got {shown(value)}")
    return copied


def check_names(error: Error, name: str, value: Any) -> dict[str, Any]:
    """Return a copy of `value` if it is a dictionary with strings as keys, else raise `error`."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise error(f"{name} must be a dictionary with names as keys, got {shown(value)}")
    return dict(value)


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _similarity(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def _same_words(name: str, other: str, *, num_left_out: int = 0) -> bool:
    """Whether the words of `name`, misspelt or shortened, are those of `other`, in their order.

    Args:
        num_left_out: how many words of `other` are not in `name`.
    """
    words = name.lower().split("_")
    others = other.lower().split("_")
    rest = iter(others)
    return len(words) + num_left_out == len(others) and all(
        any(_same_word(word, wanted) for wanted in rest) for word in words
    )


def _same_word(word: str, other: str) -> bool:
    """Whether one is the beginning of the other, or about one letter in five differs."""
    length = min(len(word), len(other))
    if length < 3:
        return word == other
    begins = word.startswith(other) or other.startswith(word)
    return begins or _similarity(word, other) > min(0.799, 0.999 - 1 / length)
