"""The report on a checkpoint: what it says of layers and memory, beside what a run has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanovllm import demo_model
from nanovllm.attention.spec import AttentionSpec
from nanovllm.attention.torch_sdpa import TorchExplicitBackend
from nanovllm.core.worker_info import pages_for
from nanovllm.features.quantization.integer import choose_group_size, quantize
from nanovllm.models.registry import MODULES
from nanovllm.worker.kv_pool import page_layout
from nanovllm.worker.model_report import POOL_BYTES, all_supported, report
from tests.checkpoints import write_json
from tests.models.family_configs import CONFIGS, config_of


@pytest.fixture
def report_of(tmp_path: Path) -> Any:
    def report_of(architecture: str, **changes: Any) -> dict[str, Any]:
        write_json(tmp_path / "config.json", {**config_of(architecture), **changes})
        return report(str(tmp_path))

    return report_of


def test_every_architecture_says_what_it_is_known_for() -> None:
    rows = all_supported()
    assert [row["architecture"] for row in rows] == list(MODULES)
    for row in rows:
        assert row["models"], row
        assert row["layers"], row
        assert len(row["models"] + row["layers"]) < 240, row
        tells = "pictures" in row["models"]
        assert tells == row["architecture"].endswith("Generation"), row


LAYERS = {"FalconH1ForCausalLM": (12, 6), "NemotronHForCausalLM": (3, 3)}
"""Mixers and MLPs where a layer does not have one of each: two mixers, or one part in all."""


@pytest.mark.parametrize("architecture", MODULES)
def test_layers_add_up(architecture: str, report_of: Any) -> None:
    found = report_of(architecture)
    assert found["supported"]
    config = CONFIGS[architecture].get("text_config", CONFIGS[architecture])
    mixers, mlps = (
        sum(row["num_layers"] for row in rows)
        for rows in (found["attention"] + found["states"], found["mlps"])
    )
    assert (mixers, mlps) == LAYERS.get(architecture, (6, 6))
    assert found["num_layers"] == 6
    windows = {row["window"] for row in found["attention"]} - {None}
    assert windows == ({32} if config.get("sliding_window") and windows else set())
    parts = {name.removesuffix("_config") for name in CONFIGS[architecture] if "_config" in name}
    if config.get("num_nextn_predict_layers"):
        parts.add("mtp")
    assert set(found["left_out"]) == parts - {"text", "linear_attn"}


def test_what_a_config_asks_for(report_of: Any) -> None:
    found = report_of("GptOssForCausalLM")
    sliding, full = found["attention"]
    assert (sliding["window"], full["window"]) == (32, None)
    assert (sliding["sinks"], full["sinks"]) == (True, True)
    assert (full["rope"], full["rope_factor"], full["rope_theta"]) == ("yarn", 8.0, 10_000.0)
    (mlp,) = found["mlps"]
    assert (mlp["experts"], mlp["experts_per_token"], mlp["expert_size"]) == (4, 2, 96)
    found = report_of("Gemma2ForCausalLM")
    assert [row["softcap"] for row in found["attention"]] == [50.0, 50.0]
    assert found["logit_softcap"] == 30.0
    ropes = [row["rope"] for row in report_of("SmolLM3ForCausalLM")["attention"]]
    assert ropes == ["default", None]


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_kv_memory_is_that_of_the_pool(architecture: str, report_of: Any) -> None:
    found = report_of(architecture)["memory"]
    windows: list[int | None] = [None] * 6
    if architecture.startswith("Gemma"):
        windows = [32, 32, None] * 2
    spec = AttentionSpec(4, 2, 16, torch.bfloat16, torch.device("cpu"), 16)
    shape = TorchExplicitBackend(spec).kv_cache_shape(1)
    layout = page_layout([torch.Size(shape).numel() * 2] * 6, windows)
    assert found["kv_token_bytes"] == windows.count(None) * 2 * 2 * 16 * 2
    assert found["kv_window_bytes"] == 3 * windows.count(32) * 2 * 2 * 16 * 2 * 16
    tokens = found["pool_tokens"]
    needed = [
        pages_for(length, 16, layout.windows, 1) * layout.page_bytes
        for length in (tokens, tokens + 1)
    ]
    assert needed[0] <= POOL_BYTES < needed[1]


def test_weights_are_counted_from_the_files() -> None:
    found = report(demo_model.MODEL)["memory"]
    tensors = load_file(Path(demo_model.MODEL) / "model.safetensors")
    assert found["weights_from"] == "files"
    assert found["weights_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    for bits in (8, 4):
        expected = 0
        for tensor in tensors.values():
            if tensor.ndim == 1:
                expected += tensor.nbytes
                continue
            rounded = quantize(tensor, bits, choose_group_size(f"int{bits}", tensor.shape[1]))
            expected += rounded.values.numel() * bits // 8 + rounded.scales.nbytes
        assert found[f"int{bits}_bytes"] == expected


def test_a_checkpoint_in_few_bits(report_of: Any) -> None:
    group = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
        "ignore": ["lm_head"],
    }
    plain = report_of("Qwen3ForCausalLM")
    found = report_of("Qwen3ForCausalLM", quantization_config=config)
    linears = 7 * found["num_layers"]
    assert found["stored"] == {"compressed-tensors pack-quantized W4A16 g32": linears}
    assert plain["stored"] == {}
    memory = found["memory"]
    assert memory["int4_bytes"] < memory["int8_bytes"] < memory["weights_bytes"]
    assert memory["int8_bytes"] < plain["memory"]["int8_bytes"]
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    beside = report_of("Qwen3ForCausalLM", quantization_config=fp8)
    assert beside["memory"]["int8_bytes"] == plain["memory"]["int8_bytes"]


def test_a_refused_model(report_of: Any) -> None:
    found = report_of("Qwen3ForCausalLM", hidden_act="gelu")
    assert (found["supported"], found["error"]) == (
        False,
        "config.json: hidden_act 'gelu' is not supported (only silu)",
    )
    found = report_of("Qwen3ForCausalLM", quantization_config={"quant_method": "hqq"})
    assert "quant_method 'hqq' is not supported" in found["error"]
