"""Engine options: the values accepted, the values refused, and the error messages."""

import copy
import dataclasses
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from nanovllm.errors import ConfigError, NanoVLLMError
from nanovllm.options.config import Config

BEYOND_FLOAT = pytest.param(10**400, id="integer beyond the floats")
POSITIVE_INTEGERS = [
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "tensor_parallel_size",
    "kvcache_block_size",
    "num_kvcache_blocks",
    "kv_cache_memory_bytes",
]


def test_defaults_equal_nano_vllms():
    config = Config("model")
    assert config.max_num_batched_tokens is None
    assert config.max_num_seqs == 512
    assert config.max_model_len == 4096
    assert config.gpu_memory_utilization == 0.9
    assert config.tensor_parallel_size == 1
    assert config.enforce_eager is False
    assert config.num_kvcache_blocks == -1


def test_defaults_of_what_nano_vllm_does_not_have():
    config = Config("model")
    assert config.revision is None
    assert (config.tokenizer, config.download_dir, config.hf_overrides) == (None, None, None)
    assert config.skip_tokenizer_init is False
    assert (config.generation_config, config.max_logprobs) == ("auto", 1000)
    assert (config.dtype, config.device, config.load_format) == ("auto", "auto", "auto")
    assert config.kvcache_block_size is None
    assert config.kv_cache_memory_bytes is None
    assert config.enable_prefix_caching is True
    assert (config.kv_offload_gib, config.kv_cache_dir, config.kv_cache_dir_gib) == (None, None, 16)
    assert config.speculative_config is None
    assert config.seed == 0


def test_every_field_can_be_given():
    options = {
        "model": "org/name",
        "revision": "v1",
        "tokenizer": "org/other",
        "skip_tokenizer_init": False,
        "download_dir": "/downloads",
        "hf_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "generation_config": "vllm",
        "override_generation_config": {"temperature": 0.5, "max_new_tokens": 9},
        "dtype": "bfloat16",
        "device": "cuda:3",
        "load_format": "dummy",
        "max_num_batched_tokens": 100,
        "max_num_seqs": 7,
        "scheduling_policy": "fcfs",
        "max_model_len": 99,
        "gpu_memory_utilization": 0.5,
        "tensor_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "step_runner": "my.module:Runner",
        "enforce_eager": True,
        "model_family": "my.module:Family",
        "quantization": "int8",
        "attention_backend": "my.module:Backend",
        "kv_cache_dtype": "fp8",
        "num_threads": 2,
        "native_kernels": False,
        "kvcache_block_size": 32,
        "num_kvcache_blocks": 12,
        "kv_cache_memory_bytes": None,
        "enable_prefix_caching": True,
        "eviction_policy": "my.module:Class",
        "kv_offload_gib": 0.5,
        "kv_cache_dir": "/kv",
        "kv_cache_dir_gib": 2.0,
        "kv_store": None,  # not beside a directory
        "logits_rules": ("my.module:Rule",),
        "max_logprobs": -1,
        "speculative_config": {
            "method": "draft_model",
            "model": "org/small",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 1,
        },
        "logprobs_mode": "raw_logits",
        "enable_return_routed_experts": False,
        "enable_lora": True,
        "max_loras": 4,
        "max_lora_rank": 64,
        "lora": None,
        "trace": "/trace.json",
        "profile_dir": None,  # not beside a trace
        "seed": 5,
    }
    assert options.keys() == {field.name for field in dataclasses.fields(Config)}
    assert dataclasses.asdict(Config(**options)) == options


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("max_mode_len", "max_model_len"),
        ("max_num_seq", "max_num_seqs"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("eager", "enforce_eager"),
        ("cache_block_size", "kvcache_block_size"),
    ],
)
def test_unknown_keyword_is_refused_and_the_nearest_named(typo, nearest):
    with pytest.raises(ConfigError, match=rf"no field '{typo}'; did you mean '{nearest}'\?"):
        Config("model", **{typo: 1})


def test_unknown_keyword_without_a_near_field_gets_the_list():
    with pytest.raises(ConfigError, match=r"'zzz'; known: .*max_model_len.*seed"):
        Config("model", zzz=1)


def test_errors_are_value_errors_and_nanovllm_errors():
    with pytest.raises(ValueError, match="max_num_seqs") as raised:
        Config("model", max_num_seqs=0)
    assert isinstance(raised.value, NanoVLLMError)


@pytest.mark.parametrize("model", ["", None, 5, [], b"model"])
def test_model_must_be_a_path_or_an_id(model):
    with pytest.raises(ConfigError, match="model must be a directory or a hub id"):
        Config(model)


def test_model_may_be_a_path_object(tmp_path):
    assert Config(tmp_path).model == str(tmp_path)
    assert Config(Path("org") / "name").model == str(Path("org") / "name")


@pytest.mark.parametrize("name", POSITIVE_INTEGERS)
@pytest.mark.parametrize("value", [0, -2, 1.0, 1.5, "8", True, False, [1], np.float64(2.0)])
def test_counts_must_be_positive_integers(name, value):
    with pytest.raises(ConfigError, match=f"^{name} must be an integer from 1 to [0-9]+, got "):
        Config("model", **{name: value})


@pytest.mark.parametrize("name", [*POSITIVE_INTEGERS, "max_logprobs", "num_threads"])
def test_integers_have_upper_bounds(name):
    """Symptom: a number of any size ends the process, or raises a bare OSError."""
    with pytest.raises(ConfigError, match=f"^{name} must be an integer from -?1 to [0-9]+, got "):
        Config("model", **{name: 10**19})


def test_threads_are_bounded_by_the_processors(monkeypatch):
    """Symptom: OpenMP's library ends the process, because the system refuses it threads."""
    with pytest.raises(ConfigError, match="num_threads must be an integer from 1 to "):
        Config("model", num_threads=100_000)
    monkeypatch.setattr(os, "cpu_count", lambda: 512)
    with pytest.raises(ConfigError, match="num_threads must be an integer from 1 to 1024, "):
        Config("model", num_threads=1025)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert Config("model", num_threads=64).num_threads == 64


@pytest.mark.parametrize("name", ["max_num_seqs", "max_model_len"])
def test_required_counts_refuse_none(name):
    with pytest.raises(ConfigError, match=name):
        Config("model", **{name: None})


@pytest.mark.parametrize("name", POSITIVE_INTEGERS)
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_accepted_and_become_int(name, kind):
    value = getattr(Config("model", **{name: kind(3)}), name)
    assert value == 3
    assert type(value) is int


def test_array_is_refused_and_its_field_named():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        Config("model", max_num_seqs=np.array([1, 2]))


@pytest.mark.parametrize("value", [-1, 2**63, 0.5, True, None, "1"])
def test_seed_must_be_an_integer_in_range(value):
    with pytest.raises(
        ConfigError, match=r"^seed must be an integer from 0 to 9223372036854775807"
    ):
        Config("model", seed=value)


def test_largest_seed_is_accepted():
    assert Config("model", seed=2**63 - 1).seed == 2**63 - 1


@pytest.mark.parametrize(
    "value", [0, 0.0, -0.5, 1.01, 90, float("nan"), float("inf"), "0.9", True, None, BEYOND_FLOAT]
)
def test_memory_share_must_lie_between_a_hundredth_and_one(value):
    with pytest.raises(ConfigError, match=r"^gpu_memory_utilization must be from 0.01 to 1, got "):
        Config("model", gpu_memory_utilization=value)


@pytest.mark.parametrize("value", [0.01, 1, np.float32(0.5)])
def test_memory_share_becomes_float(value):
    share = Config("model", gpu_memory_utilization=value).gpu_memory_utilization
    assert share == value
    assert type(share) is float


@pytest.mark.parametrize("name", ["enforce_eager", "enable_prefix_caching", "skip_tokenizer_init"])
@pytest.mark.parametrize("value", [0, 1, None, "True", "no"])
def test_switches_must_be_true_or_false(name, value):
    with pytest.raises(ConfigError, match=f"^{name} must be True or False, got "):
        Config("model", **{name: value})


@pytest.mark.parametrize("value", ["auto", "float32", "bfloat16", "float16"])
def test_known_dtypes_are_accepted(value):
    assert Config("model", dtype=value).dtype == value


def test_torch_dtypes_become_their_names():
    assert Config("model", dtype="half").dtype == "float16"
    assert Config("model", dtype="float").dtype == "float32"
    assert Config("model", dtype=torch.bfloat16).dtype == "bfloat16"
    with pytest.raises(ConfigError, match="^dtype must be one of .* got 'float64'"):
        Config("model", dtype=torch.float64)


@pytest.mark.parametrize("value", ["float8", "bf16", "", None, 16, np.float32, ["float32"]])
def test_unknown_dtypes_are_refused(value):
    with pytest.raises(ConfigError, match="dtype must be one of auto, float32, bfloat16, float16"):
        Config("model", dtype=value)


def test_nearest_dtype_is_named():
    with pytest.raises(ConfigError, match=r"did you mean 'float16'\?"):
        Config("model", dtype="flaot16")


@pytest.mark.parametrize("value", ["safetensors", "", None, True])
def test_unknown_load_format_is_refused(value):
    with pytest.raises(ConfigError, match="load_format must be one of auto, dummy"):
        Config("model", load_format=value)


@pytest.mark.parametrize("value", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_known_devices_are_accepted(value):
    assert Config("model", device=value).device == value


@pytest.mark.parametrize("value", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "CUDA", 0, None])
def test_unknown_devices_are_refused(value):
    with pytest.raises(ConfigError, match="device must be"):
        Config("model", device=value)


@pytest.mark.parametrize("value", [1, b"main", ["main"]])
def test_revision_must_be_a_string(value):
    with pytest.raises(ConfigError, match="revision must be a string or None"):
        Config("model", revision=value)


def test_two_sizes_for_one_pool_are_refused():
    with pytest.raises(ConfigError, match="both size the KV pool; give one"):
        Config("model", num_kvcache_blocks=8, kv_cache_memory_bytes=2**20)


@pytest.mark.parametrize("field", ["kv_offload_gib", "kv_cache_dir_gib"])
@pytest.mark.parametrize("value", [0, -1, 1e-9, float("nan"), float("inf"), True, "4", [4]])
def test_sizes_of_tiers_are_checked(field, value):
    with pytest.raises(ConfigError, match=f"{field} must be from 9.53674e-07 to 1.07374e"):
        Config("model", kv_cache_dir="/kv", **{field: value})


@pytest.mark.parametrize(
    "option", [{"kv_offload_gib": 1}, {"kv_cache_dir": "/kv"}, {"kv_store": "m:C"}]
)
def test_tiers_need_the_prefix_cache(option):
    (name,) = option
    with pytest.raises(ConfigError, match=f"{name} keeps .* enable_prefix_caching is False"):
        Config("model", enable_prefix_caching=False, **option)
    assert Config("model", **option).has_tiers


def test_prompts_are_kept_in_one_place():
    with pytest.raises(ConfigError, match="kv_cache_dir and kv_store both keep .*: give one"):
        Config("model", kv_cache_dir="/kv", kv_store="my.module:Tier")


def test_a_limit_needs_its_directory():
    with pytest.raises(ConfigError, match="kv_cache_dir_gib 2 limits .*: give kv_cache_dir too"):
        Config("model", kv_cache_dir_gib=2)


def test_several_ranks_on_one_named_gpu_are_refused():
    with pytest.raises(ConfigError, match=r"'cuda:1' names one GPU but tensor_parallel_size is 2"):
        Config("model", device="cuda:1", tensor_parallel_size=2)


def test_a_backend_that_contradicts_other_options_is_refused():
    with pytest.raises(ConfigError, match='"uni" is this process alone, but tensor_parallel_size'):
        Config("model", distributed_executor_backend="uni", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match='"ray" it is Ray that chooses; use device="cuda"'):
        Config("model", distributed_executor_backend="ray", device="cuda:0")
    with pytest.raises(ConfigError, match="must be one of mp, uni, ray, got 'Ray'; did you mean"):
        Config("model", distributed_executor_backend="Ray")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_several_ranks_on_unnumbered_devices_are_accepted(device):
    assert Config("model", device=device, tensor_parallel_size=2).tensor_parallel_size == 2


def test_config_is_frozen():
    config = Config("model")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 1
    assert config.max_num_seqs == 512


def test_config_survives_pickle_and_copy():
    config = Config("model", max_num_seqs=3, dtype="float16", seed=9)
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_replace_validates_too():
    config = dataclasses.replace(Config("model"), max_num_seqs=2)
    assert config.max_num_seqs == 2
    with pytest.raises(ConfigError, match="max_num_seqs"):
        dataclasses.replace(config, max_num_seqs=0)


@pytest.mark.parametrize("name", ["tokenizer", "download_dir", "generation_config"])
def test_places_may_be_path_objects(name, tmp_path):
    assert getattr(Config("model", **{name: tmp_path}), name) == str(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer", "download_dir", "generation_config"])
@pytest.mark.parametrize("value", ["", 5, b"path", ["path"], True])
def test_places_must_be_strings_or_paths(name, value):
    with pytest.raises(ConfigError, match=f"^{name} must be a directory"):
        Config("model", **{name: value})


def test_a_tokenizer_that_is_not_loaded_is_refused():
    with pytest.raises(ConfigError, match="loads no tokenizer; leave tokenizer out"):
        Config("model", tokenizer="other", skip_tokenizer_init=True)


DEEP = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value",
    [5, "x", [1], {1: {2, 3}}, {"a": float("nan")}, {"a": object()}, lambda c: c, {"a": DEEP}],
    ids=lambda value: type(value).__name__,
)
def test_hf_overrides_must_be_a_dictionary_of_json_values(value):
    with pytest.raises(ConfigError, match="^hf_overrides must be a dictionary") as raised:
        Config("model", hf_overrides=value)
    assert len(str(raised.value)) < 300


def test_hf_overrides_are_copied():
    given = {"rope_scaling": {"factor": 2.0}}
    config = Config("model", hf_overrides=given)
    given["rope_scaling"]["factor"] = 3.0
    assert config.hf_overrides == {"rope_scaling": {"factor": 2.0}}


@pytest.mark.parametrize("value", [-2, 2.0, True, None, "20"])
def test_max_logprobs_must_be_a_count_or_minus_1(value):
    with pytest.raises(ConfigError, match="^max_logprobs must be an integer from -1 to .*, got"):
        Config("model", max_logprobs=value)


@pytest.mark.parametrize("value", ["shortest", "module:", ":Class", "a b:C", "a.b", 3, "a:B:C"])
def test_a_policy_is_known_or_a_class(value: object) -> None:
    with pytest.raises(ConfigError, match=r'must be "priority", "fcfs" or a class of yours as "mo'):
        Config("model", scheduling_policy=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'must be "lru" or a class of yours as "module:Class", '):
        Config("model", eviction_policy=value)  # type: ignore[arg-type]


def test_a_misspelt_policy_is_named() -> None:
    with pytest.raises(ConfigError, match=r"got 'priorty'; did you mean 'priority'"):
        Config("model", scheduling_policy="priorty")
