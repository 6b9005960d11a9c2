"""Reading config.json of transformers 4 and 5. Unsupported settings are refused by name."""

import math

import pytest
import torch

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.layers.rotary_embedding import RopeConfig, inverse_frequencies
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import model_class

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""config.json of Qwen3-0.6B, as transformers 4 wrote it."""

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(*without, **changes):
    """Return the ModelConfig of BASE without the fields `without` and with `changes`."""
    kept = {key: value for key, value in BASE.items() if key not in without}
    return ModelConfig.from_hf({**kept, **changes})


def rope_of_version_5(**parameters):
    return read("rope_theta", "rope_scaling", rope_parameters=parameters).rope


def test_qwen3_of_transformers_4():
    assert read() == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6, original_max_position=40960),
        max_position=40960,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


def test_qwen3_of_transformers_5():
    assert (
        read(
            "rope_theta",
            "rope_scaling",
            "torch_dtype",
            dtype="bfloat16",
            layer_types=["full_attention"] * 28,
            rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
        )
        == read()
    )


def test_numbers_that_may_be_missing():
    config = read("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings")
    assert config.num_kv_heads == 16
    assert config.head_dim == 1024 // 16
    assert config.rms_norm_eps == 1e-6
    assert config.tie_word_embeddings is False


# Rotary settings.


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("linear", {"factor": 2}, RopeConfig(1e6, "linear", 2.0, 40960)),
        ("yarn", YARN, RopeConfig(1e6, "yarn", 4.0, 32768)),
        ("yarn", {"type": "yarn", **YARN}, RopeConfig(1e6, "yarn", 4.0, 32768)),
        ("yarn", {"factor": 2.0}, RopeConfig(1e6, "yarn", 2.0, 40960)),
    ],
)
def test_scaling(key, kind, settings, expected):
    settings = {**settings, key: kind}
    assert read(rope_scaling=settings).rope == expected
    assert rope_of_version_5(rope_theta=1000000, **settings) == expected


def test_scaling_added_beside_the_settings_of_version_5():
    """Symptom: YaRN is ignored if users add it to config.json as the model card says."""
    added = read(
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rope_scaling={"rope_type": "yarn", **YARN},
    )
    assert added.rope == RopeConfig(1e6, "yarn", 4.0, 32768)
    with pytest.raises(CheckpointError, match="must be an object, are 3"):
        read(rope_parameters=3, rope_scaling={"rope_type": "yarn", **YARN})


def test_every_setting_of_yarn():
    extra = {
        "beta_fast": 16,
        "beta_slow": 2.5,
        "attention_factor": 1.2,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "truncate": False,
    }
    expected = RopeConfig(1e6, "yarn", 4.0, 32768, **extra)
    assert read(rope_scaling={"rope_type": "yarn", **YARN, **extra}).rope == expected


def test_original_positions_beside_the_rope_settings():
    """As in transformers, the value beside the rope settings overrides the one in them."""
    rope = read(
        original_max_position_embeddings=8192, rope_scaling={"type": "yarn", "factor": 4.0}
    ).rope
    assert rope.original_max_position == 8192


def test_yarn_reaches_its_factor_times_the_original_positions():
    """Qwen3's model card adds rope_scaling but leaves max_position_embeddings at 40960."""
    assert read(rope_scaling={"rope_type": "yarn", **YARN}).max_position == 131072


def test_yarn_does_not_shrink_a_max_position_that_includes_it():
    config = read(rope_scaling={"rope_type": "yarn", **YARN}, max_position_embeddings=131072)
    assert config.max_position == 131072


def test_llama3():
    expected = RopeConfig(5e5, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert rope_of_version_5(rope_theta=500000, rope_type="llama3", **LLAMA3) == expected
    config = read(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    assert config.rope == expected
    assert config.max_position == 40960, "llama3's factor is already in max_position_embeddings"


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_llama3_without_a_setting(key):
    with pytest.raises(CheckpointError, match=f"rope scaling 'llama3' has no {key}"):
        read(rope_scaling={"type": "llama3", **LLAMA3, key: None})


@pytest.mark.parametrize("low", [4.0, 5.0])
def test_llama3_with_a_low_factor_that_is_not_below_the_high_one(low):
    """Symptom: angles are NaN."""
    with pytest.raises(CheckpointError, match=f"low_freq_factor {low} must be below .* 4.0"):
        read(rope_scaling={"type": "llama3", **LLAMA3, "low_freq_factor": low})


def test_factors_of_each_dimension():
    factors = [1.0] * 30 + [2, 8.0]
    rope = read(head_dim=64, rope_scaling={"rope_type": "factors", "factors": factors}).rope
    assert rope == RopeConfig(1e6, "factors", 1.0, 40960, factors=tuple(factors))
    plain = inverse_frequencies(64, 1e6)
    found, scale = rope.inverse_frequencies(64)
    assert scale == 1.0
    assert torch.equal(found, plain / torch.tensor(factors))


@pytest.mark.parametrize(
    "factors",
    [5, [], [1.0] * 31, [1.0] * 64, [*[1.0] * 31, "2"], [*[1.0] * 31, 0.0], [1e999] * 32, None],
)
def test_factors_that_do_not_fit(factors):
    with pytest.raises(CheckpointError, match="factors"):
        read(head_dim=64, rope_scaling={"rope_type": "factors", "factors": factors})


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 7e5}}, 7e5),
        ({"rope_parameters": {"rope_theta": 7e5}, "rope_theta": 5e5}, 7e5),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5),
    ],
)
def test_theta(changes, theta):
    assert read("rope_theta", **changes).rope.theta == theta


@pytest.mark.parametrize("kind", ["dynamic", "ntk", "mrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_scalings_are_refused_by_name(kind, key):
    settings = {key: kind, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=f"rope scaling '{kind}' is not supported"):
        read(rope_scaling=settings)
    with pytest.raises(UnsupportedModelError, match=f"rope scaling '{kind}' is not supported"):
        rope_of_version_5(rope_theta=1e6, **settings)


@pytest.mark.parametrize(
    "setting",
    ["mrope_section", "short_factor", "low_freq_factor", "factors", "full_attention", "beta"],
)
@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_unknown_rope_settings_are_refused_by_name(kind, setting):
    settings = {"rope_type": kind, **YARN, setting: [1]}
    with pytest.raises(UnsupportedModelError, match=f"rope settings not supported: '{setting}'"):
        read(rope_scaling=settings)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
@pytest.mark.parametrize("factor", [{}, {"factor": None}])
def test_a_scaling_without_factor(kind, factor):
    with pytest.raises(CheckpointError, match=f"rope scaling '{kind}' has no factor"):
        read(rope_scaling={"type": kind, **factor})


@pytest.mark.parametrize("value", [0.5, 0.25, 0])
def test_rotation_of_a_part_of_the_head_is_refused(value):
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        read(partial_rotary_factor=value)
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        rope_of_version_5(rope_theta=1e6, partial_rotary_factor=value)


@pytest.mark.parametrize("value", [1, 1.0, None])
def test_rotation_of_the_whole_head_may_be_spelt_out(value):
    assert read(partial_rotary_factor=value).rope == read().rope


# Unsupported settings.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
    ],
)
def test_unsupported(changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        read(**changes)


def test_the_form_of_the_weights_is_kept_as_it_is():
    assert read(quantization_config=None) == read()
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    assert read(quantization_config=fp8).quantization_config == fp8


def test_a_disabled_sliding_window_is_ignored():
    assert read(sliding_window=4096, use_sliding_window=False) == read()


@pytest.mark.parametrize(
    "architectures", [None, [], ["Qwen3ForCausalLM", "Other"], "Qwen3", 5, [5]]
)
def test_architectures_that_are_not_one_name(architectures):
    with pytest.raises(CheckpointError, match="must name one architecture"):
        read(architectures=architectures)


def test_an_unknown_architecture():
    with pytest.raises(
        UnsupportedModelError,
        match="architecture 'T5Model' is not supported: `nanovllm models` lists",
    ):
        model_class(read(architectures=["T5Model"]))


# Invalid values.

SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
]


@pytest.mark.parametrize("key", SIZES)
def test_missing_sizes_are_named(key):
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} must be .*, got None"):
        read(key)


@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize(
    "value", [0, -1, 1.5, "8", True, [8], 10**9, 10**400, float("nan"), {}, "x" * 10**6]
)
def test_sizes_of_wrong_type_or_range_are_named(key, value):
    with pytest.raises(
        CheckpointError, match=rf"config\.json: {key} must be an integer from 1 to \d+, got "
    ) as raised:
        read(**{key: value})
    assert len(str(raised.value)) < 250


def test_a_million_layers():
    with pytest.raises(CheckpointError, match="num_hidden_layers must be .* 1 to 1000, got 10{6}$"):
        read(num_hidden_layers=10**6)


def test_sizes_whose_product_is_absurd():
    with pytest.raises(CheckpointError, match=r"num_attention_heads 16777216 times head_dim 128"):
        read(num_attention_heads=2**24)


NUMBERS = ["rms_norm_eps", "rope_theta", "factor", "beta_fast", "beta_slow", "attention_factor"]


@pytest.mark.parametrize("key", [*NUMBERS, "mscale", "mscale_all_dim"])
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), 10**400, 1e300, 1e-300, -1.0, True, {}]
)
def test_numbers_that_give_no_finite_angle_or_norm(key, value):
    """Symptom: ZeroDivisionError or OverflowError when angles are computed, or NaN logits."""
    nested = key not in ("rms_norm_eps", "rope_theta")
    changes = {"rope_scaling": {"type": "yarn", **YARN, key: value}} if nested else {key: value}
    with pytest.raises(CheckpointError, match=f"config.json: {key} must be ") as raised:
        read(**changes)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize("key", ["beta_fast", "beta_slow", "mscale", "mscale_all_dim"])
@pytest.mark.parametrize("value", [0, -0.0, None])
def test_settings_of_yarn_that_are_0_keep_their_defaults(key: str, value: float) -> None:
    """Symptom: Devstral 2, whose mscale_all_dim is 0.0, is refused."""
    scaling = {"type": "yarn", **YARN}
    assert read(rope_scaling={**scaling, key: value}).rope == read(rope_scaling=scaling).rope


@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "attention_factor", "mscale"])
@pytest.mark.parametrize("value", [1e-3, 1, 1e6])
@pytest.mark.parametrize("theta", [2, 1e12])
@pytest.mark.parametrize("original", [1, 2**24])
def test_every_number_that_is_accepted_gives_finite_angles(key, value, theta, original):
    scaling = {"type": "yarn", **YARN, "mscale_all_dim": 1.0, key: value}
    scaling["original_max_position_embeddings"] = original
    rope = read(rope_theta=theta, rope_scaling=scaling).rope
    inv_freq, scale = rope.inverse_frequencies(128)
    assert inv_freq.isfinite().all()
    assert math.isfinite(scale)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["x" * 10**6]),
        ("architectures", [["x"]] * 10**5),
        ("hidden_act", "x" * 10**6),
        ("hidden_act", ["x"] * 10**5),
        ("layer_types", [str(i) for i in range(10**5)]),
        ("layer_types", [0] * 10**5),
        ("use_sliding_window", "x" * 10**6),
        ("dtype", "x" * 10**6),
        ("dtype", {}),
        ("rope_scaling", "x" * 10**6),
        ("rope_scaling", {"type": "x" * 10**6}),
        ("rope_scaling", {str(i): i for i in range(10**5)}),
        ("attention_bias", "x" * 10**6),
        ("tie_word_embeddings", [0] * 10**5),
    ],
    ids=lambda value: str(value)[:30],
)
def test_long_values_are_cut(key, value):
    with pytest.raises(CheckpointError) as raised:
        model_class(read(**{key: value}))
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 3), (8, 16), (12, 8)])
def test_heads_that_do_not_group(heads, kv_heads):
    with pytest.raises(CheckpointError, match=f"{heads} is no multiple of .* {kv_heads}"):
        read(num_attention_heads=heads, num_key_value_heads=kv_heads)


def test_more_heads_than_hidden_size_and_no_head_dim():
    with pytest.raises(CheckpointError, match=r"head_dim must be an integer from 1 to \d+, got 0"):
        read("head_dim", hidden_size=8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", None),
        ("rms_norm_eps", -1e-6),
        ("rope_theta", "large"),
        ("rope_theta", 0),
        ("rope_theta", -10000),
        ("torch_dtype", ["bfloat16"]),
        ("layer_types", 3),
        ("layer_types", [["full_attention"]]),
        ("rope_scaling", "yarn"),
        ("rope_scaling", [4]),
        ("rope_scaling", {"type": "yarn", "factor": "four"}),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("rope_scaling", {"type": "linear", "factor": -2.0}),
        ("rope_scaling", {"type": "yarn", **YARN, "beta_fast": "fast"}),
        ("rope_scaling", {"type": "llama3", **LLAMA3, "high_freq_factor": [4]}),
        ("rope_scaling", {"type": "yarn", **YARN, "attention_factor": [1]}),
        ("rope_scaling", {"type": "yarn", "factor": 4, "original_max_position_embeddings": "x"}),
        ("tie_word_embeddings", "false"),
        ("attention_bias", 3),
        ("mlp_bias", "no"),
    ],
)
def test_invalid_values_are_a_checkpoint_error_that_names_the_field(key, value):
    """The value must cause neither a bare TypeError nor a model that runs with a wrong setting."""
    with pytest.raises(CheckpointError) as raised:
        read(**{key: value})
    nested = set(value) if isinstance(value, dict) else set()
    names = {key, key.removeprefix("torch_"), "rope", *nested}
    assert any(name in str(raised.value) for name in names)


# The dtype.


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_checkpoints_dtype(key, name):
    config = {k: v for k, v in BASE.items() if k != "torch_dtype"}
    assert ModelConfig.from_hf({**config, key: name}).dtype == getattr(torch, name)


def test_no_dtype_is_float32():
    assert read("torch_dtype").dtype == torch.float32


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_the_dtype_option_overrides_the_checkpoint(name):
    assert ModelConfig.from_hf(BASE, dtype=name).dtype == getattr(torch, name)
