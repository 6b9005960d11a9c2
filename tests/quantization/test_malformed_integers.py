"""Malformed checkpoints of integers: one error for each, which names what is wrong."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints import copy_checkpoint, make_checkpoint, read_json, write_json
from tests.models.comparison import Steps
from tests.quantization import quantised
from tests.quantization.integer_cases import CASES

LINEAR = "model.layers.1.self_attn.k_proj"
K = LINEAR.replace(".", r"\.")
"""k_proj has 64 outputs and 128 inputs."""
SOUND = {
    "packed": "W4A16 g32 asymmetric",
    "ordered": "W4A16 g64 group order",
    "bytes": "W4A8 bytes",
    "GPTQ": "GPTQ desc_act",
    "GPTQ v1": "GPTQ",
    "AWQ": "AWQ g64",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Paths of sound checkpoints by layout."""
    path = tmp_path_factory.mktemp("sound")
    model = make_checkpoint(path / "model", **quantised.SIZES)
    return {key: quantised.write(model, path / key, *CASES[name])[0] for key, name in SOUND.items()}


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


def weights(**fields):
    """Change fields of the weights' arguments in the first group of a config."""

    def apply(config):
        config["config_groups"]["group_0"]["weights"].update(fields)

    return apply


def settings(**fields):
    return lambda config: config.update(fields)


def without(key):
    return lambda config: config.pop(key)


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
        (drop("weight_packed"), rf"missing {K}\.weight_packed \(64, 16\)"),
        (drop("weight_scale"), rf"missing {K}\.weight_scale \(64, 4\)"),
        (drop("weight_zero_point"), rf"missing {K}\.weight_zero_point \(8, 4\)"),
        (drop("weight_shape"), rf"missing {K}\.weight_shape \(2,\)"),
        (put("weight_packed", half), rf"misshapen {K}\.weight_packed: \(64, 8\).*\(64, 16\)"),
        (put("weight_scale", half), rf"misshapen {K}\.weight_scale: \(64, 2\).*\(64, 4\)"),
        (put("weight_zero_point", half), rf"misshapen {K}\.weight_zero_point: \(8, 2\)"),
        (put("weight_packed", torch.Tensor.float), rf"{K}\.weight_packed has dtype F32, .* I32"),
        (put("weight_scale", torch.Tensor.int), rf"{K}\.weight_scale has dtype I32"),
        (put("weight_shape", with_number(96, 1)), rf"{K}\.weight_shape says \(64, 96\), .*128"),
        (put("weight_scale", with_number(torch.inf)), rf"{K}\.weight_scale has .* not finite"),
        (put("weight_scale", with_number(torch.nan)), rf"{K}\.weight_scale has .* not finite"),
        (add("weight", torch.ones(64, 128)), rf"unexpected {K}\.weight \(64, 128\)"),
        (add("weight_g_idx", torch.zeros(128).int()), rf"unexpected {K}\.weight_g_idx"),
    ],
    "ordered": [
        (drop("weight_g_idx"), rf"missing {K}\.weight_g_idx \(128,\)"),
        (put("weight_g_idx", with_number(2, 5)), rf"{K}\.weight_g_idx has group 2, .* 0 to 1"),
        (put("weight_g_idx", with_number(-1, 5)), rf"{K}\.weight_g_idx has group -1"),
        (put("weight_g_idx", lambda order: order[:64]), rf"misshapen {K}\.weight_g_idx: \(64,\)"),
        (put("weight_g_idx", torch.Tensor.long), rf"{K}\.weight_g_idx has dtype I64"),
    ],
    "bytes": [
        (drop("weight"), rf"missing {K}\.weight \(64, 128\)"),
        (drop("weight_scale"), rf"missing {K}\.weight_scale \(64, 1\)"),
        (put("weight", half), rf"misshapen {K}\.weight: \(64, 64\)"),
        (put("weight", torch.Tensor.float), rf"{K}\.weight has dtype F32, must have I8"),
        (put("weight", with_number(8)), rf"{K}\.weight.*: a value does not fit 4 bits"),
        (put("weight_scale", lambda scale: scale.repeat(1, 2)), rf"misshapen {K}\.weight_scale"),
        (put("weight_scale", with_number(torch.nan)), rf"{K}\.weight_scale has .* not finite"),
        (add("weight_zero_point", torch.zeros(64, 1)), rf"unexpected {K}\.weight_zero_point"),
        (add("weight_shape", torch.ones(2).long()), rf"unexpected {K}\.weight_shape"),
    ],
    "GPTQ": [
        (drop("qweight"), rf"missing {K}\.qweight \(16, 64\)"),
        (drop("qzeros"), rf"missing {K}\.qzeros \(4, 8\)"),
        (drop("scales"), rf"missing {K}\.scales \(4, 64\)"),
        (drop("g_idx"), rf"missing {K}\.g_idx \(128,\)"),
        (put("qweight", half), rf"misshapen {K}\.qweight: \(16, 32\).*\(16, 64\)"),
        (put("qzeros", half), rf"misshapen {K}\.qzeros: \(4, 4\).*\(4, 8\)"),
        (put("scales", half), rf"misshapen {K}\.scales: \(4, 32\)"),
        (put("qweight", torch.Tensor.long), rf"{K}\.qweight has dtype I64, must have I32"),
        (put("scales", with_number(torch.inf)), rf"{K}\.scales has a number that is not finite"),
        (put("g_idx", with_number(4, 3)), rf"{K}\.g_idx has group 4, must be from 0 to 3"),
        (put("g_idx", with_number(-7, 3)), rf"{K}\.g_idx has group -7"),
        (add("bias", torch.ones(64)), rf"{K}\.bias is not zero"),
        (add("weight", torch.ones(64, 128)), rf"unexpected {K}\.weight \(64, 128\)"),
    ],
    "AWQ": [
        (drop("qweight"), rf"missing {K}\.qweight \(128, 8\)"),
        (drop("qzeros"), rf"missing {K}\.qzeros \(2, 8\)"),
        (drop("scales"), rf"missing {K}\.scales \(2, 64\)"),
        (put("qweight", half), rf"misshapen {K}\.qweight: \(128, 4\)"),
        (put("qzeros", half), rf"misshapen {K}\.qzeros: \(2, 4\)"),
        (put("scales", half), rf"misshapen {K}\.scales: \(2, 32\)"),
        (put("qweight", torch.Tensor.float), rf"{K}\.qweight has dtype F32"),
        (put("qzeros", torch.Tensor.long), rf"{K}\.qzeros has dtype I64"),
        (put("scales", with_number(torch.nan)), rf"{K}\.scales has a number that is not finite"),
        (add("g_idx", torch.zeros(128).int()), rf"unexpected {K}\.g_idx"),
    ],
}
"""By layout: changes of a file's tensors, and what the error says."""

QK = r"model\.layers\.0\.self_attn\.q_proj.*model\.layers\.0\.self_attn\.k_proj.*as one"
SETTINGS = {
    "packed": [
        (weights(num_bits=3), "num_bits 3 is not supported"),
        (weights(num_bits=2), "num_bits 2 is not supported"),
        (weights(strategy="diagonal"), "strategy 'diagonal'"),
        (weights(strategy="tensor"), "strategy 'tensor' is not supported"),
        (weights(group_size=7), r"misshapen model.*\.weight_scale"),
        (weights(group_size=None), "needs a group_size, is None"),
        (weights(type="float"), "type 'float' is not supported"),
        (weights(symmetric=True), r"unexpected model.*\.weight_zero_point"),
        (lambda config: config["config_groups"]["group_0"].pop("weights"), "weights null"),
        (lambda config: config["config_groups"]["group_0"].update(format="x"), "format 'x'"),
        (settings(ignore=["re:.*q_proj"]), QK),
        (settings(ignore=["re:("]), r"ignore: regex '\('"),
        (settings(ignore=["re:.*layers.1.mlp.*"]), r"unexpected model\.layers\.1\.mlp"),
        (without("config_groups"), "config_groups None"),
    ],
    "GPTQ v1": [
        (settings(bits=3), "bits 3 is not supported"),
        (settings(bits=2), "bits 2 is not supported"),
        (without("bits"), "bits None is not supported"),
        (settings(group_size=0), "group_size must be"),
        (settings(group_size=48), r"misshapen model.*\.qzeros|misshapen model.*\.scales"),
        (settings(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (settings(is_marlin_format=True), "is_marlin_format True"),
        (settings(lm_head="yes"), "lm_head .yes."),
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
        (settings(group_size="64"), "group_size must be"),
        (settings(group_size=32), r"misshapen model.*\.scales"),
        (settings(version="gemv"), "version 'gemv'"),
        (settings(version="marlin"), "version 'marlin'"),
        (settings(zero_point=False), "zero_point False"),
        (settings(modules_to_not_convert=["q_proj"]), QK),
        (settings(modules_to_not_convert="lm_head"), "modules_to_not_convert must be"),
    ],
}
"""By layout: changes of quantization_config, and what the error says."""


def cases(table):
    return [
        pytest.param(layout, change, named, id=f"{layout}-{named[:40]}")
        for layout, changes in table.items()
        for change, named in changes
    ]


def assert_refused(path, named):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        Steps(path, 16)


@pytest.mark.parametrize(("layout", "change", "named"), cases(TENSORS))
def test_tensors(layout, change, named, sound, tmp_path):
    path = copy_checkpoint(sound[layout], tmp_path / "changed")
    file = tmp_path / "changed" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    assert_refused(path, named)


@pytest.mark.parametrize(("layout", "change", "named"), cases(SETTINGS))
def test_settings(layout, change, named, sound, tmp_path):
    path = copy_checkpoint(sound[layout], tmp_path / "changed")
    config = read_json(tmp_path / "changed" / "config.json")
    change(config["quantization_config"])
    write_json(tmp_path / "changed" / "config.json", config)
    assert_refused(path, named)


@pytest.mark.parametrize("layout", SOUND)
def test_truncated_files(layout, sound, tmp_path):
    path = copy_checkpoint(sound[layout], tmp_path / "changed")
    file = tmp_path / "changed" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused(path, "not a sound safetensors file")


def test_an_order_that_the_settings_deny(sound, tmp_path):
    """desc_act false, and a g_idx that says otherwise: the weights would be wrong."""
    path = copy_checkpoint(sound["GPTQ"], tmp_path / "changed")
    config = read_json(tmp_path / "changed" / "config.json")
    config["quantization_config"]["desc_act"] = False
    write_json(tmp_path / "changed" / "config.json", config)
    assert_refused(path, r"\.g_idx has inputs in another order")
