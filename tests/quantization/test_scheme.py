"""Reading quantization_config of compressed-tensors: schemes by linear, and what is refused."""

import copy

import pytest

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.features.quantization.compressed_tensors import CompressedTensors, Rounded, Scheme

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*mlp.gate$", "model.layers.1"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
}
"""As llmcompressor writes it."""
PACKED = Scheme(4, "int", "group", False, True, 128, "pack-quantized")
Q_PROJ = "model.layers.0.self_attn.q_proj"


def test_one_scheme_for_all_linears():
    found = CompressedTensors(W4A16)
    assert found.scheme(Q_PROJ) == PACKED
    for ignored in ("lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.up_proj"):
        assert found.scheme(ignored) is None
    assert found.scheme("model.layers.11.mlp.up_proj") == PACKED
    assert str(PACKED) == "pack-quantized W4A16 g128"


def test_the_words_of_models_for_pictures():
    """Ignored names have the checkpoint's path or the network's."""
    ignored = ["model.language_model.layers.0.self_attn.q_proj", "re:language_model.lm_head"]
    found = CompressedTensors({**W4A16, "ignore": ignored})
    assert found.scheme(Q_PROJ) is None
    assert found.scheme("lm_head") is None
    assert found.scheme("model.layers.0.self_attn.k_proj") == PACKED


def test_names_before_regexes_before_classes():
    down = {"targets": ["re:.*down_proj$"], "weights": INT8, "format": "int-quantized"}
    down["input_activations"] = INPUTS
    one = {"targets": ["model.layers.3.mlp.down_proj"], "weights": {**INT4, "group_size": 32}}
    every = {"targets": ["Linear"], "weights": INT4}
    groups = {"every": every, "down": down, "one": one}
    found = CompressedTensors({**W4A16, "ignore": [], "config_groups": groups})
    assert found.scheme(Q_PROJ) == PACKED
    inputs = Rounded(8, "int", "token", dynamic=True, symmetric=True, group_size=None)
    assert found.scheme("model.layers.0.mlp.down_proj") == Scheme(
        8, "int", "channel", False, True, None, "int-quantized", inputs=inputs
    )
    assert found.scheme("model.layers.3.mlp.down_proj").group_size == 32


def test_a_linear_of_no_target_is_plain():
    groups = {"mlp": {"targets": ["re:.*mlp.*"], "weights": INT4}}
    assert CompressedTensors({**W4A16, "config_groups": groups}).scheme(Q_PROJ) is None


@pytest.mark.parametrize(("order", "kept"), [("group", "group"), ("static", None), (False, None)])
def test_actorder(order, kept):
    weights = {**INT4, "actorder": order}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    assert CompressedTensors({**W4A16, "config_groups": groups}).scheme(Q_PROJ).actorder == kept


GROUP = ["config_groups", "group_0"]
WEIGHTS = [*GROUP, "weights"]
REFUSED = [
    (["format"], "marlin-24", "format 'marlin-24'"),
    (["format"], None, "format None"),
    (["format"], ["pack-quantized"], "format"),
    (["transform_config"], {"config_groups": {}}, "transform_config"),
    (["sparsity_config"], {"format": "sparse-24-bitmask"}, "sparsity_config"),
    (["quantization_status"], "frozen", "quantization_status 'frozen'"),
    (["config_groups"], {}, "config_groups"),
    (["config_groups"], {"W4A16": ["Linear"]}, "config_groups 'W4A16'"),
    (["config_groups"], None, "config_groups None"),
    (["ignore"], "lm_head", "ignore must be a list"),
    (["ignore"], ["x"] * 5000, "ignore has 5000 names"),
    (["ignore"], ["re:("], "ignore: regex '\\('"),
    (["ignore"], ["re:(?!model).*"], "ignore: regex .*\\(\\?!"),
    (["ignore"], ["re:.*"] * 100, "ignore has 100 regular expressions"),
    ([*GROUP, "targets"], "Linear", "targets must be a list"),
    ([*GROUP, "targets"], ["re:["], "targets: regex"),
    ([*GROUP, "output_activations"], INPUTS, "output_activations"),
    (WEIGHTS, None, "weights null"),
    (WEIGHTS, "int4", "weights must be an object"),
    ([*WEIGHTS, "num_bits"], "4", "num_bits must be .* '4'"),
    ([*WEIGHTS, "num_bits"], 10**40, "num_bits"),
    ([*WEIGHTS, "type"], "uint", "type must be"),
    ([*WEIGHTS, "strategy"], "diagonal", "strategy 'diagonal'"),
    ([*WEIGHTS, "group_size"], None, "needs a group_size, is None"),
    ([*WEIGHTS, "group_size"], 0, "group_size must be"),
    ([*WEIGHTS, "group_size"], 10**12, "group_size must be"),
    ([*WEIGHTS, "symmetric"], "yes", "symmetric must be"),
    ([*WEIGHTS, "dynamic"], True, "weights: dynamic"),
    ([*WEIGHTS, "actorder"], "sideways", "actorder 'sideways'"),
    ([*GROUP, "input_activations"], {"num_bits": 0}, "input_activations: num_bits"),
]


@pytest.mark.parametrize(("path", "value", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(path, value, named):
    config = copy.deepcopy(W4A16)
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises((UnsupportedModelError, CheckpointError), match=named):
        CompressedTensors(config)
