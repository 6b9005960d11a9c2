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

COUNTS = [
    *("max_num_batched_tokens", "max_num_seqs", "max_model_len", "tensor_parallel_size"),
    *("kvcache_block_size", "num_kvcache_blocks", "kv_cache_memory_bytes"),
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
        "mmproj": "/see.gguf",
        "limit_mm_per_prompt": {"image": 2},
        "mm_processor_kwargs": {"max_pixels": 9},
        "max_image_tokens": 8,
        "encoder_cache_mib": 4,
        "trace_file": "/trace.json",
        "profile_dir": None,  # not beside a trace
        "seed": 5,
    }
    assert options.keys() == {field.name for field in dataclasses.fields(Config)}
    assert dataclasses.asdict(Config(**options)) == options


NO_COUNTS = [0, -2, 1.0, 1.5, "8", True, False, [1], np.float64(2.0), np.array([1, 2]), 10**19]
NO_SIZES = [0, -1, 1e-9, float("nan"), float("inf"), True, "4", [4]]
NO_SHARES = [0, 0.0, -0.5, 1.01, 90, float("nan"), float("inf"), "0.9", True, None, 10**400]
PLACES = ("tokenizer", "download_dir", "generation_config")
REFUSED = [
    *((name, rf"{name} must be an integer from 1 to \d+, got ", NO_COUNTS) for name in COUNTS),
    *((name, f"{name} must be an integer from 1 to", [None]) for name in COUNTS[1:3]),
    ("max_logprobs", r"max_logprobs must be an integer from -1 to \d+", [-2, 2.0, None, 10**19]),
    ("num_threads", r"num_threads must be an integer from 1 to \d+, got ", [10**19, 100_000]),
    ("seed", r"seed must be an integer from 0 to 9223372036854775807", [-1, 2**63, 0.5, None, "1"]),
    ("gpu_memory_utilization", r"gpu_memory_utilization must be from 0.01 to 1, got ", NO_SHARES),
    *(
        (name, f"{name} must be True or False, got ", [0, 1, None, "True", "no"])
        for name in ("enforce_eager", "enable_prefix_caching", "skip_tokenizer_init")
    ),
    ("dtype", "dtype must be one of auto, float32, bfloat16, ", ["float8", "", None, 16]),
    ("dtype", r"dtype must be .* got 'flaot16'; did you mean 'float16'\?", ["flaot16"]),
    ("load_format", "load_format must be one of auto, dummy", ["safetensors", "", None, True]),
    ("device", "device must be", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "CUDA", 0, None]),
    ("revision", "revision must be a string or None", [1, b"main", ["main"]]),
    *(
        (name, f"{name} must be from 9.53674e-07 to 1.07374e", NO_SIZES)
        for name in ("kv_offload_gib", "kv_cache_dir_gib")
    ),
    *((name, f"{name} must be a directory", ["", 5, b"path", ["path"], True]) for name in PLACES),
    ("scheduling_policy", "got 'priorty'; did you mean 'priority'", ["priorty"]),
    ("distributed_executor_backend", "must be one of mp, uni, ray, got 'Ray'; did", ["Ray"]),
]
"""A field, what the error says, and values that are refused."""


@pytest.mark.parametrize(("name", "message", "values"), REFUSED)
def test_values_that_are_refused(name: str, message: str, values: list[object]) -> None:
    """Each name comes with the rule; no number, of any size, ends the process."""
    options = {"kv_cache_dir": "/kv"} if name == "kv_cache_dir_gib" else {}
    for value in values:
        with pytest.raises(ConfigError, match=message):
            Config("model", **options, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["", None, 5, [], b"model"])
def test_model_must_be_a_path_or_an_id(model):
    with pytest.raises(ConfigError, match="model must be a directory or a hub id"):
        Config(model)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        *((name, kind(3), 3) for name in COUNTS for kind in (np.int64, np.uint8)),
        ("gpu_memory_utilization", 1, 1.0),
        ("gpu_memory_utilization", np.float32(0.5), 0.5),
        ("gpu_memory_utilization", 0.01, 0.01),
        ("seed", 2**63 - 1, 2**63 - 1),
        *(("dtype", name, name) for name in ("auto", "float32", "bfloat16", "float16")),
        *(("device", name, name) for name in ("auto", "cpu", "cuda", "cuda:0", "cuda:12")),
        *((name, Path("org") / "name", str(Path("org") / "name")) for name in (*PLACES, "model")),
    ],
)
def test_values_that_are_accepted(name, given, kept):
    found = getattr(Config(**{"model": "model", name: given}), name)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kvcache_blocks": 8, "kv_cache_memory_bytes": 2**20}, "both size the KV pool"),
        ({"kv_cache_dir": "/kv", "kv_store": "my.module:Tier"}, "both keep .*: give one"),
        ({"kv_cache_dir_gib": 2}, "kv_cache_dir_gib 2 limits .*: give kv_cache_dir too"),
        ({"device": "cuda:1", "tensor_parallel_size": 2}, "'cuda:1' names one GPU but"),
        (
            {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},
            '"uni" is this process alone, but tensor_parallel_size',
        ),
        (
            {"distributed_executor_backend": "ray", "device": "cuda:0"},
            '"ray" it is Ray that chooses; use device="cuda"',
        ),
        ({"tokenizer": "other", "skip_tokenizer_init": True}, "no tokenizer; leave tokenizer out"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(ConfigError, match=message):
        Config("model", **options)
    for name in options.keys() - {"kv_cache_dir_gib"}:
        Config("model", **{name: options[name]})


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
    with pytest.raises(ValueError, match=rf"no field '{typo}'; did you mean '{nearest}'\?"):
        Config("model", **{typo: 1})
    with pytest.raises(NanoVLLMError, match=r"'zzz'; known: .*max_model_len.*seed"):
        Config("model", zzz=1)


def test_threads_are_bounded_by_the_processors(monkeypatch):
    """Symptom: OpenMP's library ends the process, because the system refuses it threads."""
    with pytest.raises(ConfigError, match="num_threads must be an integer from 1 to "):
        Config("model", num_threads=100_000)
    monkeypatch.setattr(os, "cpu_count", lambda: 512)
    with pytest.raises(ConfigError, match="num_threads must be an integer from 1 to 1024, "):
        Config("model", num_threads=1025)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert Config("model", num_threads=64).num_threads == 64


def test_torch_dtypes_become_their_names():
    assert Config("model", dtype="half").dtype == "float16"
    assert Config("model", dtype="float").dtype == "float32"
    assert Config("model", dtype=torch.bfloat16).dtype == "bfloat16"
    with pytest.raises(ConfigError, match="^dtype must be one of .* got 'float64'"):
        Config("model", dtype=torch.float64)


@pytest.mark.parametrize(
    "option", [{"kv_offload_gib": 1}, {"kv_cache_dir": "/kv"}, {"kv_store": "m:C"}]
)
def test_tiers_need_the_prefix_cache(option):
    (name,) = option
    with pytest.raises(ConfigError, match=f"{name} keeps .* enable_prefix_caching is False"):
        Config("model", enable_prefix_caching=False, **option)
    assert Config("model", **option).has_tiers


def test_config_survives_pickle_and_copy():
    config = Config("model", max_num_seqs=3, dtype="float16", seed=9)
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 1
    with pytest.raises(ConfigError, match="max_num_seqs"):
        dataclasses.replace(config, max_num_seqs=0)


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
    given = {"rope_scaling": {"factor": 2.0}}
    config = Config("model", hf_overrides=given)
    given["rope_scaling"]["factor"] = 3.0  # they are copied
    assert config.hf_overrides == {"rope_scaling": {"factor": 2.0}}


@pytest.mark.parametrize("value", ["shortest", "module:", ":Class", "a b:C", "a.b", 3, "a:B:C"])
def test_a_policy_is_known_or_a_class(value: object) -> None:
    with pytest.raises(ConfigError, match=r'must be "priority", "fcfs" or a class of yours as "mo'):
        Config("model", scheduling_policy=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'must be "lru" or a class of yours as "module:Class", '):
        Config("model", eviction_policy=value)  # type: ignore[arg-type]
