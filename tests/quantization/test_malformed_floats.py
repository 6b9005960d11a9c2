"""Malformed checkpoints in FP8 and FP4: one error for each, which names what is wrong."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.loading.hub import open_checkpoint
from nanovllm.options.config import Config
from nanovllm.parallel.rank_setup import check_network
from tests.checkpoints import copy_checkpoint, read_json, write_json
from tests.models.comparison import Steps
from tests.quantization.float_checkpoints import make_compressed, make_modelopt, scheme_of

LINEAR = "model.layers.1.self_attn.k_proj"
FP8_E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def sound(random_model, tmp_path_factory):
    """Paths of sound checkpoints, by format."""
    path = tmp_path_factory.mktemp("sound")
    return {
        "NVFP4": make_compressed(random_model, path / "NVFP4", scheme_of("NVFP4"))[0],
        "MXFP4": make_compressed(random_model, path / "MXFP4", scheme_of("MXFP4"))[0],
        "FP8": make_compressed(random_model, path / "FP8", scheme_of("FP8_DYNAMIC"))[0],
        "ModelOpt NVFP4": make_modelopt(random_model, path / "MN", "NVFP4")[0],
        "ModelOpt FP8": make_modelopt(random_model, path / "MF", "FP8")[0],
    }


def drop(end):
    return lambda tensors: tensors.pop(f"{LINEAR}.{end}")


def put(end, change):
    """Replace a tensor by `change` of it."""

    def apply(tensors):
        name = f"{LINEAR}.{end}"
        tensors[name] = change(tensors[name]).contiguous()

    return apply


def add(end, tensor):
    return lambda tensors: tensors.update({f"{LINEAR}.{end}": tensor})


def weights(**fields):
    """Change fields of the weights' arguments in the first group of a config."""

    def apply(config):
        config["config_groups"]["group_0"]["weights"].update(fields)

    return apply


def settings(**fields):
    return lambda config: config.update(fields)


def half(tensor):
    return tensor[:, : tensor.shape[1] // 2]


K = LINEAR.replace(".", r"\.")
TENSORS = {
    "NVFP4": [
        (drop("weight_packed"), rf"missing {K}\.weight_packed \(48, 32\)"),
        (drop("weight_scale"), rf"missing {K}\.weight_scale \(48, 4\)"),
        (drop("weight_global_scale"), rf"missing {K}\.weight_global_scale \(1,\)"),
        (put("weight_packed", half), rf"misshapen {K}\.weight_packed: \(48, 16\).*\(48, 32\)"),
        (put("weight_scale", half), rf"misshapen {K}\.weight_scale: \(48, 2\).*\(48, 4\)"),
        (
            put("weight_global_scale", lambda scale: scale.repeat(2)),
            rf"misshapen {K}\.weight_global_scale: \(2,\)",
        ),
        (
            put("weight_packed", lambda pairs: pairs.view(torch.int8)),
            rf"{K}\.weight_packed has dtype I8, must have U8",
        ),
        (
            put("weight_scale", torch.Tensor.float),
            rf"{K}\.weight_scale has dtype F32, must have F8_E4M3",
        ),
        (
            put("weight_global_scale", torch.zeros_like),
            rf"{K}\.weight_global_scale is 0\.0, must be a positive number",
        ),
        (
            put("weight_global_scale", lambda scale: scale * torch.nan),
            rf"{K}\.weight_global_scale is nan, must be a positive number",
        ),
        (add("weight", torch.ones(48, 64)), rf"unexpected {K}\.weight "),
    ],
    "MXFP4": [
        (drop("weight_packed"), rf"missing {K}\.weight_packed \(48, 32\)"),
        (drop("weight_scale"), rf"missing {K}\.weight_scale \(48, 2\)"),
        (put("weight_packed", half), rf"misshapen {K}\.weight_packed"),
        (put("weight_scale", half), rf"misshapen {K}\.weight_scale: \(48, 1\).*\(48, 2\)"),
        (
            put("weight_scale", lambda scale: scale.float().to(FP8_E4M3)),
            rf"{K}\.weight_scale has dtype F8_E4M3, must have U8 or F8_E8M0",
        ),
        (
            put("weight_packed", torch.Tensor.int),
            rf"{K}\.weight_packed has dtype I32, must have U8",
        ),
        (add("weight_global_scale", torch.ones(1)), rf"unexpected {K}\.weight_global_scale"),
        (add("weight_zero_point", torch.ones(48, 2)), rf"unexpected {K}\.weight_zero_point"),
    ],
    "FP8": [
        (drop("weight"), rf"missing {K}\.weight \(48, 64\)"),
        (drop("weight_scale"), rf"missing {K}\.weight_scale \(48, 1\)"),
        (put("weight", half), rf"misshapen {K}\.weight"),
        (put("weight_scale", lambda scale: scale[:1]), rf"misshapen {K}\.weight_scale: \(1, 1\)"),
        (put("weight_scale", lambda scale: scale[:, 0]), rf"misshapen {K}\.weight_scale: \(48,\)"),
        (put("weight", torch.Tensor.float), rf"{K}\.weight has dtype F32, must have F8_E4M3"),
        (
            put("weight", lambda weight: weight.float().to(torch.float8_e5m2)),
            rf"{K}\.weight has dtype F8_E5M2, must have F8_E4M3",
        ),
        (put("weight_scale", torch.Tensor.int), rf"{K}\.weight_scale has dtype I32"),
        (
            put("weight_scale", lambda scale: scale * torch.nan),
            rf"{K}\.weight_scale has a number that is not finite",
        ),
        (add("weight_zero_point", torch.ones(48, 1)), rf"unexpected {K}\.weight_zero_point"),
    ],
    "ModelOpt NVFP4": [
        (drop("weight"), rf"missing {K}\.weight \(48, 32\)"),
        (drop("weight_scale"), rf"missing {K}\.weight_scale \(48, 4\)"),
        (drop("weight_scale_2"), rf"missing {K}\.weight_scale_2 \(1,\)"),
        (put("weight", half), rf"misshapen {K}\.weight"),
        (put("weight_scale", half), rf"misshapen {K}\.weight_scale"),
        (
            put("weight_scale_2", lambda scale: -scale),
            rf"{K}\.weight_scale_2 is -.*, must be a positive number",
        ),
        (put("weight", torch.Tensor.float), rf"{K}\.weight has dtype F32, must have U8"),
        (put("weight_scale", torch.Tensor.half), rf"{K}\.weight_scale has dtype F16"),
        (add("pre_quant_scale", torch.ones(64)), rf"unexpected {K}\.pre_quant_scale"),
    ],
    "ModelOpt FP8": [
        (drop("weight"), rf"missing {K}\.weight \(48, 64\)"),
        (drop("weight_scale"), rf"missing {K}\.weight_scale"),
        (put("weight", half), rf"misshapen {K}\.weight"),
        (
            put("weight_scale", lambda scale: scale.reshape(1, 1).repeat(48, 1)),
            rf"misshapen {K}\.weight_scale: \(48, 1\)",
        ),
        (put("weight", lambda weight: weight.view(torch.uint8)), rf"{K}\.weight has dtype U8"),
        (put("weight_scale", lambda scale: scale * torch.inf), rf"{K}\.weight_scale has a number"),
    ],
}
"""By format: a change of the tensors, and what the error says."""

CONFIGS = {
    "NVFP4": [
        (weights(group_size=32), "group_size 32"),
        (weights(strategy="group"), "strategy group"),
        (weights(num_bits=8), "8 bits"),
        (weights(type="int"), "type int"),
        (weights(symmetric=False), "symmetric False"),
        (settings(format="mxfp4-pack-quantized", config_groups=None), "config_groups None"),
        (settings(ignore=["lm_head", LINEAR]), rf"{K}.* computed as one.* and plain numbers"),
        (settings(kv_cache_scheme={"num_bits": 99}), "kv_cache_scheme: num_bits .* 99"),
        (settings(kv_cache_scheme=7), "kv_cache_scheme must be an object, is 7"),
        (settings(transform_config={"r1": {}}), "transform_config"),
    ],
    "MXFP4": [
        (weights(group_size=16), "group_size 16"),
        (weights(strategy="tensor_group"), "strategy tensor_group"),
    ],
    "FP8": [
        (weights(num_bits=6), "6 bits"),
        (weights(type="int"), "type int"),
        (weights(symmetric=False), "symmetric False"),
        (weights(strategy="group", group_size=16), r"misshapen .* the config says \(64, 6\)"),
        (weights(strategy="block", block_structure=[0, 4]), "block_structure"),
        (lambda config: config["config_groups"]["group_0"].update(format="sparse"), "'sparse'"),
        (settings(format=None, config_groups={"group_0": {"targets": ["Linear"]}}), "format None"),
    ],
    "ModelOpt NVFP4": [
        (settings(quant_algo="NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ' is not supported"),
        (settings(quant_algo=None), "quant_algo None is not supported"),
        (settings(group_size=32), "group_size 32"),
        (settings(ignore="lm_head"), "ignore must be a list of names"),
        (settings(ignore=["*"] * 5000), "5000 names; at most 4096"),
        (settings(ignore=["x" * 2000 + "*"]), "at most 512 of 1000 characters"),
        (settings(kv_cache_quant_algo="FP3"), "kv_cache_quant_algo 'FP3' is not supported"),
        (settings(ignore=["*k_proj", "lm_head"]), "NVFP4 and plain numbers"),
    ],
    "ModelOpt FP8": [
        (settings(quant_algo="MIXED_PRECISION"), "quantized_layers has no linear"),
        (
            settings(quant_algo="MIXED_PRECISION", quantized_layers={LINEAR: {}}),
            rf"quantized_layers '{K}': quant_algo None is not supported",
        ),
        (
            settings(quant_algo="MIXED_PRECISION", quantized_layers={LINEAR: 3}),
            rf"quantized_layers '{K}' must be an object, is 3",
        ),
        (settings(quantization=[]), r"quantization must be an object, is \[\]"),
    ],
}
"""By format: a change of the quantization_config, and what the error says."""


def cases(table):
    return [
        pytest.param(form, change, message, id=f"{form} {message:.60}")
        for form, changes in table.items()
        for change, message in changes
    ]


def load(path):
    """Check and load the checkpoint at `path`."""
    checkpoint = open_checkpoint(str(path))
    check_network(Config(str(path), device="cpu"), checkpoint)
    Steps(path, 16)


@pytest.mark.parametrize(("form", "change", "message"), cases(TENSORS))
def test_tensors(form, change, message, sound, tmp_path):
    copy_checkpoint(sound[form], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(("form", "change", "message"), cases(CONFIGS))
def test_settings(form, change, message, sound, tmp_path):
    copy_checkpoint(sound[form], tmp_path)
    config = read_json(tmp_path / "config.json")
    change(config["quantization_config"])
    write_json(tmp_path / "config.json", config)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        load(tmp_path)


@pytest.mark.parametrize("form", list(TENSORS))
def test_a_truncated_file(form, sound, tmp_path):
    copy_checkpoint(sound[form], tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors is not a sound safetensors file"):
        load(tmp_path)
