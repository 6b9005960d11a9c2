"""Reading quantization_config of FP8 checkpoints. Unsupported settings are refused by name."""

import copy

import pytest

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.formats.fp8_config import Fp8Config

BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 64],
    "modules_to_not_convert": ["lm_head"],
}
"""The format of Qwen3's FP8 checkpoints."""
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
                "observer": "minmax",
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "dynamic": True,
            },
            "output_activations": None,
        }
    },
}


def test_supported_formats():
    assert Fp8Config.from_hf(None) is None
    blocks = Fp8Config("weight_scale_inv", 128, 64, ("lm_head",))
    assert Fp8Config.from_hf(BLOCKS) == blocks
    assert Fp8Config.from_hf(CHANNELS) == Fp8Config("weight_scale", 1, None, ("lm_head",))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation_scheme": "static"}, "activation_scheme 'static' .* 'dynamic'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
    ],
)
def test_unsupported_fp8_blocks(changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        Fp8Config.from_hf({**BLOCKS, **changes})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["format"], "int-quantized"),
        (["kv_cache_scheme"], {"num_bits": 8}),
        (["config_groups"], {}),
        (["config_groups", "group_0", "targets"], ["re:.*mlp.*"]),
        (["config_groups", "group_0", "weights", "strategy"], "tensor"),
        (["config_groups", "group_0", "weights", "type"], "int"),
        (["config_groups", "group_0", "weights", "num_bits"], 4),
        (["config_groups", "group_0", "input_activations", "dynamic"], False),
        (["config_groups", "group_0", "input_activations"], None),
    ],
)
def test_unsupported_compressed_tensors(path, value):
    config = copy.deepcopy(CHANNELS)
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UnsupportedModelError, match=f"{path[-1]}.* is not supported"):
        Fp8Config.from_hf(config)


@pytest.mark.parametrize("wrong", ["fp8", {**BLOCKS, "ignored_layers": "lm_head"}])
def test_wrong_types(wrong):
    with pytest.raises(CheckpointError, match="must be"):
        Fp8Config.from_hf(wrong)


def test_excludes():
    fp8 = Fp8Config("weight_scale", 1, None, ("lm_head", "layers.1", "re:.*down_proj$"))
    excluded = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    assert [fp8.excludes(name) for name in excluded] == [True] * 3
    assert not fp8.excludes("model.layers.11.mlp.up_proj")
