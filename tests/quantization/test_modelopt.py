"""Which linears ModelOpt stores how: lists with wildcards, and precisions by linear."""

import time

import pytest

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.features.quantization.modelopt import ModelOpt
from nanovllm.features.quantization.settings import ModuleList, kv_scheme
from nanovllm.features.quantization.weight_formats import checkpoint_format

LINEAR = "model.layers.1.mlp.up_proj"
NESTED = "model.language_model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("entry", "covers"),
    [
        (LINEAR, True),
        ("model.layers.1", True),
        ("layers.1.mlp", True),
        ("up_proj", True),
        ("re:.*up_proj", True),
        ("*", True),
        ("*up_proj", True),
        ("*.mlp.*", True),
        ("model.layers.1*", True),
        ("model.layers.1.mlp*", True),
        ("model.language_model.layers.1.mlp*", True),
        ("language_model.model.layers.1.mlp*", True),
        ("model.language_model.layers.1.mlp", True),
        ("*layers*mlp*up*", True),
        ("model.layers.10*", False),
        ("layers.1.mlp*", False),
        ("model.layers.1.mlp.up", False),
        ("up_proj.weight", False),
        ("*up_pro", False),
        ("*up*layers*", False),
        ("*up_proj*up_proj", False),
        ("model.visual*", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("name", [LINEAR, NESTED])
def test_lists(entry, covers, name):
    assert ModuleList({"ignore": ["lm_head", entry]}, "ignore").contains(name) is covers


def test_a_hostile_list_takes_no_exponential_time():
    modules = ModuleList({"ignore": ["*a" * 400 + "b"] * 512}, "ignore")
    start = time.process_time()
    assert not modules.contains("a" * 1000)
    assert time.process_time() - start < 1


def test_precisions_by_linear():
    layers = {"model.layers.1.mlp": {"quant_algo": "FP8"}, LINEAR: {"quant_algo": "nvfp4"}}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    found = ModelOpt({**settings, "exclude_modules": ["*o_proj"]})
    assert found.algorithm(NESTED) == "NVFP4"
    assert found.algorithm("model.layers.1.mlp.gate_proj") == "FP8"
    assert found.algorithm("model.layers.2.mlp.gate_proj") is None
    with pytest.raises(
        UnsupportedModelError, match=r"gate_proj, .*up_proj are computed as one.* FP8 and NVFP4"
    ):
        found.quantized(None, ["model.layers.1.mlp.gate_proj", LINEAR])


def test_the_older_file():
    details = {"quant_algo": "FP8", "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    config = {"quant_method": "modelopt", "quantization": details}
    found = checkpoint_format(config)
    assert (found.algorithm(LINEAR), found.algorithm("lm_head")) == ("FP8", None)
    assert kv_scheme(config) == "FP8"


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, None),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": None}, None),
        ({"kv_cache_scheme": "FP8"}, "FP8"),
        ({"kv_cache_quant_algo": "nvfp4"}, "NVFP4"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "FP8"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "INT8"),
    ],
)
def test_keys_and_values(settings, found):
    assert kv_scheme(settings) == found


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_scheme": [8]},
        {"kv_cache_scheme": {"type": "complex"}},
        {"kv_cache_scheme": {"num_bits": True}},
        {"kv_cache_quant_algo": "FP4" * 1000},
    ],
)
def test_schemes_that_nobody_writes(settings):
    with pytest.raises(CheckpointError, match="kv_cache") as raised:
        kv_scheme(settings)
    assert len(str(raised.value)) < 300
