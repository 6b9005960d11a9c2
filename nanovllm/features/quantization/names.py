"""Which linears a checkpoint's configuration means: lists of names, of regular expressions, and of
patterns in which "*" stands for any characters.
"""

import fnmatch
from collections.abc import Iterable, Iterator
from typing import Any

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import shown
from nanovllm.utils.safe_regex import SafeRegex

REGEX = "re:"
"""What an entry that is a regular expression begins with."""
_MAX_ENTRIES = 4096
_MAX_REGEXES = 64
_MAX_WILDCARDS = 512
"""Each is tried on each linear."""
_MAX_LENGTH = 1000
"""Of a name with wildcards."""


def read_names(config: dict[str, Any], key: str, where: str = "quantization_config") -> list[str]:
    """Return the list of names `config[key]`; an empty one if there is none.

    Raises:
        CheckpointError: it is not a list of names, or has too many.
    """
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: {key} must be a list of names, is {shown(names)}")
    if len(names) > _MAX_ENTRIES:
        raise CheckpointError(
            f"{where}: {key} has {len(names)} names; at most {_MAX_ENTRIES} are read"
        )
    return names


def read_regex(pattern: str, field: str) -> SafeRegex:
    """Return the regular expression `pattern` of `field`.

    Raises:
        UnsupportedModelError: it is not one that `SafeRegex` reads.
    """
    try:
        return SafeRegex(pattern)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{field}: regex {shown(pattern)} is not supported: {error}"
        ) from error


def spellings(name: str) -> tuple[str, ...]:
    """Return a dotted path as checkpoints write it: those that also take pictures add a word."""
    nested = f"{name}.".replace("model.", "model.language_model.", 1)
    return name, nested[:-1], f"language_model.{name}"


class Names:
    """A list of entries: names, and "re:" with a regular expression that a name begins with.

    Args:
        entries: what `read_names` returned.
        field: for errors.

    Raises:
        UnsupportedModelError: a regular expression is not supported, or there are too many.
    """

    def __init__(self, entries: Iterable[str], field: str) -> None:
        entries = list(entries)
        self._plain = frozenset(entry for entry in entries if not entry.startswith(REGEX))
        regexes = [entry.removeprefix(REGEX) for entry in entries if entry.startswith(REGEX)]
        if len(regexes) > _MAX_REGEXES:
            raise UnsupportedModelError(
                f"{field} has {len(regexes)} regular expressions; at most {_MAX_REGEXES} are read"
            )
        self._regexes = [read_regex(regex, field) for regex in regexes]

    def contains(self, name: str) -> bool:
        """Return whether an entry is `name` itself."""
        return any(spelt in self._plain for spelt in spellings(name))

    def contains_part(self, name: str) -> bool:
        """Return whether an entry is `name`, or some consecutive parts of that dotted path."""
        return any(map(self._has_part, spellings(name)))

    def contains_text_of(self, name: str) -> bool:
        """Return whether an entry is a part of the text `name`."""
        return any(entry in spelt for spelt in spellings(name) for entry in self._plain)

    def matches(self, name: str) -> bool:
        """Return whether a regular expression matches the beginning of `name`."""
        return any(regex.match(spelt) for spelt in spellings(name) for regex in self._regexes)

    def _has_part(self, name: str) -> bool:
        parts = name.split(".")
        return any(
            ".".join(parts[first:last]) in self._plain
            for first in range(len(parts))
            for last in range(first + 1, len(parts) + 1)
        )


class ModuleList:
    """Modules of a checkpoint; with a module, all that are in it.

    An entry is a dotted name, or consecutive parts of one, or a pattern with "*" for a whole name,
    which `fnmatch` matches without backtracking. `settings` have the list under `key`.

    Raises:
        CheckpointError: it is not a list of strings, or has too many or too long ones.
        UnsupportedModelError: an entry is a regular expression that is not read.
    """

    def __init__(self, settings: dict[str, Any], key: str) -> None:
        names = read_names(settings, key)
        field = f"quantization_config: {key}"
        patterns = {name for name in names if "*" in name and not name.startswith(REGEX)}
        if len(patterns) > _MAX_WILDCARDS or any(len(name) > _MAX_LENGTH for name in patterns):
            raise CheckpointError(
                f"{field} has {len(patterns)} names with *; at most {_MAX_WILDCARDS} of "
                f"{_MAX_LENGTH} characters are read"
            )
        self._patterns = sorted(patterns)
        rest = (name for name in names if name not in patterns)
        self._names = Names(
            (name if name.startswith(REGEX) else plain(name) for name in rest), field
        )

    def contains(self, name: str) -> bool:
        """Return whether the module at dotted path `name` is in the list, or in one that is."""
        name = plain(name)
        if self._names.contains_part(name) or self._names.matches(name):
            return True
        paths = (path for module in enclosing(name) for path in spellings(module))
        return any(
            fnmatch.fnmatchcase(path, pattern) for path in paths for pattern in self._patterns
        )


def plain(name: str) -> str:
    """Return a module's name as models that take text alone have it."""
    return ".".join(part for part in name.split(".") if part != "language_model")


def enclosing(name: str) -> Iterator[str]:
    """Yield the dotted path `name` and those of the modules that it is in, from the inside."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))
