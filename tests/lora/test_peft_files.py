"""Adapters as PEFT saves them, and those that are refused."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from nanovllm.features.lora.peft_files import fitting, read_adapter, read_peft_config
from tests.checkpoints import read_json, write_json
from tests.lora.adapters import PEFT_CONFIG, slices_of, write_adapter

LINEARS = {
    "model.layers.0.self_attn.q_proj": (24, 16),
    "model.layers.0.self_attn.v_proj": (8, 16),
    "model.layers.1.mlp.down_proj": (16, 32),
}
Q, V, Q10, UP = (
    f"model.layers.{path}"
    for path in ("0.self_attn.q_proj", "0.self_attn.v_proj", "10.self_attn.q_proj", "1.mlp.up_proj")
)
WEIGHTS = "adapter_model.safetensors"


def test_reads_what_was_written(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", LINEARS, r=4, lora_alpha=6, dtype=torch.bfloat16)
    adapter = read_adapter(path, 4)
    assert adapter.path == path
    assert adapter.rank == 4
    assert adapter.linears.keys() == LINEARS.keys()
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    for module, (a, b, scale) in adapter.linears.items():
        assert scale == 1.5
        assert torch.equal(a, tensors[f"base_model.model.{module}.lora_A.weight"])
        assert torch.equal(b, tensors[f"base_model.model.{module}.lora_B.weight"])
    assert fitting(adapter, slices_of(LINEARS)).keys() == LINEARS.keys()


@pytest.mark.parametrize(
    "pattern", ["a?" * 60 + "a" * 60, "(a|a)*b", "(a+)+$", ".*.*.*x", "(?:a?){60}a{60}"]
)
def test_an_expression_of_an_adapter_takes_linear_time(tmp_path: Path, pattern: str) -> None:
    """Symptom: one adapter held the process, and the GIL, for ever."""
    module = f"model.layers.0.self_attn.{'a' * 60}"
    settings = {"target_modules": "all-linear", "rank_pattern": {pattern: 8}}
    path = write_adapter(tmp_path, {module: (8, 8)}, **settings)
    start = time.process_time()
    assert module in read_adapter(path, 8).linears
    assert time.process_time() - start < 5


def test_the_digest_is_of_both_files(tmp_path: Path) -> None:
    paths = [
        write_adapter(tmp_path / "a", LINEARS),
        write_adapter(tmp_path / "b", LINEARS),
        write_adapter(tmp_path / "c", LINEARS, seed=1),
        write_adapter(tmp_path / "d", LINEARS, lora_alpha=17),
    ]
    digests = [read_adapter(path, 8).digest for path in paths]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


@pytest.mark.parametrize(
    ("fields", "module", "rank", "scale"),
    [
        # What PEFT 0.21.2 computes for these.
        ({}, Q, 8, 2.0),
        ({"use_rslora": True}, Q, 8, 5.656854249492381),
        ({"rank_pattern": {"q_proj": 4}}, Q, 4, 4.0),
        ({"rank_pattern": {"q_proj": 4}}, V, 8, 2.0),
        ({"rank_pattern": {"proj": 4}}, Q, 8, 2.0),
        ({"rank_pattern": {"layers.0.self_attn.q_proj": 2}}, Q10, 8, 2.0),
        ({"rank_pattern": {r"^model\.layers\.[01]\.mlp\..*": 2}}, UP, 2, 8.0),
        ({"rank_pattern": {r"^layers\.1\.mlp\..*": 2}}, UP, 8, 2.0),
        ({"rank_pattern": {"q_proj": 4, r".*_proj": 2}}, UP, 2, 8.0),
        ({"rank_pattern": {r".*_proj": 2, "q_proj": 4}}, Q, 2, 8.0),
        ({"alpha_pattern": {"q_proj": 1.5}}, Q, 8, 0.1875),
        (
            {"alpha_pattern": {"(q|k)_proj": 3}, "rank_pattern": {"q_proj": 9}, "use_rslora": True},
            Q,
            9,
            1.0,
        ),
    ],
)
def test_ranks_and_scales(fields: dict[str, Any], module: str, rank: int, scale: float) -> None:
    config = read_peft_config({**PEFT_CONFIG, **fields}, "here")
    assert config.rank_of(module) == rank
    assert config.scale_of(module) == pytest.approx(scale, rel=1e-15)


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|v|down)_proj", list("abc")])
def test_forms_of_target_modules(tmp_path: Path, targets: Any) -> None:
    """The tensors say which linears an adapter changes. A list must have their names."""
    path = write_adapter(tmp_path, LINEARS, target_modules=targets)
    if isinstance(targets, str):
        assert len(read_adapter(path, 8).linears) == 3
    else:
        with pytest.raises(CheckpointError, match=r"is not in target_modules \['a', 'b', 'c'\]"):
            read_adapter(path, 8)


def test_adapters_of_transposed_weights(tmp_path: Path) -> None:
    """PEFT writes fan_in_fan_out of every GPT-2; the factors have the same form."""
    plain = read_adapter(write_adapter(tmp_path / "a", LINEARS), 8)
    found = read_adapter(write_adapter(tmp_path / "b", LINEARS, fan_in_fan_out=True), 8)
    assert found.linears.keys() == plain.linears.keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("layer_replication", [[0, 2]]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [1, 2]),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("peft_type", "IA3"),
        ("a_field_of_next_year", {"on": True}),
        ("rank_pattern", {"((a{99}){99}){99}": 8}),
        ("rank_pattern", {"q_proj(": 8}),
        ("alpha_pattern", {f"{i}.*": 1 for i in range(20)}),
        ("alpha_pattern", {r"(?=a)b": 1}),
        ("alpha_pattern", {r"(a)\1": 1}),
    ],
)
def test_refuses_by_name(tmp_path: Path, field: str, value: Any) -> None:
    path = write_adapter(tmp_path, LINEARS, **{field: value})
    with pytest.raises(UnsupportedModelError, match=field):
        read_adapter(path, 8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", 8.0),
        ("r", True),
        ("r", 10**9),
        ("lora_alpha", float("nan")),
        ("lora_alpha", 1e30),
        ("lora_alpha", "16"),
        ("use_rslora", "yes"),
        ("target_modules", 7),
        ("target_modules", None),
        ("rank_pattern", [8]),
        ("rank_pattern", {"q_proj": -1}),
        ("alpha_pattern", {"q_proj": None}),
    ],
)
def test_refuses_invalid_fields(tmp_path: Path, field: str, value: Any) -> None:
    path = write_adapter(tmp_path, LINEARS)
    write_json(tmp_path / "adapter_config.json", {**PEFT_CONFIG, field: value})
    with pytest.raises(CheckpointError, match=field):
        read_adapter(path, 8)


def changed(path: Path, **tensors: torch.Tensor | None) -> str:
    """Replace tensors of an adapter of LINEARS: by their last names, of the first linear."""
    write_adapter(path, LINEARS)
    found = load_file(path / WEIGHTS)
    for name, tensor in tensors.items():
        key = f"base_model.model.model.layers.0.self_attn.q_proj.{name.replace('__', '.')}"
        found.pop(key, None)
        if tensor is not None:
            found[key] = tensor
    save_file(found, path / WEIGHTS)
    return str(path)


ONES = torch.ones


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lora_A__weight": ONES(7, 16)}, r"q_proj has lora_A \(7, 16\) .* says rank 8"),
        ({"lora_B__weight": ONES(24, 9)}, r"lora_B \(24, 9\), but .* says rank 8"),
        ({"lora_A__weight": None}, r"q_proj has no lora_A\.weight"),
        ({"lora_B__weight": None}, r"q_proj has no lora_B\.weight"),
        ({"lora_A__weight": ONES(8, 16) * torch.nan}, r"q_proj\.lora_A has numbers that are not f"),
        ({"lora_B__weight": ONES(24, 8) / 0}, r"q_proj\.lora_B has numbers that are not finite"),
        ({"lora_A__weight": ONES(8, 16).int()}, "must be a matrix in F32, F16 or BF16"),
        ({"lora_A__weight": ONES(128)}, "must be a matrix"),
        ({"lora_A__weight": ONES(8, 0)}, "must be a matrix"),
        ({"lora_magnitude_vector": ONES(24)}, "lora_magnitude_vector' of DoRA is not supported"),
        ({"lora_B__bias": ONES(24)}, "of lora_bias is not supported"),
        ({"lora_embedding_A": ONES(8, 24)}, "of an embedding is not supported"),
        ({"weight": ONES(24, 16)}, r"q_proj\.weight' is not supported"),
    ],
)
def test_refuses_wrong_tensors(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_adapter(changed(tmp_path, **tensors), 8)


@pytest.mark.parametrize(
    ("linears", "message"),
    [
        ({"model.layers.7.self_attn.q_proj": (24, 16)}, r"layers\.7\.self_attn.* is no linear"),
        ({"model.layers.0.self_attn.q_proj": (25, 16)}, "25 outputs, the model's has 16 and 24"),
        ({"model.layers.0.mlp.experts.3.up_proj": (8, 8)}, "is of experts"),
        (
            {"model.layers.0.self_attn.kv_b_proj": (8, 8)},
            "is of latent attention",
        ),
        ({"lm_head": (8, 8)}, "lm_head is the embedding or the head"),
        ({"model.visual.blocks.0.q_proj": (8, 8)}, "visual.* is no linear"),
    ],
)
def test_refuses_other_models(tmp_path: Path, linears: Any, message: str) -> None:
    path = write_adapter(tmp_path, linears, target_modules="all-linear")
    with pytest.raises(CheckpointError, match=message):
        fitting(read_adapter(path, 8), slices_of(LINEARS))


def test_refuses_a_rank_above_the_engines(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, LINEARS, rank_pattern={"v_proj": 9}, rank_of=rank_of_v)
    with pytest.raises(InvalidRequestError, match="has rank 9, max_lora_rank is 8"):
        read_adapter(path, 8)
    assert read_adapter(path, 9).rank == 9


def rank_of_v(module: str) -> int:
    return 9 if module.endswith("v_proj") else 8


def test_refuses_unsound_files(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", LINEARS)
    weights, config = tmp_path / "a" / WEIGHTS, tmp_path / "a" / "adapter_config.json"
    whole = weights.read_bytes()
    for content in (
        b"",
        whole[:7],
        whole[:100],
        whole[:-1],
        whole + b"x",
        b"\xff" * 64,
        b"\x80\x02",
    ):
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match="adapter_model"):
            read_adapter(path, 8)
    weights.write_bytes(whole)
    read_adapter(path, 8)
    for text in ("", "[]", "{", '{"r": 8, "r": 8}', "[" * 10_000):
        config.write_text(text)
        with pytest.raises(CheckpointError, match="adapter_config"):
            read_adapter(path, 8)


def test_refuses_what_is_not_there_or_outside(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match="has no adapter_config.json"):
            read_adapter(str(missing), 8)
    path = write_adapter(tmp_path / "a", LINEARS)
    weights = tmp_path / "a" / WEIGHTS
    weights.rename(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match="has no adapter_model.safetensors"):
        read_adapter(path, 8)
    (tmp_path / "a" / "adapter_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(UnsupportedModelError, match="is a pickle"):
        read_adapter(path, 8)
    weights.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match="is outside the directory"):
        read_adapter(path, 8)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_adapter(path, 8)


def test_reads_a_link_of_the_hubs_cache(tmp_path: Path) -> None:
    write_adapter(tmp_path / "blobs", LINEARS)
    snapshot = tmp_path / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    for name in (WEIGHTS, "adapter_config.json"):
        (snapshot / name).symlink_to(tmp_path / "blobs" / name)
    assert read_adapter(str(snapshot), 8).rank == 8


def test_the_readers_of_a_config_file(tmp_path: Path) -> None:
    """PEFT's own file is read as it is."""
    path = write_adapter(tmp_path, LINEARS)
    assert read_json(tmp_path / "adapter_config.json") == json.loads(json.dumps(PEFT_CONFIG))
    linears = read_adapter(path, 8).linears.values()
    assert sum(each.a.numel() + each.b.numel() for each in linears) == 8 * 112
