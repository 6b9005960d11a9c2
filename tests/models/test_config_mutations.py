"""Broken config.json files of every family: a short error that names the field, or a model.

Each mutation changes, deletes or retypes one to three fields, also nested ones. The seeds are
fixed, so that a failure comes again.
"""

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanovllm.errors import CheckpointError
from nanovllm.models.decoder import Family
from nanovllm.models.registry import MODULES, model_class, read_config
from tests.models.family_configs import CONFIGS, config_of

NUM_MUTATIONS = 36
"""Of each architecture: more than 2,000 in all."""
MAX_MESSAGE = 400
WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 5, 7, 2**31, 10**30, 10**400),
    *(0.0, -0.5, 0.5, 1.0, 1e-30, 1e30, float("nan"), float("inf"), -float("inf")),
    *("", "1", "silu", "x" * 10**5, [], [1], [None], ["full_attention"], {}, {"a": 1}),
)
LISTS: tuple[Any, ...] = (
    *(["full_attention"] * 6, ["sliding_attention"] * 6, ["full_attention"] * 5),
    *(["linear_attention", "full_attention"] * 3, ["conv", "full_attention"] * 3, ["conv"] * 6),
    *(["sliding_attention"] * 7, ["chunked_attention"] * 6, [["full_attention"]] * 6, [{}] * 6),
    *([0] * 6, [1, 0] * 3, [True] * 6, ["x"] * 6, [1.5] * 6, [None] * 6, [-1], "LLG", [[]]),
)
ROPES: tuple[Any, ...] = (
    *({"rope_type": kind} for kind in ("default", "linear", "yarn", "llama3", "longrope", "alpha")),
    *({"type": kind, "factor": 2.0} for kind in ("dynamic", "su", "proportional", "factors", 3)),
    {"rope_type": "yarn", "factor": 4.0, "type": "linear"},
    {"rope_type": "proportional", "partial_rotary_factor": 0.3},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": 3},
    {"full_attention": None, "sliding_attention": {"rope_theta": 0}},
    {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
)
MORE = {
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ROPES),
    **dict.fromkeys(("layer_types", "no_rope_layers", "mlp_only_layers", "full_attn_idxs"), LISTS),
    **dict.fromkeys(("layer_rope_theta", "sliding_window_pattern"), LISTS),
    "per_layer_config": ({"2": {"head_dim": 8}}, {"2": 3}, {"5": {"head_dim": "x"}}, {2: {}}),
    "hidden_act": ("gelu", "gelu_pytorch_tanh", "swiglu"),
    "text_config": (None, {}, [], "x", 3),
    "architectures": (None, [], [["x"]], ["LlamaForCausalLM"] * 2, ["NoSuchForCausalLM"]),
    "dtype": ("float32", "float64", "int8"),
    "quantization_config": ({"quant_method": "fp8"}, {"quant_method": 3}),
}
"""Fields that are not in every config, and values that only some fields have."""


def mutated(architecture: str, number: int) -> dict[str, Any]:
    """Return a broken config."""
    chooser = random.Random(f"{architecture} {number}")
    config = copy.deepcopy(config_of(architecture))
    for _ in range(chooser.choice((1, 1, 2, 3))):
        owner = config
        if isinstance(config.get("text_config"), dict) and chooser.random() < 0.9:
            owner = config["text_config"]
        inner = [value for value in owner.values() if isinstance(value, dict) and value]
        if inner and chooser.random() < 0.3:
            owner = chooser.choice(inner)
        key = chooser.choice([*owner, *owner, *MORE])
        values = MORE.get(key, WRONG) if chooser.random() < 0.5 else WRONG
        if chooser.random() < 0.15:
            owner.pop(key, None)
        else:
            owner[key] = copy.deepcopy(chooser.choice(values))
    return config


@pytest.mark.parametrize("architecture", MODULES)
def test_a_broken_config_is_refused_by_name_or_gives_a_model(architecture: str) -> None:
    for number in range(NUM_MUTATIONS):
        config = mutated(architecture, number)
        try:
            found = read_config(config)
            sizes = (found.vocab_size, found.hidden_size, found.intermediate_size, found.head_dim)
            if max(sizes) > 2**16 or found.num_layers > 8:
                continue
            with torch.device("meta"):
                model = model_class(found)(found, 4)
            assert isinstance(model, Family)
            for rope, head_dim in model.rotary:
                frequencies, scale = (rope or found.rope).inverse_frequencies(head_dim, 4096)
                assert frequencies.isfinite().all(), number
                assert math.isfinite(scale), number
        except CheckpointError as error:
            message = str(error)
            assert len(message) < MAX_MESSAGE, number
            assert names_a_field(message), (number, message)


def keys(value: Any) -> Iterator[str]:
    """Yield the names of fields at every depth."""
    if isinstance(value, dict):
        yield from map(str, value)
        for inner in value.values():
            yield from keys(inner)


KNOWN = {*keys(CONFIGS), *MORE, *(key for ropes in ROPES for key in ropes)}


def names_a_field(message: str) -> bool:
    """Whether a field's name, or what the rotary settings are called, stands in the message."""
    return any(name in message for name in KNOWN | {"architecture", "rope settings", "alpha"})
