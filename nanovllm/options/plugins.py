"""Plugins: classes of the user's, which an option names as "module:Class" or by an entry point.

An entry point is in the group "nanovllm.plugins", has the name "kind.name" and the value
"module:Class". Installed ones are looked up by name and imported when they are asked for, and no
registry keeps what was found: each engine loads its own.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Collection
from importlib.metadata import entry_points
from typing import Any, TypeVar

from nanovllm.errors import ConfigError, NanoVLLMError
from nanovllm.options.validation import Error, did_you_mean, plain_text, shown

T = TypeVar("T")

GROUP = "nanovllm.plugins"
_CLASS = re.compile(r"\w+(\.\w+)*:\w+")


def is_plugin(value: str | None) -> bool:
    """Whether a checked option names a class: "module:Class"."""
    return value is not None and ":" in value


def installed(kind: str) -> dict[str, str]:
    """Return the installed plugins of a kind: "module:Class" by name.

    Raises:
        ConfigError: two packages have one of the same name.
    """
    found: dict[str, str] = {}
    for entry in entry_points(group=GROUP):
        name = entry.name.removeprefix(f"{kind}.")
        if name == entry.name:  # of another kind
            continue
        if found.setdefault(name, entry.value) != entry.value:
            raise ConfigError(
                f"two installed packages have an entry point {entry.name} of {GROUP}, "
                f"{found[name]} and {entry.value}: remove one, or name the class"
            )
    return found


def check_plugin(
    error: Error, name: str, value: Any, kind: str, known: Collection[str] = ()
) -> str:
    """Return `value` if it is one of `known` or "module:Class"; for the name of an installed plugin
    return its "module:Class". `load_class` finds the class.

    Raises:
        error: it is none of them.
    """
    if isinstance(value, str):
        if value in known or _CLASS.fullmatch(value):
            return plain_text(value)
        found = installed(kind).get(value)
        if found is not None and _CLASS.fullmatch(found):
            return found
    names = [f'"{word}"' for word in (*known, *installed(kind))]
    meant = did_you_mean(shown(value).strip("'"), (*known, *installed(kind)))
    hint = meant * meant.startswith("; did")
    if inspect.isclass(value):
        hint = f': give its name, "{value.__module__}:{value.__qualname__}"'
    rule = f'{", ".join(names)} or a class of yours as "module:Class"'.removeprefix(" or ")
    raise error(f"{name} must be {rule}, got {shown(value)}{hint}")


def check_plugins(error: Error, name: str, value: Any, kind: str) -> tuple[str, ...]:
    """Return `value`, a list of plugins, or one, each as `check_plugin` does."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple):
        raise error(f'{name} must be a list of classes as "module:Class", got {shown(value)}')
    return tuple(check_plugin(error, name, item, kind) for item in values)


def load_class(
    error: Error, name: str, value: str, base: type[T], arguments: tuple[str, ...] = ()
) -> type[T]:
    """Return the class that "module:Class" names, which must be derived from `base`.

    Args:
        arguments: names of those that it is called with.

    Raises:
        error: the module cannot be imported, or it has no such class.
    """
    module_name, _, class_name = value.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as reason:
        message = (
            f'{name} is "{value}", but {module_name} cannot be imported: '
            f"{type(reason).__name__}: {reason}"
        )
        # Not a module that it imports itself, which is not found:
        if isinstance(reason, ModuleNotFoundError) and f"{module_name}.".startswith(
            f"{reason.name}."
        ):
            message += "; PYTHONPATH must have the folder that it is in"
        raise error(message) from reason
    found = vars(module).get(class_name)
    rule = f"a class derived from {base.__module__}.{base.__qualname__}"
    if found is None:
        classes = [key for key, item in vars(module).items() if isinstance(item, type)]
        hint = did_you_mean(class_name, classes)
        raise error(f'{name} is "{value}", but {module_name} has no {class_name}{hint}')
    if not isinstance(found, type) or not issubclass(found, base):
        raise error(f'{name} must name {rule}, but "{value}" is {shown(found)}')
    if inspect.isabstract(found):
        methods = sorted(found.__abstractmethods__)  # type: ignore[attr-defined]
        missing = ", ".join(_call_of(base, method) for method in methods)
        plural = "s" * (len(methods) > 1)
        raise error(f'{name} must name {rule}, but "{value}" lacks the method{plural} {missing}')
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as reason:
        raise error(
            f"{name}: {class_name} is called as {class_name}({', '.join(arguments)}), but its "
            f"__init__ takes other arguments: {reason}"
        ) from reason
    return found


def make_instance(error: Error, name: str, found: Callable[..., T], *arguments: Any) -> T:
    """Return what the class that `load_class` found makes of `arguments`.

    Raises:
        error: it raises an exception that is not ours.
    """
    try:
        return found(*arguments)
    except NanoVLLMError:
        raise
    except Exception as reason:
        raise error(f"{name}: __init__() raised {type(reason).__name__}: {reason}") from reason


def _call_of(base: type, method: str) -> str:
    """Return a method as it is called, such as "order(seq)"."""
    parameters = list(inspect.signature(inspect.getattr_static(base, method)).parameters)
    return f"{method}({', '.join(parameters[1:])})"
