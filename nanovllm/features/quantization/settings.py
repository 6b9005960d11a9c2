"""Settings of `quantization_config` that several formats have, and their checks.

The scheme of keys and values is one of them. The engine keeps those in the model's dtype or as
`kv_cache_dtype` asks, which is at least as exact as a checkpoint needs, so the scales in its files
are not read.
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
UNREAD_SCALES = frozenset(
    {
        ".q_scale",
        ".k_scale",
        ".v_scale",
        ".q_zero_point",
        ".k_zero_point",
        ".v_zero_point",
        ".q_global_scale",
        ".k_global_scale",
        ".v_global_scale",
        ".input_scale",
        ".input_global_scale",
        ".input_zero_point",
        ".activation_scale",
        ".output_scale",
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
