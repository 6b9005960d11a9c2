"""Plugins: classes of the user's, which an option names as "module:Class" or by an entry point.

An entry point is in the group "nanovllm.plugins", has the name "kind.name" and the value
"module:Class". Installed ones are looked up by name and imported when they are asked for, and no
registry keeps what was found: each engine loads its own. What a plugin does wrong is an error that
names it: at the start a ConfigError, then a PluginError.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Collection
from functools import partial
from importlib.metadata import entry_points
from typing import Any, ParamSpec, TypeVar
from weakref import WeakMethod

from nanovllm.errors import ConfigError, NanoVLLMError, PluginError, refuses_memory
from nanovllm.options.validation import Error, did_you_mean, plain_text, shown

T = TypeVar("T")
P = ParamSpec("P")

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


def load_class(name: str, value: str, base: type[T], arguments: tuple[str, ...] = ()) -> type[T]:
    """Return the class that "module:Class" names, which must be derived from `base`.

    Args:
        arguments: names of those that it is called with.

    Raises:
        ConfigError: the module cannot be imported, or it has no such class.
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
        raise ConfigError(message) from reason
    found = vars(module).get(class_name)
    rule = f"a class derived from {base.__module__}.{base.__qualname__}"
    if found is None:
        classes = [key for key, item in vars(module).items() if isinstance(item, type)]
        hint = did_you_mean(class_name, classes)
        raise ConfigError(f'{name} is "{value}", but {module_name} has no {class_name}{hint}')
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigError(f'{name} must name {rule}, but "{value}" is {shown(found)}')
    if inspect.isabstract(found):
        methods = sorted(found.__abstractmethods__)  # type: ignore[attr-defined]
        missing = ", ".join(_call_of(base, method) for method in methods)
        plural = "s" * (len(methods) > 1)
        raise ConfigError(
            f'{name} must name {rule}, but "{value}" lacks the method{plural} {missing}'
        )
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as reason:
        raise ConfigError(
            f"{name}: {class_name} is called as {class_name}({', '.join(arguments)}), but its "
            f"__init__ takes other arguments: {reason}"
        ) from reason
    return found


def at_start(
    name: str | None, call: str, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs
) -> T:
    """Return what a plugin's function returns before there is an engine.

    Args:
        name: the option and the class, `scheduling_policy="module:Class"`. None: the function is
            ours, and its exceptions stay as they are.
        call: for the message, such as "__init__()".

    Raises:
        ConfigError: it raises an exception that is not ours.
    """
    try:
        return function(*args, **keywords)
    except NanoVLLMError:
        raise
    except (Exception, SystemExit) as error:
        if name is None or refuses_memory(error):
            raise
        raise ConfigError(f"{name}: {call} raised {type(error).__name__}: {error}") from error


def in_step(
    name: str, call: str, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs
) -> T:
    """Return what a plugin's function returns in an engine. The arguments are as for `at_start`.

    Raises:
        PluginError: it raises an exception, also one that refuses memory: what the engine keeps
            of a step is half changed.
    """
    try:
        return function(*args, **keywords)
    except PluginError:  # of another plugin, which this one called
        raise
    except (Exception, SystemExit) as error:
        raise PluginError.of(name, f"{call} raised {type(error).__name__}: {error}") from error


def in_worker(
    name: str, call: str, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs
) -> T:
    """Return what `in_step` does, for a plugin in a worker. Memory that the system refuses there
    fails the step and ends no engine, so an exception that says so stays as it is.
    """
    try:
        return function(*args, **keywords)
    except (Exception, SystemExit) as error:
        if isinstance(error, PluginError) or refuses_memory(error):
            raise
        raise PluginError.of(name, f"{call} raised {type(error).__name__}: {error}") from error


def guarded(plugin: T, seam: type, name: str, call: Callable[..., Any] = in_step) -> T:
    """Return `plugin`, with the methods of its seam in `call`, which names it in what they raise.

    Args:
        plugin: an object of the user's.
        seam: the class of ours that it is derived from.
        name: the option and the class, `scheduling_policy="module:Class"`.
        call: `in_step`, `in_worker` or `at_start`.
    """
    for method, found in vars(seam).items():
        if inspect.isfunction(found) and not method.startswith("_"):
            run = _weak(getattr(plugin, method))
            setattr(plugin, method, partial(call, name, f"{method}()", run))
    return plugin


def make_guarded(
    name: str, seam: type, found: Callable[..., T], *args: Any, call: Callable[..., Any] = in_step
) -> T:
    """Return a new object of the user's class `found`, `guarded`.

    Raises:
        ConfigError: its `__init__` raises an exception that is not ours.
    """
    return guarded(at_start(name, "__init__()", found, *args), seam, name, call)


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a method of an object that outlives it, without a reference to the object:
    in a cycle it would keep a network in memory.
    """
    found: Callable[[], Any] = WeakMethod(method) if inspect.ismethod(method) else lambda: method
    return lambda *args, **keywords: found()(*args, **keywords)


def _call_of(base: type, method: str) -> str:
    """Return a method as it is called, such as "order(seq)"."""
    parameters = list(inspect.signature(inspect.getattr_static(base, method)).parameters)
    return f"{method}({', '.join(parameters[1:])})"
