"""What a checkpoint says of keys, values and inputs of linears in few bits.

The engine keeps them in the model's dtype or as the user asks, which `kv_cache_dtype` says: more
exact than a checkpoint needs. The scales in its files are for smaller caches, and are not read.
Knows no tensors.
"""

from typing import Any

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import shown

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
the scales of a calibration. Here the scales of inputs are found while it runs."""
_ALGORITHMS = ("FP8", "INT8", "NVFP4")


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
    where = f"quantization_config: {key}"
    if isinstance(found, str):
        if found.upper() not in _ALGORITHMS:
            raise UnsupportedModelError(
                f"{where} {shown(found)} is not supported (only {', '.join(_ALGORITHMS)} and null)"
            )
        return found.upper()
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} must be an object or a name, is {shown(found)}")
    bits, kind = found.get("num_bits", 8), found.get("type", "int")
    if type(bits) is not int or not 1 <= bits <= 16:
        raise CheckpointError(f"{where}: num_bits must be from 1 to 16, is {shown(bits)}")
    if kind not in ("int", "float"):
        raise CheckpointError(f'{where}: type must be "int" or "float", is {shown(kind)}')
    return f"{'FP' if kind == 'float' else 'INT'}{bits}"
