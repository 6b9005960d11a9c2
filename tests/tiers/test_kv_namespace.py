"""Which engines share KV between processes: all that decides a key's bits names another store."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nanovllm
from nanovllm import Config, demo_model
from nanovllm.features.tiers import kv_namespace as module
from nanovllm.features.tiers.kv_namespace import kv_namespace
from nanovllm.features.tiers.weight_files import WeightSnapshot
from nanovllm.kernels.cpu.library import library
from nanovllm.loading.hub import configured_checkpoint
from nanovllm.parallel.rank_setup import check_networks
from nanovllm.platform import cpu
from nanovllm.platform.cpu import CPU
from nanovllm.worker.model_loader import num_positions
from nanovllm.worker.network import Network

ONLY_SOURCE = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.json", "*.gguf")
native = pytest.mark.skipif(library() is None, reason="no compiler here")


def namespace_of(model: str = demo_model.MODEL, **options: Any) -> str:
    """Return the namespace of an engine with these options, as its first rank finds it."""
    config = Config(model, **{"max_model_len": 256, **options})
    target, _ = check_networks(config, configured_checkpoint(config))
    weights = WeightSnapshot(target.files)
    return kv_namespace(Network(target, num_positions(target), CPU()), weights)


def config_json() -> dict[str, Any]:
    """Return the shipped model's config.json."""
    found: dict[str, Any] = json.loads((Path(demo_model.MODEL) / "config.json").read_text())
    return found


@pytest.fixture(scope="module")
def usual() -> str:
    return namespace_of()


def test_classes_of_one_file_have_stores_of_their_own():
    """They may have one name, too."""
    names = (f"tests.test_plugins:{name}" for name in ("Broken", "Contiguous"))
    first, second = (namespace_of(attention_backend=name) for name in names)
    assert first != second


@pytest.mark.long
def test_another_process_has_the_same(usual):
    """Hashes of objects and orders of sets differ between processes."""
    code = "from tests.tiers.test_kv_namespace import namespace_of; print(namespace_of())"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert found.stdout.strip() == usual, found.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 128},
        {"max_num_seqs": 3, "num_kvcache_blocks": 99, "max_num_batched_tokens": 77},
        {"seed": 5, "enforce_eager": True, "skip_tokenizer_init": True, "max_logprobs": 1},
        {"dtype": "bfloat16"},  # it is the checkpoint's
        {"kv_cache_dtype": "auto"},
    ],
    ids=str,
)
def test_what_changes_no_bit(options, usual):
    assert namespace_of(**options) == usual


def test_a_copied_model_shares(tmp_path, usual):
    assert namespace_of(shutil.copytree(demo_model.MODEL, tmp_path / "copy")) == usual


OPTIONS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"native_kernels": False},
    {"kvcache_block_size": 16},
    pytest.param({"kv_cache_dtype": "int8"}, marks=native),
    {"hf_overrides": {"rope_theta": 12345.0}},
    {"load_format": "dummy", "seed": 1},
]


@pytest.fixture(scope="module")
def others() -> dict[str, str]:
    """The namespaces of the options tested so far."""
    return {}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_changes_bits(options, usual, others):
    found = namespace_of(**options)
    assert found not in (usual, *others.values())
    others[str(options)] = found


def test_tensor_parallel_size_counts(usual, monkeypatch):
    """Sums over ranks have another order."""
    assert namespace_of(tensor_parallel_size=2) != usual


def test_weights_count(tmp_path, usual):
    """One byte of a weight, at the same size and time."""
    copy = Path(shutil.copytree(demo_model.MODEL, tmp_path / "copy"))
    file = copy / "model.safetensors"
    content, status = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    file.write_bytes(content)
    shutil.copystat(Path(demo_model.MODEL, file.name), file)
    assert file.stat().st_size == status.st_size
    assert namespace_of(str(copy)) != usual


def test_the_model_config_counts(tmp_path, usual):
    copy = Path(shutil.copytree(demo_model.MODEL, tmp_path / "copy"))
    (copy / "config.json").write_text(json.dumps({**config_json(), "rms_norm_eps": 1e-4}))
    assert namespace_of(str(copy)) != usual


def made_up(path: Path, **fields: Any) -> str:
    """Write a config.json, changed by `fields`; its weights are random."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config_json(), **fields}))
    return str(path)


def lengths_of(model: str, *lengths: int) -> list[str]:
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True}
    return [namespace_of(model, max_model_len=length, **dummy) for length in lengths]


def test_longrope_asks_for_the_length(tmp_path):
    """Its angles depend on max_model_len, in an engine for long texts."""
    head_dim = config_json()["head_dim"]
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * (head_dim // 2),
        "long_factor": [2.0] * (head_dim // 2),
        "original_max_position_embeddings": 128,
    }
    model = made_up(tmp_path / "model", rope_scaling=scaling, max_position_embeddings=256)
    short, still_short, long, longest = lengths_of(model, 64, 128, 129, 256)
    assert short == still_short != long == longest


def test_windows_ask_for_the_length(tmp_path):
    """A window as long as max_model_len is none: the layers then share pages."""
    layers = ["sliding_attention"] * (config_json()["num_hidden_layers"] - 1)
    fields = {"sliding_window": 64, "layer_types": [*layers, "full_attention"]}
    gemma = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": None,
    }
    model = made_up(tmp_path / "model", **fields, **gemma, max_position_embeddings=256)
    short, long, longest = lengths_of(model, 64, 128, 256)
    assert short != long == longest


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (module, "_version", lambda package: f"{package} 99"),
        (module, "source_digest", lambda: "changed"),
        (cpu, "processor_flags", lambda: frozenset({"avx1024"})),
        (cpu, "processor_name", lambda: "Zen 9"),
        (module, "_FORMAT", 99),
    ],
)
def test_versions_source_and_processor_count(usual, monkeypatch, where, name, value):
    monkeypatch.setattr(where, name, value)
    assert namespace_of() != usual


def test_the_source_that_computes_counts(monkeypatch, tmp_path):
    """Symptom: after an update, an engine takes entries that the old code computed otherwise."""
    package = tmp_path / "nanovllm"
    shutil.copytree(Path(nanovllm.__file__).parent, package, ignore=ONLY_SOURCE)
    monkeypatch.setattr(module, "_PACKAGE", package)
    for file, counts in (
        ("kernels/cpu/csrc/attention.c", True),
        ("models/qwen3.py", True),
        ("core/messages.py", True),
        ("features/lora/rank_adapters.py", True),
        ("worker/kv_pool.py", True),
        ("apps/server/serve.py", False),
        ("chat/openai_messages.py", False),
    ):
        before = module.source_digest()
        with (package / file).open("a") as changed:
            changed.write("\n")
        assert (module.source_digest() != before) == counts, file


@native
def test_the_kernels_compiler_and_flags_count(usual, monkeypatch):
    monkeypatch.setattr("nanovllm.features.tiers.kv_namespace.library_name", lambda: "cpu-other.so")
    assert namespace_of() != usual


def test_torchs_settings_count(usual, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert namespace_of() != usual
    monkeypatch.undo()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
    try:
        assert namespace_of() != usual
    finally:
        torch.set_float32_matmul_precision(before)


def test_threads_count(usual):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert namespace_of() != usual
    finally:
        torch.set_num_threads(before)
