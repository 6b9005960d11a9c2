"""Which linears a checkpoint's configuration means: lists of names and of regular expressions.

Knows no tensors and no format.
"""

from collections.abc import Iterable
from typing import Any

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import shown
from nanovllm.utils.safe_regex import SafeRegex

REGEX = "re:"
"""What an entry that is a regular expression begins with."""
_MAX_ENTRIES = 4096
_MAX_REGEXES = 64
"""Each is tried on each linear."""


def read_names(config: dict[str, Any], key: str, where: str = "quantization_config") -> list[str]:
    """Return the list of names `config[key]`; an empty one if there is none.

    Raises:
        CheckpointError: it is no list of names, or has too many.
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
    """Return `name` as checkpoints write it: those that also take pictures add a word.

    Args:
        name: the dotted path of a linear.
    """
    nested = name.replace("model.", "model.language_model.", 1)
    return name, nested, f"language_model.{name}"


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

    def have(self, name: str) -> bool:
        """Return whether an entry is `name` itself."""
        return any(spelt in self._plain for spelt in spellings(name))

    def have_part(self, name: str) -> bool:
        """Return whether an entry is `name`, or some consecutive parts of that dotted path."""
        return any(map(self._has_part, spellings(name)))

    def are_within(self, name: str) -> bool:
        """Return whether an entry is a part of the text `name`."""
        return any(entry in spelt for spelt in spellings(name) for entry in self._plain)

    def match(self, name: str) -> bool:
        """Return whether a regular expression matches the beginning of `name`."""
        return any(regex.match(spelt) for spelt in spellings(name) for regex in self._regexes)

    def _has_part(self, name: str) -> bool:
        parts = name.split(".")
        return any(
            ".".join(parts[first:last]) in self._plain
            for first in range(len(parts))
            for last in range(first + 1, len(parts) + 1)
        )
