"""The plugin in a user's file: a policy or an order of eviction, and how an engine gets it."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.errors import ConfigError
from nanovllm.kv.eviction import EvictionOrder
from nanovllm.options.plugins import load_class
from nanovllm.options.validation import listed, shown
from nanovllm.scheduler.plugins import user_order, user_policy
from nanovllm.scheduler.policy import Policy

POLICY, EVICTION = "scheduling_policy", "eviction_policy"
"""The engine options that name a plugin, which are its kind here."""
_BASES: dict[str, tuple[type, tuple[str, ...]]] = {
    POLICY: (Policy, ()),
    EVICTION: (EvictionOrder, ("num_pages",)),
}


class Plugin(NamedTuple):
    """A class in a file."""

    kind: str
    """POLICY or EVICTION."""
    made_by: type
    value: str
    """What the option takes, "module:Class"."""
    folder: Path
    """Where Python finds the module."""

    @property
    def options(self) -> dict[str, Any]:
        """The engine option that names it."""
        return {self.kind: self.value}

    @property
    def for_scheduler(self) -> dict[str, Any]:
        """`make_policy` or `make_order` of `nanovllm.testing.fake_engine.Engine`."""
        name = f'{self.kind}="{self.value}"'
        if self.kind == POLICY:
            return {"make_policy": partial(user_policy, name, self.made_by)}
        return {"make_order": partial(user_order, name, self.made_by)}

    @contextlib.contextmanager
    def importable(self) -> Iterator[None]:
        """Let this process, and those that it starts, find the module."""
        with _found(self.folder):
            yield


def find_plugin(file: str, class_name: str | None = None) -> Plugin:
    """Return the plugin that a file defines.

    Args:
        class_name: None if the file has one class only that is a plugin.

    Raises:
        ConfigError: there is no such file or class, or it cannot be imported or made.
    """
    path = Path(file).absolute()
    if not path.is_file():
        raise ConfigError(f"FILE {shown(file)} is not a file: give a Python file with a plugin")
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigError(
            f"FILE {shown(file)} cannot be imported: its name must be that of a Python module, "
            "such as shortest_first.py"
        )
    module, folder = path.stem, path.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():  # it is in a package
        module, folder = f"{folder.name}.{module}", folder.parent
    with _found(folder):
        found = _classes(path, module)
        chosen = _choose(file, found, class_name)
        kind = next(kind for kind, (base, _) in _BASES.items() if issubclass(found[chosen], base))
        base, arguments = _BASES[kind]
        value = f"{module}:{chosen}"
        load_class(kind, value, base, arguments)
    return Plugin(kind, found[chosen], value, folder)


def _classes(path: Path, module_name: str) -> dict[str, type]:
    """Return the plugins that a file itself defines, by name."""
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as reason:
        raise ConfigError(
            f"FILE {path} cannot be imported: {type(reason).__name__}: {reason}"
        ) from reason
    where = getattr(module, "__file__", None)
    if where is None or not Path(where).samefile(path):
        raise ConfigError(
            f"FILE {path} is hidden by another module {module_name}, "
            f"{where or 'of Python itself'}: rename it"
        )
    bases = tuple(base for base, _ in _BASES.values())
    return {
        name: item
        for name, item in vars(module).items()
        if isinstance(item, type) and issubclass(item, bases) and item.__module__ == module_name
    }


def _choose(file: str, found: dict[str, type], class_name: str | None) -> str:
    public = [name for name in found if not name.startswith("_")]
    if class_name is not None:
        if class_name not in found:
            known = listed(public, len(public)) if public else "none"
            raise ConfigError(
                f"class {shown(class_name)} is no plugin in {file}; those are: {known}"
            )
        return class_name
    if len(public) == 1:
        return public[0]
    bases = " or ".join(f"{base.__module__}.{base.__qualname__}" for base, _ in _BASES.values())
    if not public:
        raise ConfigError(f"{file} has no plugin: a class derived from {bases}")
    raise ConfigError(f"{file} has {len(public)} plugins: name one, class {' or '.join(public)}")


@contextlib.contextmanager
def _found(folder: Path) -> Iterator[None]:
    """Let Python find modules in a folder, here and in processes that begin meanwhile."""
    before = os.environ.get("PYTHONPATH")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
