"""What llama.cpp's converter changes is undone, number by number and block by block."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm.errors import CheckpointError
from nanovllm.loading.gguf import read_gguf, read_rows
from nanovllm.loading.gguf_family import Order, Reading, rotary_pairs
from nanovllm.loading.hub import open_checkpoint
from tests.checkpoints import random_model
from tests.gguf_converter import convert, tiled
from tests.gguf_files import to_llama_order

ORDERS = [  # number of rows, the order, and how the converter makes it
    (24, rotary_pairs(3), lambda rows: to_llama_order(rows, 3)),
    (24, Order(2, 3), lambda rows: tiled(rows, 2, 4, 3)),
    (24, Order(4), lambda rows: tiled(rows, 4, 6, 1)),
    (30, Order(4, 3, start=6), lambda rows: torch.cat([rows[:6], tiled(rows[6:], 4, 2, 3)])),
    (12, Order(1, 4), lambda rows: rows),
]


@pytest.mark.parametrize(("count", "order", "change"), ORDERS)
def test_orders(count, order, change):
    rows = torch.arange(count)[:, None]
    stored = change(rows)
    assert torch.equal(stored[order.indices(count)], rows)
    assert not order.misfit(count)


@pytest.mark.parametrize("count", [0, 6, 7, 17, 19])
def test_what_fits_no_order(count):
    assert Order(2, 3, start=6).misfit(count) == "must have 6 and a multiple of 6"


def test_orders_of_blocks():
    order = Order(2, 64, start=128)
    numbers = order.indices(128 + 6 * 64).reshape(-1, 32)
    blocks = order.of_blocks(32)
    assert np.array_equal(numbers[:, 0] // 32, blocks.indices(len(numbers)))
    assert order.of_blocks(128) is None
    assert order._replace(start=16).of_blocks(32) is None
    assert Reading(columns=order).moves_whole_blocks(64)
    assert not Reading(columns=order).moves_whole_blocks(256)
    assert not Reading(offset=1.0).moves_whole_blocks(32)


SIZES = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
LFM2_SIZES = {
    **SIZES,
    "head_dim": 12,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
CASES = {
    "qwen35": ("qwen3_5_text", SIZES),
    "qwen35moe": ("qwen3_5_moe_text", {**SIZES, **EXPERTS}),
    "lfm2": ("lfm2", LFM2_SIZES),
    "lfm2moe": ("lfm2_moe", {**LFM2_SIZES, **EXPERTS, "num_dense_layers": 1}),
}


def make(architecture, path, **options):
    model_type, sizes = CASES[architecture]
    model = random_model(AutoConfig.for_model(model_type, **sizes))
    return model, Path(convert(model, path / "model.gguf", architecture, **options))


def per_expert(name, tensor):
    """Yield the linears of each expert, by the names of checkpoints."""
    stem, _, kind = name.rpartition(".")
    names = (
        ("w1", "w3", "w2") if ".feed_forward." in name else ("gate_proj", "up_proj", "down_proj")
    )
    parts = tensor.chunk(2, dim=1) if kind == "gate_up_proj" else [tensor]
    for linear, part in zip(names[:2] if len(parts) == 2 else names[2:], parts, strict=True):
        for index, weight in enumerate(part):
            yield f"{stem}.{index}.{linear}.weight", weight


@pytest.mark.parametrize("architecture", CASES)
def test_all_tensors_are_transformers(architecture, tmp_path):
    model, file = make(architecture, tmp_path)
    expected = {}
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            stacked = ".experts." in name
            expected |= dict(per_expert(name, tensor)) if stacked else {name: tensor}
    weights = read_gguf(file).weights
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        found = read_rows(file, weights[name], slice(None), raw=False)
        assert found.shape == tensor.shape, name
        close = 1e-6 if "norm" in name or name.endswith("A_log") else 0
        assert np.allclose(found, tensor, rtol=close, atol=close), name
        some = slice(1, 3)
        assert np.array_equal(read_rows(file, weights[name], some, raw=False), found[some]), name


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe", "lfm2"])
def test_transformers_reads_the_file_alike(architecture, tmp_path):
    """So what the test's converter writes is what llama.cpp's does."""
    tokens = [f"t{index}" for index in range(67)]
    model, file = make(architecture, tmp_path, metadata={"tokenizer.ggml.tokens": tokens})
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    found = read.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-6), name
    config = open_checkpoint(str(file)).config
    own = {"linear_", "layer_types", "conv_L", "norm_eps", "num_hidden", "num_dense", "tie_word"}
    for key, value in config.items():
        if any(part in key for part in own) and hasattr(read.config, key):
            assert getattr(read.config, key) == pytest.approx(value), key


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_value_heads_move_as_whole_blocks(kind, tmp_path):
    """Of heads of 32, as of those of 128: the columns of ssm_out, and rows of others."""
    _, file = make("qwen35", tmp_path, kind=kind)
    weights = read_gguf(file).weights
    weight = weights["model.layers.0.linear_attn.out_proj.weight"]
    assert weight.tensor.type.name == kind
    assert weight.has_blocks
    exact = read_rows(file, weight, slice(None), raw=False)
    blocks = read_rows(file, weight, slice(None), raw=True)
    found = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(found, exact)
    assert np.array_equal(read_rows(file, weight, slice(5, 9), raw=True), blocks[5:9])


def test_heads_that_cut_blocks(tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, "qwen35", ("qwen3_5_text", {**SIZES, "linear_value_head_dim": 16}))
    _, file = make("qwen35", tmp_path, kind="Q8_0")
    weight = read_gguf(file).weights["model.layers.0.linear_attn.out_proj.weight"]
    assert not weight.has_blocks
    assert read_rows(file, weight, slice(None), raw=False).shape == (48, 96)


def test_the_layer_that_drafts(tmp_path):
    """It is the last block of the file, with names of its own, and no layer of the model."""
    shapes = {
        "nextn.eh_proj.weight": (48, 96),
        "nextn.enorm.weight": (48,),
        "nextn.hnorm.weight": (48,),
        "nextn.shared_head_norm.weight": (48,),
        "attn_norm.weight": (48,),
        "attn_q.weight": (128, 48),
    }
    extra = {f"blk.4.{name}": torch.full(shape, 1.5) for name, shape in shapes.items()}
    types = [True, True, True, False, False]
    metadata = {"block_count": 5, "nextn_predict_layers": 1, "attention.recurrent_layers": types}
    _, file = make("qwen35", tmp_path, metadata=metadata, extra=extra)
    config, weights = open_checkpoint(str(file)).config, read_gguf(file).weights
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 4
    drafting = {name for name in weights if name.startswith("mtp.")}
    assert drafting == {
        "mtp.fc.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.norm.weight",
        "mtp.layers.0.input_layernorm.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
    }
    for name in drafting:
        found = read_rows(file, weights[name], slice(None), raw=False)
        assert (found == (0.5 if "norm" in name else 1.5)).all(), name


@pytest.mark.parametrize(
    ("interval", "types"), [(None, "lllf"), (2, "lflf"), (3, "llfl"), (1, "ffff")]
)
def test_types_of_layers_without_a_list(interval, types, tmp_path):
    metadata = {"attention.recurrent_layers": None, "full_attention_interval": interval}
    _, file = make("qwen35", tmp_path, metadata=metadata)
    names = {"l": "linear_attention", "f": "full_attention"}
    assert open_checkpoint(str(file)).config["layer_types"] == [names[kind] for kind in types]


@pytest.mark.parametrize(
    ("architecture", "metadata", "shapes", "said"),
    [
        ("qwen35", {"nextn_predict_layers": 4}, {}, r"nextn_predict_layers 4 must be below"),
        ("qwen35", {"ssm.group_count": 4}, {}, r"time_step_rank 6 is not .*group_count 4"),
        ("qwen35", {"ssm.inner_size": 100}, {}, r"divides ssm\.inner_size 100"),
        ("qwen35", {"ssm.state_size": 0}, {}, r"ssm\.state_size must be an integer"),
        ("qwen35", {"ssm.conv_kernel": None}, {}, r"ssm\.conv_kernel must be an integer"),
        ("qwen35", {"attention.recurrent_layers": [True]}, {}, r"a list of 4 bool"),
        ("qwen35", {"full_attention_interval": 0, "attention.recurrent_layers": None}, {}, "inter"),
        ("qwen35", {"ssm.dt_b_c_rms": True}, {}, r"dt_b_c_rms True is not supported"),
        ("qwen35", {}, {"blk.0.attn_qkv.weight": (48, 48)}, r"48 rows, must have 48 and a mult"),
        ("qwen35", {}, {"blk.0.ssm_out.weight": (48, 100)}, r"100 columns, must have 0 and"),
        ("qwen35", {}, {"blk.0.ssm_a": (7,)}, r"ssm_a' has 7 rows, must have"),
        ("qwen35moe", {"expert_count": None}, {}, r"expert_count must be an integer"),
        ("qwen35moe", {"expert_gating_func": 2}, {}, r"expert_gating_func 2 is not supported"),
        ("lfm2", {"attention.head_count_kv": 2}, {}, r"head_count_kv must be a list of 4 int"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, {}, r"head_count_kv must be a list of 4"),
        ("lfm2", {"attention.head_count_kv": [0, 1, 2, 0]}, {}, r"equally many"),
        ("lfm2", {"attention.head_count_kv": [0] * 4}, {}, r"head_count_kv must be an integer"),
        ("lfm2", {"attention.sliding_window": 64}, {}, r"sliding_window 64 is not supported"),
        ("lfm2", {"shortconv.l_cache": None}, {}, r"l_cache must be an integer"),
        ("lfm2moe", {"leading_dense_block_count": 9}, {}, r"leading_dense_block_count must be"),
        ("lfm2moe", {"expert_gating_func": 1}, {}, r"expert_gating_func 1 is not supported"),
    ],
)
def test_what_is_refused(architecture, metadata, shapes, said, tmp_path):
    _, file = make(architecture, tmp_path, metadata=metadata, shapes=shapes)
    with pytest.raises(CheckpointError, match=said) as raised:
        open_checkpoint(str(file))
    assert str(file) in str(raised.value)
