"""`nanovllm lab new`: writes a commented file with a minimal plugin, which works as it is."""

import importlib.util
import inspect
import keyword
from pathlib import Path

from nanovllm.errors import ConfigError
from nanovllm.options.validation import check_choice, shown, writing

TEMPLATES = Path(__file__).with_name("templates")
KINDS = (
    "policy",
    "eviction",
    "tier",
    "backend",
    "format",
    "proposer",
    "family",
    "rule",
    "runner",
)
"""The kinds of plugins. Each has a file in `templates`, with a class such as MyPolicy."""

_MAX_NAME = 100


def write_plugin(kind: str, name: str | None, folder: Path) -> Path:
    """Write a plugin of a kind into `folder`, and return the new file.

    Args:
        kind: one of `KINDS`.
        name: of the file and, with capitals, of the class: shortest_first.py has ShortestFirst.
            None is my_KIND.

    Raises:
        ConfigError: there is no such kind, or the name cannot be that of a new module.
    """
    kind = check_choice(ConfigError, "KIND", kind, KINDS)
    name = f"my_{kind}" if name is None else name
    path = folder / f"{name}.py"
    _check_name(name, path)
    text = (TEMPLATES / f"{kind}.py").read_text(encoding="utf-8")
    text = text.replace(_class_name(f"my_{kind}"), _class_name(name)).replace(f"my_{kind}", name)
    # Never over a file that is there.
    with writing("the file", path), path.open("x", encoding="utf-8") as file:
        file.write(text)
    return path


def summary(path: Path) -> str:
    """Return what the docstring of a new file says: what it does, and how to run it."""
    text = path.read_text(encoding="utf-8")
    return inspect.cleandoc(text.split('"""')[1])


def _check_name(name: str, path: Path) -> None:
    """Raise ConfigError unless a new module can have this name."""
    is_module = name.isidentifier() and not keyword.iskeyword(name) and name == name.lower()
    if not is_module or not name.strip("_") or len(name) > _MAX_NAME:
        raise ConfigError(
            f"NAME must be that of a Python module in lower case, such as shortest_first, got "
            f"{shown(name)}"
        )
    if path.exists():
        raise ConfigError(f"{path} is there already: give another NAME, or remove it")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"NAME {shown(name)} is that of a module that Python finds already, and one would hide "
            "the other: give another NAME"
        )


def _class_name(name: str) -> str:
    """Return the name of the class in a file: ShortestFirst for shortest_first."""
    return "".join(word.capitalize() for word in name.split("_"))
