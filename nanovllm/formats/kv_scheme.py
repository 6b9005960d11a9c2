"""What a checkpoint says of keys, values and inputs of linears in few bits.

The engine keeps them in the model's dtype or as the user asks, which `kv_cache_dtype` says: more
exact than a checkpoint needs. The scales in its files are for smaller caches, and are not read.
Knows no tensors.
"""

from typing import Any

from nanovllm.formats.settings import WHERE, read_number_type, read_object, unsupported

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
    if isinstance(found, str):
        if found.upper() not in _ALGORITHMS:
            raise unsupported(key, found, f"{', '.join(_ALGORITHMS)} and null")
        return found.upper()
    where = f"{WHERE}: {key}"
    bits, kind = read_number_type(read_object(found, where), where)
    return f"{'FP' if kind == 'float' else 'INT'}{bits}"
