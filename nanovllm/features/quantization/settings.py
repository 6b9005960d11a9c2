"""Settings of `quantization_config` that several formats have: their checks, and which linears they
mean.

The scheme of keys and values is one of them. The engine keeps those in the model's dtype or as
`kv_cache_dtype` asks, which is at least as exact as a checkpoint needs, so the scales in its files
are not read.
"""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options import validation
from nanovllm.options.validation import listed, shown
from nanovllm.utils.safe_regex import SafeRegex

WHERE = "quantization_config"
MAX_GROUP = 2**20
_MAX_BITS = 16
_MAX_LISTED = 4
"""Linears that one error names: experts have thousands."""
UNREAD_SCALES = frozenset(
    {".activation_scale", ".output_scale"}
    | {
        f".{part}_{kind}"
        for part in ("q", "k", "v", "input")
        for kind in ("scale", "global_scale", "zero_point")
    }
)
"""Ends of the names of tensors that a checkpoint may have for keys, values and inputs of linears:
the scales of a calibration. Here the scales of inputs are computed at run time."""
_ALGORITHMS = ("FP8", "INT8", "NVFP4")


Form = TypeVar("Form")


def check_supported(config: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedModelError unless each setting has one of its values in `supported`."""
    for key, values in supported.items():
        if (value := config.get(key)) not in values:
            raise unsupported(key, value, ", ".join(map(repr, values)))


def unsupported(key: str, value: Any, supported: str, where: str = WHERE) -> UnsupportedModelError:
    """Return the error for a setting whose value is not implemented."""
    return validation.unsupported(f"{where}: {key}", value, supported)


def read_object(value: Any, where: str, entries: int | None = None) -> dict[str, Any]:
    """Return `value` if it is a JSON object, with at most so many `entries`.

    Raises:
        CheckpointError: it is not.
    """
    if isinstance(value, dict) and (entries is None or len(value) <= entries):
        return value
    most = "" if entries is None else f" of at most {entries} entries"
    raise CheckpointError(f"{where} must be an object{most}, is {shown(value)}")


def read_group_size(value: Any, where: str = WHERE) -> int | None:
    """Return how many inputs share a scale; None: the whole row does, which files write as -1.

    Raises:
        CheckpointError: it is not such a number.
    """
    if type(value) is not int or value == 0 or not -1 <= value <= MAX_GROUP:
        raise CheckpointError(
            f"{where}: group_size must be from 1 to {MAX_GROUP}, or -1, is {shown(value)}"
        )
    return None if value == -1 else value


def read_number_type(settings: Mapping[str, Any], where: str) -> tuple[int, str]:
    """Return `num_bits`, from 1 to 16, and `type`, "int" or "float".

    Raises:
        CheckpointError: one has another value.
    """
    bits = settings.get("num_bits", 8)
    kind = settings.get("type", "int")
    if type(bits) is not int or not 1 <= bits <= _MAX_BITS:
        raise CheckpointError(f"{where}: num_bits must be from 1 to {_MAX_BITS}, is {shown(bits)}")
    if kind not in ("int", "float"):
        raise CheckpointError(f'{where}: type must be "int" or "float", is {shown(kind)}')
    return bits, kind


def one_form(names: list[str], forms: Sequence[Form | None], settings: str) -> Form | None:
    """Return the form that linears have which are computed as one; None: they are plain numbers.

    Args:
        forms: of each of `names`.
        settings: which say it, for the error.

    Raises:
        UnsupportedModelError: they have several.
    """
    if any(form != forms[0] for form in forms):
        found = " and ".join(dict.fromkeys(str(form or "plain numbers") for form in forms))
        raise UnsupportedModelError(
            f"{listed(names, _MAX_LISTED)} are computed as one, so all must be stored in one way, "
            f"not as {found}: see {settings}"
        )
    return forms[0]


def kv_scheme(config: dict[str, Any]) -> str | None:
    """Return how a `quantization_config` has keys and values stored, in words; None: plainly.

    Raises:
        CheckpointError: a field has the wrong type or value.
        UnsupportedModelError: the scheme has no known name.
    """
    inner = config.get("quantization")  # as hf_quant_config.json has it
    for settings in (config, inner if isinstance(inner, dict) else {}):
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if (found := settings.get(key)) is not None:
                return _words(key, found)
    return None


def _words(key: str, found: Any) -> str:
    if isinstance(found, str):
        if found.upper() not in _ALGORITHMS:
            raise unsupported(key, found, f"{', '.join(_ALGORITHMS)} and null")
        return found.upper()
    where = f"{WHERE}: {key}"
    bits, kind = read_number_type(read_object(found, where), where)
    return f"{'FP' if kind == 'float' else 'INT'}{bits}"


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
