"""What transformers takes for fields that a config.json lacks: the defaults of its classes.

They are in class_defaults.json, which `python -m tools.class_defaults` writes: an import of the
classes would make each start a second longer.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError

PATH = Path(__file__).with_suffix(".json")


def class_defaults(
    architectures: Iterable[str], text_type: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of the fields that a config.json lacks, as in transformers.

    Args:
        architectures: the first of them that transformers has a class for counts.
        text_type: the model_type of a nested text_config, which comes first.
        given: the fields of the text model.

    Raises:
        CheckpointError: a field is null that must not be.
    """
    table = _table()
    types = table["architectures"]
    found = next((types[name] for name in architectures if name in types), None)
    kind = text_type if text_type in types.values() else found
    defaults = {}
    for key, value in table.get(kind or "", {}).items():
        name = key.rstrip("?")  # which marks fields that may be null
        if name == key and given.get(name, value) is None:
            raise CheckpointError(
                f"config.json: {name} is null: leave it out for {json.dumps(value)}, or give a "
                "value"
            )
        defaults[name] = value
    for names in table.get(f"{kind} synonyms", {}).items():
        if any(given.get(name) is not None for name in names):
            for name in names:
                defaults.pop(name, None)
    return defaults


def is_untied(architectures: Iterable[str]) -> bool:
    """Return whether tie_word_embeddings of the text_config does not count, and is false outside
    it.
    """
    return any(name in _table()["untied"] for name in architectures)


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return json.loads(PATH.read_text("utf-8"))
