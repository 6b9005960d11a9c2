"""Reading quantization_config of FP8 checkpoints. Unsupported settings are refused by name."""

import pytest
import torch

from nanovllm.errors import CheckpointError
from nanovllm.features.quantization.quantized_fields import Field
from nanovllm.features.quantization.weight_formats import checkpoint_format

BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 64],
    "modules_to_not_convert": ["lm_head"],
}
"""The format of Qwen3's FP8 checkpoints."""


def test_supported_formats():
    assert checkpoint_format(None) is None
    found = checkpoint_format(BLOCKS)
    assert found.scale == Field("weight_scale_inv", torch.float32, 64, outputs=128)
    assert found.excludes("lm_head")
    assert not found.excludes("model.layers.0.mlp.up_proj")
    deepseek = {**BLOCKS, "scale_fmt": "ue8m0"}
    del deepseek["modules_to_not_convert"]
    assert checkpoint_format(deepseek).scale == found.scale
    plain = ["gate", "e_score_correction_bias", "lm_head"]
    minimax = {**BLOCKS, "fmt": "float8_e4m3fn", "modules_to_not_convert": plain}
    layer = "model.layers.0.block_sparse_moe"
    names = [f"{layer}.gate", f"{layer}.experts.0.w1", "lm_head"]
    assert list(map(checkpoint_format(minimax).excludes, names)) == [True, False, True]
    mistral = {**BLOCKS, "activation_scheme": "static", "weight_block_size": None}
    whole = Field("weight_scale_inv", torch.float32, None, outputs=None)
    assert checkpoint_format(mistral).scale == whole


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation_scheme": "local"}, "activation_scheme 'local' .* 'dynamic'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"weight_block_size": 128}, "weight_block_size 128"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"weight_block_size": [128, 10**30]}, "weight_block_size"),
        ({"weight_block_size": [128, 2**24]}, "weight_block_size"),
        ({"scale_fmt": "e5m2"}, "scale_fmt 'e5m2'"),
        ({"modules_to_not_convert": ["re:("]}, "regex .\\("),
    ],
)
def test_unsupported_fp8_blocks(changes, named):
    with pytest.raises(CheckpointError, match=named):
        checkpoint_format({**BLOCKS, **changes})


@pytest.mark.parametrize("wrong", ["fp8", {**BLOCKS, "ignored_layers": "lm_head"}])
def test_wrong_types(wrong):
    with pytest.raises(CheckpointError, match="must be"):
        checkpoint_format(wrong)


def test_excludes():
    entries = ["lm_head", "layers.1", "re:.*down_proj$"]
    fp8 = checkpoint_format({**BLOCKS, "modules_to_not_convert": entries})
    excluded = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    assert [fp8.excludes(name) for name in excluded] == [True] * 3
    assert not fp8.excludes("model.layers.11.mlp.up_proj")


@pytest.mark.parametrize(
    ("regex", "excluded"),
    [
        ("re:.*layers.2.mlp.*", True),
        ("re:.*mlp\\.down_proj$", True),
        ("re:^model.+down_proj", True),
        ("re:visual.*", False),
        ("re:.*lm_head", False),
    ],
)
def test_regexes_of_fp8_checkpoints(regex, excluded):
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": [regex]}
    fp8 = checkpoint_format({**settings, "weight_block_size": [128, 128]})
    assert fp8.excludes("model.layers.2.mlp.down_proj") is excluded


@pytest.mark.parametrize(
    "config", [["x"] * 10**5, {"quant_method": "x" * 10**6}], ids=["list", "name"]
)
def test_long_values_are_cut(config):
    with pytest.raises(CheckpointError) as raised:
        checkpoint_format(config)
    assert len(str(raised.value)) < 400
