"""Parses JSON that nobody vouches for: files of a checkpoint and headers of its weights."""

import json
from collections import Counter
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.options.validation import shown

MAX_JSON_BYTES = 4 * 2**20
"""Of one JSON text. Python's objects take up to 24 times as much memory. A header or an index of
1,000 tensors has 0.1 MB."""
_MAX_DEPTH = 32


def parse_object(text: bytes, source: str) -> dict[str, Any]:
    """Return the JSON object in `text`.

    NaN and Infinity are accepted, as Python's json does: check a number where it is used.

    Args:
        source: the file, for the error.

    Raises:
        CheckpointError: `text` is too long, not UTF-8, not valid JSON, nested too deep, no object,
            or names a field twice.
    """
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"{source} has more than {MAX_JSON_BYTES} bytes of JSON")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_fields)
    except RecursionError:
        raise CheckpointError(f"cannot read {source}: it is nested too deep") from None
    except ValueError as error:
        raise CheckpointError(f"cannot read {source}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} must hold a JSON object, not {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        children = [item.values() if isinstance(item, dict) else item for item in level]
        level = [child for items in children for child in items if isinstance(child, dict | list)]
    if level:
        raise CheckpointError(f"cannot read {source}: it is nested more than {_MAX_DEPTH} deep")
    return value


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"field {shown(name)} appears twice")
    return fields
