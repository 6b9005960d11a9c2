"""Settings of `quantization_config` that several formats have, and their checks.

Knows no format and no tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import listed, shown

WHERE = "quantization_config"
MAX_GROUP = 2**20
_MAX_BITS = 16
_MAX_LISTED = 4
"""Linears that one error names: experts have thousands."""

Form = TypeVar("Form")


def check_supported(config: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedModelError unless each setting has one of its values in `supported`."""
    for key, values in supported.items():
        if (value := config.get(key)) not in values:
            raise unsupported(key, value, ", ".join(map(repr, values)))


def unsupported(key: str, value: Any, supported: str, where: str = WHERE) -> UnsupportedModelError:
    """Return the error for a setting whose value is not implemented."""
    return UnsupportedModelError(
        f"{where}: {key} {shown(value)} is not supported (only {supported})"
    )


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
        CheckpointError: it is no such number.
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
