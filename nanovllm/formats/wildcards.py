"""Lists of modules in which "*" stands for any characters. Linear time, whatever a list says."""

from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.formats.names import REGEX, Names, read_names

_MAX_WILDCARDS = 512
_MAX_LENGTH = 1000


class ModuleList:
    """Modules of a checkpoint; with a module, all that are in it.

    An entry is a dotted name, or consecutive parts of one, or a pattern with "*" for a whole name.

    Args:
        settings: have the list.
        key: its name in them.

    Raises:
        CheckpointError: it is no list of strings, or has too many or too long ones.
        UnsupportedModelError: an entry is a regular expression that is not read.
    """

    def __init__(self, settings: dict[str, Any], key: str) -> None:
        names, field = read_names(settings, key), f"quantization_config: {key}"
        patterns = {name for name in names if "*" in name and not name.startswith(REGEX)}
        if len(patterns) > _MAX_WILDCARDS or any(len(name) > _MAX_LENGTH for name in patterns):
            raise CheckpointError(
                f"{field} has {len(patterns)} names with *; at most {_MAX_WILDCARDS} of "
                f"{_MAX_LENGTH} characters are read"
            )
        self._patterns = [pattern.split("*") for pattern in sorted(patterns)]
        rest = (name for name in names if name not in patterns)
        self._names = Names(
            (name if name.startswith(REGEX) else plain(name) for name in rest), field
        )

    def covers(self, name: str) -> bool:
        """Return whether the module at dotted path `name` is in the list, or in one that is."""
        name = plain(name)
        if self._names.have_part(name) or self._names.match(name):
            return True
        parts = name.split(".")
        paths = (path for end in range(len(parts)) for path in _spellings(parts[: end + 1]))
        return any(_matches(path, pattern) for path in paths for pattern in self._patterns)


def plain(name: str) -> str:
    """Return a module's name as models that take text alone have it."""
    return ".".join(part for part in name.split(".") if part != "language_model")


def _spellings(parts: list[str]) -> list[str]:
    """Return the names that checkpoints have for a module, which is in the text model."""
    name = ".".join(parts)
    if parts[0] != "model":
        return [name, f"language_model.{name}"]
    return [name, ".".join(["model", "language_model", *parts[1:]]), f"language_model.{name}"]


def _matches(name: str, pieces: list[str]) -> bool:
    """Return whether `name` consists of `pieces` with any characters between them."""
    first, *between, last = pieces
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for piece in between:
        found = name.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True
