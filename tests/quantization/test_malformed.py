"""Malformed checkpoints in few bits: one error for each, which names what is wrong.

That a tensor is missing, misshapen or of another dtype is the loader's to find: each format has a
few of those.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints import copy_checkpoint, make_checkpoint, read_json, write_json
from tests.models.comparison import Steps
from tests.quantization import quantised
from tests.quantization.float_checkpoints import make_compressed, make_modelopt, scheme_of
from tests.quantization.integer_cases import BY_LAYOUT, CASES

LINEAR = "model.layers.1.self_attn.k_proj"
K = LINEAR.replace(".", r"\.")
FLOATS = {"NVFP4": "NVFP4", "MXFP4": "MXFP4", "FP8": "FP8_DYNAMIC"}


@pytest.fixture(scope="module")
def sound(random_model, tmp_path_factory):
    """Paths of sound checkpoints by format. k_proj has 64 outputs and 128 inputs, or 48 and 64."""
    path = tmp_path_factory.mktemp("sound")
    model = make_checkpoint(path / "model", **quantised.SIZES)
    found = {k: quantised.write(model, path / k, *CASES[name])[0] for k, name in BY_LAYOUT.items()}
    for key, preset in FLOATS.items():
        found[key] = make_compressed(random_model, path / key, scheme_of(preset))[0]
    for key in ("NVFP4", "FP8"):
        found[f"ModelOpt {key}"] = make_modelopt(random_model, path / f"M{key}", key)[0]
    return found


def drop(suffix):
    return lambda tensors: tensors.pop(f"{LINEAR}.{suffix}")


def add(suffix, tensor):
    return lambda tensors: tensors.update({f"{LINEAR}.{suffix}": tensor})


def put(suffix, change):
    """Replace a tensor by `change` of it."""

    def apply(tensors):
        name = f"{LINEAR}.{suffix}"
        tensors[name] = change(tensors[name]).contiguous()

    return apply


def group(**fields):
    """Change fields of the first group of a config."""
    return lambda config: config["config_groups"]["group_0"].update(fields)


def weights(**fields):
    """Change fields of the weights' arguments in the first group of a config."""
    return lambda config: config["config_groups"]["group_0"]["weights"].update(fields)


def settings(**fields):
    return lambda config: config.update(fields)


def half(tensor):
    return tensor[:, : tensor.shape[1] // 2]


def with_number(number, index=(0, 0)):
    def change(tensor):
        tensor = tensor.clone()
        tensor[index] = number
        return tensor

    return change


TENSORS = {
    "packed": [
        (drop("weight_shape"), rf"missing {K}\.weight_shape \(2,\)"),
        (put("weight_zero_point", half), rf"misshapen {K}\.weight_zero_point: \(8, 2\)"),
        (put("weight_packed", torch.Tensor.float), rf"{K}\.weight_packed has dtype F32, .* I32"),
        (put("weight_shape", with_number(96, 1)), rf"{K}\.weight_shape says \(64, 96\), .*128"),
        (put("weight_scale", with_number(torch.inf)), rf"{K}\.weight_scale has .* not finite"),
        (add("weight", torch.ones(64, 128)), rf"unexpected {K}\.weight \(64, 128\)"),
    ],
    "ordered": [
        (drop("weight_g_idx"), rf"missing {K}\.weight_g_idx \(128,\)"),
        (put("weight_g_idx", with_number(2, 5)), rf"{K}\.weight_g_idx has group 2, .* 0 to 1"),
        (put("weight_g_idx", with_number(-1, 5)), rf"{K}\.weight_g_idx has group -1"),
    ],
    "bytes": [
        (put("weight", torch.Tensor.float), rf"{K}\.weight has dtype F32, must have I8"),
        (put("weight", with_number(8)), rf"{K}\.weight.*: a value does not fit 4 bits"),
        (put("weight_scale", with_number(torch.nan)), rf"{K}\.weight_scale has .* not finite"),
    ],
    "GPTQ": [
        (drop("g_idx"), rf"missing {K}\.g_idx \(128,\)"),
        (put("qweight", half), rf"misshapen {K}\.qweight: \(16, 32\).*\(16, 64\)"),
        (put("g_idx", with_number(4, 3)), rf"{K}\.g_idx has group 4, must be from 0 to 3"),
        (add("bias", torch.ones(64)), rf"{K}\.bias is not zero"),
    ],
    "AWQ": [
        (put("qzeros", half), rf"misshapen {K}\.qzeros: \(2, 4\)"),
        (add("g_idx", torch.zeros(128).int()), rf"unexpected {K}\.g_idx"),
    ],
    "NVFP4": [
        (drop("weight_global_scale"), rf"missing {K}\.weight_global_scale \(1,\)"),
        (put("weight_global_scale", torch.zeros_like), rf"{K}.* is 0\.0, must be a positive num"),
        (put("weight_global_scale", lambda x: x * torch.nan), rf"{K}.* is nan, must be a positive"),
    ],
    "MXFP4": [
        (put("weight_scale", half), rf"misshapen {K}\.weight_scale: \(48, 1\).*\(48, 2\)"),
        (
            put("weight_scale", lambda scale: scale.float().to(torch.float8_e4m3fn)),
            rf"{K}\.weight_scale has dtype F8_E4M3, must have U8 or F8_E8M0",
        ),
    ],
    "FP8": [
        (
            put("weight", lambda weight: weight.float().to(torch.float8_e5m2)),
            rf"{K}\.weight has dtype F8_E5M2, must have F8_E4M3",
        ),
        (put("weight_scale", lambda x: x * torch.nan), rf"{K}\.weight_scale has .* not finite"),
    ],
    "ModelOpt NVFP4": [
        (put("weight_scale_2", lambda x: -x), rf"{K}\.weight_scale_2 is -.*, must be a positive"),
        (add("pre_quant_scale", torch.ones(64)), rf"unexpected {K}\.pre_quant_scale"),
    ],
    "ModelOpt FP8": [
        (put("weight_scale", lambda x: x.repeat(48).view(48, 1)), rf"misshapen {K}.*: \(48, 1\)"),
    ],
}
"""By format: changes of a file's tensors, and what the error says."""

QK = r"model\.layers\.0\.self_attn\.q_proj.*model\.layers\.0\.self_attn\.k_proj.*as one"
MIXED = "MIXED_PRECISION"
SETTINGS = {
    "packed": [
        (weights(num_bits=3), "num_bits 3 is not supported"),
        (weights(strategy="tensor"), "strategy 'tensor' is not supported"),
        (weights(group_size=7), r"misshapen model.*\.weight_scale"),
        (weights(type="float"), "type 'float' is not supported"),
        (weights(symmetric=True), r"unexpected model.*\.weight_zero_point"),
        (settings(ignore=["re:.*q_proj"]), QK),
        (settings(ignore=["re:.*layers.1.mlp.*"]), r"unexpected model\.layers\.1\.mlp"),
    ],
    "bytes": [
        (group(input_activations={"num_bits": 8, "type": "float"}), "input_activations: type 'fl"),
    ],
    "GPTQ": [(settings(desc_act=False), r"\.g_idx has inputs in another order")],
    "GPTQ v1": [
        (settings(bits=3), "bits 3 is not supported"),
        (settings(group_size=0), "group_size must be"),
        (settings(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (settings(is_marlin_format=True), "is_marlin_format True"),
        (settings(desc_act="maybe"), "desc_act must be"),
        (settings(dynamic={"-:(": {}}), r"dynamic: regex '\('"),
        (settings(dynamic=["-:.*"]), "dynamic must be"),
        (settings(dynamic={".*up_proj": {"bits": 5}}), "bits 5"),
        (settings(dynamic={".*up_proj": 4}), "must be an object"),
        (settings(dynamic={"-:.*layers.0.self_attn.q_proj": {}}), QK),
        (settings(modules_in_block_to_quantize=["self_attn.q_proj", "mlp"]), QK),
        (settings(modules_in_block_to_quantize=[[1]]), "modules_in_block_to_quantize must be"),
    ],
    "AWQ": [
        (settings(bits=3), "bits 3 is not supported"),
        (settings(version="gemv"), "version 'gemv'"),
        (settings(zero_point=False), "zero_point False"),
        (settings(modules_to_not_convert=["q_proj"]), QK),
        (settings(modules_to_not_convert="lm_head"), "modules_to_not_convert must be"),
    ],
    "NVFP4": [
        (weights(group_size=32), "group_size 32"),
        (weights(strategy="group"), "strategy 'group'"),
        (weights(num_bits=8), "num_bits 8"),
        (weights(type="int"), "type 'int'"),
        (weights(symmetric=False), "symmetric False"),
        (settings(ignore=["lm_head", LINEAR]), rf"{K}.* computed as one.* and plain numbers"),
        (settings(kv_cache_scheme={"num_bits": 99}), "kv_cache_scheme: num_bits .* 99"),
        (settings(kv_cache_scheme=7), "kv_cache_scheme must be an object, is 7"),
    ],
    "MXFP4": [(weights(strategy="tensor_group"), "strategy 'tensor_group'")],
    "FP8": [
        (weights(num_bits=6), "num_bits 6"),
        (weights(symmetric=False), "symmetric False"),
        (weights(strategy="group", group_size=16), r"misshapen .* the config says \(64, 6\)"),
        (weights(strategy="block", block_structure=[0, 4]), "block_structure"),
        (group(format="sparse"), "'sparse'"),
        (group(input_activations={"num_bits": 8, "type": "int"}), "input_activations: type 'int'"),
    ],
    "ModelOpt NVFP4": [
        (settings(quant_algo="NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ' is not supported"),
        (settings(group_size=32), "group_size 32"),
        (settings(ignore="lm_head"), "ignore must be a list of names"),
        (settings(ignore=["*"] * 5000), "5000 names; at most 4096"),
        (settings(ignore=["x" * 2000 + "*"]), "at most 512 of 1000 characters"),
        (settings(kv_cache_quant_algo="FP3"), "kv_cache_quant_algo 'FP3' is not supported"),
        (settings(ignore=["*k_proj", "lm_head"]), "NVFP4 and plain numbers"),
    ],
    "ModelOpt FP8": [
        (settings(quant_algo=MIXED), "quantized_layers has no linear"),
        (settings(quant_algo=MIXED, quantized_layers={LINEAR: {}}), rf"'{K}': quant_algo None is"),
        (settings(quant_algo=MIXED, quantized_layers={LINEAR: 3}), rf"'{K}' must be an object"),
        (settings(quantization=[]), r"quantization must be an object, is \[\]"),
    ],
}
"""By format: changes of quantization_config, and what the error says."""


def cases(table):
    return [
        pytest.param(form, change, named, id=f"{form}-{named[:40]}")
        for form, changes in table.items()
        for change, named in changes
    ]


def assert_refused(path, named):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        Steps(path, 16)


@pytest.mark.parametrize(("form", "change", "named"), cases(TENSORS))
def test_tensors(form, change, named, sound, tmp_path):
    path = copy_checkpoint(sound[form], tmp_path / "changed")
    file = tmp_path / "changed" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    assert_refused(path, named)


@pytest.mark.parametrize(("form", "change", "named"), cases(SETTINGS))
def test_settings(form, change, named, sound, tmp_path):
    path = copy_checkpoint(sound[form], tmp_path / "changed")
    config = read_json(tmp_path / "changed" / "config.json")
    change(config["quantization_config"])
    write_json(tmp_path / "changed" / "config.json", config)
    assert_refused(path, named)
