"""Fields that a config.json lacks, or that are null: the network that transformers' classes make of
it, or a refusal by name. `FAMILY_CASES=12 pytest tests/models/test_class_defaults.py` leaves out
all fields of all families, one by one.
"""

import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from nanovllm.errors import CheckpointError
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.class_defaults import PATH
from nanovllm.models.registry import MODULES, model_class, read_config
from tests.models.comparison import FEW
from tests.models.family_configs import config_of
from tests.models.test_config_fields import MODEL_TYPES, base_config
from tools.class_defaults import classes_of, is_arithmetic, table

ABSENT = "absent"
CLASSES = classes_of()
OBJECTS = ("rope_parameters", "rope_scaling", "text_config")
MEANT = {
    ("Glm4MoeForCausalLM", "partial_rotary_factor=None"): "lost where transformers writes it",
    ("Mistral3ForConditionalGeneration", "tie_word_embeddings=absent"): "there the file decides",
}
"""What differs, and why that is right."""
COMPARED = (bool, int, float, str, tuple, type(None))
"""The types of what a module keeps of its settings."""


def test_the_table_is_what_transformers_says() -> None:
    assert table() == PATH.read_text("utf-8"), "run `python -m tools.class_defaults`"


def whole_config(architecture: str) -> dict[str, Any]:
    """Return the config.json of a small model with all fields, as transformers reads it, too."""
    if architecture in MODEL_TYPES:
        return base_config(architecture)
    kind = CLASSES[architecture].model_type
    return {**config_of(architecture), "model_type": kind}


def changes(architecture: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield config.json files that lack a field, or where it is null or {}, and what is changed."""
    whole = whole_config(architecture)
    nested = "text_config" in whole
    for path in [(), *inner_objects(whole)]:
        names = set(inner(whole, path))
        if path == (("text_config",) if nested else ()):
            text = CLASSES[architecture].from_dict(copy.deepcopy(whole)).get_text_config()
            names |= {field.name for field in dataclasses.fields(text)}
        if nested and not path:
            names = {"tie_word_embeddings", "text_config"}
        for name in sorted(filter(is_read, names)):
            for value in (ABSENT, None, *([{}] if name in OBJECTS else [])):
                changed = copy.deepcopy(whole)
                own = inner(changed, path)
                if own.pop(name, ABSENT) == ABSENT == value:
                    continue
                if value != ABSENT:
                    own[name] = value
                if (architecture, f"{name}={value}") not in MEANT:
                    yield f"{' '.join(path)} {name}={value}", changed


def is_read(name: str) -> bool:
    return is_arithmetic(name) or name == "text_config"


def inner_objects(fields: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the path of each object in a config.json, but for those of images and audio."""
    for name, value in fields.items():
        if isinstance(value, dict) and name not in ("vision_config", "audio_config", "id2label"):
            yield from ((name,), *((name, *rest) for rest in inner_objects(value)))


def inner(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        fields = fields[name]
    return fields


def network(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of all modules that are made of `config`."""
    found = read_config(config)
    with torch.device("meta"):
        model: Any = model_class(found)(found, 8)
    angles = {}
    for (rope, size), rotary in model.rotary.items():
        frequencies, scale = (rope or found.rope).inverse_frequencies(size, 8)
        angles[id(rotary)] = rope is None, (frequencies.tolist(), scale)
    tied = found.tie_word_embeddings
    modules: dict[str, Any] = {"": (found.max_position, found.vocab_size, tied)}
    queries = getattr(model, "_queries", None)
    modules["queries"] = vars(queries) if queries and queries._beta else None
    for name, module in model.named_modules(remove_duplicate=False):
        modules[f"{name} {type(module).__name__}"] = settings(module, angles)
    return modules


def settings(module: nn.Module, angles: dict[int, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in vars(module).items() if isinstance(value, COMPARED)}
    kept["weights"] = [(name, each.shape) for name, each in module.named_parameters(recurse=False)]
    kept["angles"] = angles.get(id(module)) if isinstance(module, RotaryEmbedding) else None
    return kept


def as_transformers_writes_it(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config.json with all fields that transformers makes of this one; None: it raises
    an error.
    """
    (architecture,) = config["architectures"]
    try:
        found: PreTrainedConfig = CLASSES[architecture].from_dict(copy.deepcopy(config))
        fields: dict[str, Any] = json.loads(json.dumps(found.to_dict(), default=str))
    except Exception:  # it raises whatever comes
        return None
    return fields | {"architectures": [architecture]}


def wrong(config: dict[str, Any], name: str) -> Any:
    """Return what differs between the network here and the one there; None: nothing."""
    try:
        ours = network(config)
    except CheckpointError as error:
        (architecture,) = config["architectures"]
        same = CLASSES[architecture].attribute_map.items()
        names = {name, *(key for key, own in same if own == name)}
        names |= {"head_dim"} if name.endswith("head_dim") else set()
        names |= {"rope_type"} if name == "type" else set()
        names |= {"linear_conv_kernel_dim"} if name == "short_conv_kernel_size" else set()
        named = any(each in str(error) for each in names)
        return None if named else f"does not name the field: {error}"
    expected = as_transformers_writes_it(config)
    if expected is None:
        return None
    theirs = network(expected)
    keys = {key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)}
    return {key: (ours.get(key), theirs.get(key)) for key in sorted(keys)[:2]} or None


@pytest.mark.parametrize("architecture", MODULES)
def test_a_config_without_fields_is_as_in_transformers(architecture: str) -> None:
    whole = CLASSES[architecture]
    layers = whole.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    fields = {layers: 8}
    if "text_config" in whole.sub_configs_defaults:
        fields = {"text_config": fields, "tie_word_embeddings": False}
    config = {"architectures": [architecture], "model_type": whole.model_type, **fields}
    assert not wrong(config, "")


@pytest.mark.parametrize("architecture", MODULES)
def test_a_field_left_out_is_as_in_transformers(architecture: str) -> None:
    every = list(changes(architecture))
    random.Random(architecture).shuffle(every)
    found = {
        change: wrong(config, change.split("=")[0].split()[-1])
        for change, config in (every[:5] if FEW else every)
    }
    assert not {change: what for change, what in found.items() if what}
