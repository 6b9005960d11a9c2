"""Loading safetensors: every tensor must match, each rank reads its part, memory stays small."""

import ctypes
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config

from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.loading import tensor_files
from nanovllm.loading.hub import open_checkpoint, weight_files
from nanovllm.loading.loader import init_dummy_weights, load_weights
from nanovllm.loading.shards import model_shards
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.options.config import Config
from nanovllm.parallel.rank_setup import check_network
from nanovllm.worker.model_loader import NetworkSpec, build_model
from tests.checkpoints import random_model
from tests.gguf_files import make_gguf

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1003,
    "hidden_size": 32,
    "intermediate_size": 76,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


def build(**changes):
    """Return a model whose parameters are NaN, so that a parameter that is not loaded is found."""
    model = Qwen3ForCausalLM(ModelConfig.from_hf({**CONFIG, **changes}), 64)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model


def shards_by_name(model):
    return {shard.name: shard for _, shards in model_shards(model) for shard in shards}


def random_tensors(model, dtype=torch.float32, seed=0):
    """Return random checkpoint tensors with the names and shapes that `model` loads."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shard.shape, generator=generator).to(dtype)
        for name, shard in shards_by_name(model).items()
        if name not in model.ignored_weights
    }


def load(model, *files):
    load_weights(model, list(files), ignored=model.ignored_weights, progress=False)


def refusal(model, *files):
    with pytest.raises(CheckpointError) as raised:
        load(model, *files)
    return str(raised.value)


@pytest.fixture
def checkpoint(tmp_path):
    """Save tensors as a file and return its path."""

    def save(tensors, name="model.safetensors"):
        save_file(tensors, tmp_path / name)
        return tmp_path / name

    return save


# One rank.


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": False}])
def test_every_parameter_is_loaded(checkpoint, changes):
    model = build(**changes)
    tensors = random_tensors(model)
    load(model, checkpoint(tensors))
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    for name, shard in shards_by_name(model).items():
        if name in tensors:
            assert torch.equal(shard.target, tensors[name]), name


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("expected_dtype", ["float32", "bfloat16", "float16"])
def test_conversion_of_dtypes(checkpoint, saved, expected_dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, expected_dtype))
    try:
        model = build()
    finally:
        torch.set_default_dtype(before)
    tensors = random_tensors(model, saved)
    load(model, checkpoint(tensors))
    for name, shard in shards_by_name(model).items():
        assert shard.target.dtype == getattr(torch, expected_dtype)
        assert torch.equal(shard.target, tensors[name].to(shard.target.dtype)), name


def test_sharded_checkpoint_with_an_index(tmp_path):
    theirs = random_model(Qwen3Config(**CONFIG))
    theirs.save_pretrained(tmp_path, max_shard_size="80KB")
    files = weight_files(open_checkpoint(str(tmp_path)), str(tmp_path))
    assert len(files) > 3
    model = build()
    load(model, *files)
    expected = theirs.state_dict()
    shards = shards_by_name(model)
    assert shards.keys() == expected.keys()
    assert all(torch.equal(shards[name].target, expected[name]) for name in shards)


def test_tied_checkpoint_that_also_holds_the_head(checkpoint):
    """The head's own tensor is ignored: the embedding is used as the head."""
    model = build(tie_word_embeddings=True)
    tensors = random_tensors(model)
    assert "lm_head.weight" not in tensors
    load(model, checkpoint({**tensors, "lm_head.weight": torch.zeros(1003, 32)}))
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_untied_checkpoint_without_a_head_is_refused(checkpoint):
    model = build()
    tensors = random_tensors(model)
    del tensors["lm_head.weight"]
    assert "missing lm_head.weight (1003, 32)" in refusal(model, checkpoint(tensors))


def test_one_error_lists_all_that_does_not_match(checkpoint):
    model = build()
    tensors = random_tensors(model)
    del tensors["model.norm.weight"]
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(76, 32)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(76, 32)
    message = refusal(model, checkpoint(tensors))
    assert set(message.split("\n  ")[1:]) == {
        "missing model.norm.weight (32,)",
        "missing model.layers.0.self_attn.k_proj.bias (12,)",
        "unexpected model.layers.0.self_attn.rotary_emb.inv_freq (3,)",
        "unexpected model.layers.2.mlp.up_proj.weight (76, 32)",
        "misshapen model.layers.1.mlp.down_proj.weight: (76, 32), the config says (32, 76)",
    }


def test_a_long_list_is_cut(checkpoint):
    message = refusal(build(), checkpoint({"x": torch.zeros(1)}))
    assert len(message.splitlines()) == 22
    assert re.search(r"and \d+ more$", message)


def test_one_tensor_in_two_files(checkpoint):
    model = build()
    tensors = random_tensors(model)
    first = checkpoint(tensors, "one.safetensors")
    second = checkpoint({"model.norm.weight": torch.ones(32)}, "two.safetensors")
    message = refusal(model, first, second)
    assert "model.norm.weight is in both one.safetensors and two.safetensors" in message


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda whole: b"", id="empty"),
        pytest.param(lambda whole: whole[:5], id="shorter than its length field"),
        pytest.param(lambda whole: whole[:-1], id="data cut by a byte"),
        pytest.param(lambda whole: whole + b"x", id="a byte too many"),
        pytest.param(lambda whole: b"\xff" * 8 + whole[8:], id="huge header length"),
        pytest.param(lambda whole: whole[:8] + b"x" * 50 + whole[58:], id="header not JSON"),
        pytest.param(lambda whole: b"<html>404</html>" * 100, id="web page"),
    ],
)
def test_a_damaged_file_is_named(checkpoint, damage):
    model = build()
    file = checkpoint(random_tensors(model))
    file.write_bytes(damage(file.read_bytes()))
    message = refusal(model, file)
    assert str(file) in message
    assert "not a sound safetensors file" in message


def test_a_file_that_vanished_is_named(tmp_path):
    assert "gone.safetensors" in refusal(build(), tmp_path / "gone.safetensors")


@pytest.mark.parametrize(
    "dtype",
    ["int64", "int32", "int8", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"],
)
def test_weights_of_another_dtype_are_refused(checkpoint, dtype):
    """Symptom: a checkpoint of integers loads, and its answers make no sense."""
    model = build()
    tensors = random_tensors(model)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(getattr(torch, dtype))
    message = refusal(model, checkpoint(tensors))
    assert re.search(r"model\.norm\.weight has dtype \w+, must have BF16 or F16 or F32", message)
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_an_fp8_parameter_takes_only_fp8(checkpoint):
    model = nn.Module()
    weight = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
    model.part = nn.ParameterDict({"weight": nn.Parameter(weight, requires_grad=False)})
    with pytest.raises(CheckpointError, match=r"has dtype BF16, must have F8_E4M3"):
        load_weights(model, [checkpoint({"part.weight": weight.bfloat16()})], progress=False)
    load_weights(model, [checkpoint({"part.weight": weight})], progress=False)


def write_header(file, header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header",
    [
        {"x": entry(offsets=(0, 9))},
        {"x": entry(offsets=(8, 16))},
        {"x": entry(offsets=(8, 0))},
        {"x": entry(offsets=(-8, 0))},
        {"x": entry(offsets=(0, 2**64))},
        {"x": entry(offsets=(2**63, 2**63 + 8))},
        {"x": entry(), "y": entry()},
        {"x": entry(shape=(1,), offsets=(0, 4)), "y": entry(shape=(1,), offsets=(2, 6))},
        {"x": entry(shape=(2**62, 4))},
        {"x": entry(shape=(-2,))},
        {"x": entry(shape=(2.0,))},
        {"x": entry(dtype="F31")},
        {"x": entry(dtype=3)},
        {"x": {"dtype": "F32"}},
        {"x": 3},
        {"__metadata__": {"a": 1}, "x": entry()},
        b"[" * 100_000,
        b"[]",
    ],
    ids=lambda header: str(header)[:70],
)
def test_a_header_that_lies_is_refused(tmp_path, header):
    file = tmp_path / "model.safetensors"
    write_header(file, header)
    message = refusal(build(), file)
    assert "not a sound safetensors file" in message
    assert len(message) < 600


def test_a_header_that_names_a_tensor_twice(tmp_path):
    file = tmp_path / "model.safetensors"
    one = json.dumps(entry())
    write_header(file, f'{{"x": {one}, "x": {one}}}'.encode())
    assert f"header of {file}: it has the key 'x' twice" in refusal(build(), file)


def test_a_header_of_many_megabytes_is_not_read(tmp_path):
    """The safetensors library reads headers up to 100 MB, which take gigabytes as objects."""
    file = tmp_path / "model.safetensors"
    tensors = {f"tensor{i:070}": entry(shape=(0,), offsets=(0, 0)) for i in range(40_000)}
    write_header(file, {**tensors, "x": entry()})
    assert re.search(r"its header has \d+ bytes; at most 4194304", refusal(build(), file))


def test_names_and_shapes_of_a_header_are_cut(tmp_path):
    file = tmp_path / "model.safetensors"
    names = ("x" * 100_000, "\x1b[31mred")
    many = {name: entry(shape=(*[1] * 10_000, 0), offsets=(0, 0)) for name in names}
    write_header(file, many, b"")
    message = refusal(build(), file)
    assert "unexpected 'xxx" in message
    assert "\x1b" not in message
    assert len(message) < 4000


# Directories, through the function that an engine calls before it builds a model.


def test_pickled_weights_alone_are_refused(tmp_path):
    """nano-vllm ran such a model with uninitialised weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"model.norm.weight": torch.ones(32)}, tmp_path / "pytorch_model.bin")
    config = Config(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"no \.safetensors .*pytorch_model\.bin, which is"):
        check_network(config, open_checkpoint(config.model))


def test_dummy_weights_need_no_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = Config(str(tmp_path), load_format="dummy")
    assert check_network(config, open_checkpoint(config.model)).files == []


class SmallTensors(TorchDispatchMode):
    """Fail when torch allocates a large tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type != "meta":
            assert made.numel() <= 4096
        return made


def save_model(path, **changes):
    """Save random weights with CONFIG, then change the config; return the engine's Config."""
    save_file(random_tensors(build()), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return Config(str(path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 2**24}, r"embed_tokens.weight: \(1003, 32\), .* \(16777216, 32\)"),
        ({"hidden_size": 2**24}, r"misshapen"),
        ({"intermediate_size": 2**24}, r"misshapen .*down_proj.weight: \(32, 76\)"),
        ({"num_attention_heads": 2**20}, r"misshapen .*q_proj"),
        ({"head_dim": 4096}, r"misshapen .*q_norm.weight: \(6,\), the config says \(4096,\)"),
        ({"num_hidden_layers": 1000}, r"num_hidden_layers 1000, but the weights have only"),
        ({"num_hidden_layers": 3}, r"missing model.layers.2"),
        ({"num_hidden_layers": 1}, r"unexpected model.layers.1"),
        ({"attention_bias": False}, r"unexpected model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_sizes_that_the_headers_do_not_confirm_allocate_nothing(tmp_path, changes, said):
    """`check_network` makes no parameter: such a model has up to 2**50 of them."""
    config = save_model(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=said) as raised, SmallTensors():
        check_network(config, open_checkpoint(config.model))
    assert len(str(raised.value)) < 4000


def test_a_sound_checkpoint_passes_the_check(tmp_path):
    config = save_model(tmp_path)
    files = check_network(config, open_checkpoint(config.model)).files
    assert files == [tmp_path / "model.safetensors"]


def save_tied(path, head, names=("model.embed_tokens.weight", "lm_head.weight")):
    """Save a tied model whose file has `head` beside the embedding; return the engine's Config."""
    tensors = random_tensors(build(tie_word_embeddings=True))
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {names[0]: embedding}, path / "model-1.safetensors")
    save_file({names[1]: head(embedding)}, path / "model-2.safetensors")
    (path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    return Config(str(path))


def last_number_changed(embedding):
    changed = embedding.clone()
    changed[-1, -1] += 1
    return changed


@pytest.mark.parametrize("compared", [2**19, 100])
@pytest.mark.parametrize("head", [torch.clone, last_number_changed, torch.Tensor.half])
def test_a_tied_model_is_untied_if_the_file_has_another_head(
    tmp_path, caplog, monkeypatch, head, compared
):
    monkeypatch.setattr(tensor_files, "_COMPARED", compared)
    config = save_tied(tmp_path, head)
    found = check_network(config, open_checkpoint(config.model)).model_config
    assert found.tie_word_embeddings is (head is torch.clone)
    assert caplog.text.count("lm_head.weight differs from model.embed_tokens") == (
        not found.tie_word_embeddings
    )


def test_the_head_of_a_nested_text_model_is_compared(tmp_path):
    names = ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight")
    config = save_tied(tmp_path, last_number_changed, names)
    found = check_network(config, open_checkpoint(config.model)).model_config
    assert not found.tie_word_embeddings


def test_a_tied_model_with_a_head_of_another_shape_is_refused(tmp_path):
    config = save_tied(tmp_path, lambda embedding: embedding[:100].clone())
    with pytest.raises(CheckpointError, match=r"misshapen lm_head.weight: \(100, 32\)"):
        check_network(config, open_checkpoint(config.model))


def test_what_is_not_loaded_is_named_once(checkpoint, caplog):
    model = build(tie_word_embeddings=True)
    ignored = model.ignored_weights | {"visual.", ".k_scale"}
    tensors = random_tensors(model)
    others = ["visual.blocks.0.a", "visual.blocks.1.b", "lm_head.weight"]
    others += [f"model.layers.{layer}.self_attn.k_scale" for layer in range(2)]
    file = checkpoint(tensors | {name: torch.zeros(2) for name in others})
    with caplog.at_level("INFO", logger="nanovllm"):
        load_weights(model, [file], ignored=ignored)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "lm_head.weight, model.layers.*.self_attn.k_scale (2 tensors), visual.* (2 tensors)"
    ]


def test_a_dummy_model_that_fits_no_memory(tmp_path):
    huge = {"hidden_size": 2**24, "intermediate_size": 2**24, "vocab_size": 2**24}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **huge}))
    config = Config(str(tmp_path), load_format="dummy")
    model_config = ModelConfig.from_hf(open_checkpoint(config.model).config)
    with pytest.raises(CheckpointError, match="does not fit into memory"):
        build_model(NetworkSpec(config, model_config, []), 16, torch.device("cpu"), TORCH)


def test_an_unsupported_model_is_refused_before_its_weights_are_searched(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["Other"]}))
    config = Config(str(tmp_path))
    with pytest.raises(CheckpointError, match="architecture 'Other' is not supported"):
        check_network(config, open_checkpoint(config.model))


# Dummy weights.


def test_dummy_weights_are_finite_and_not_constant():
    model = build()
    init_dummy_weights(model)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.ndim == 1 or parameter.std() > 0.01, name
    assert (model.model.norm.weight == 1).all()
    assert (model.model.layers[0].self_attn.qkv_proj.bias == 0).all()


def test_dummy_weights_follow_the_seed():
    models = [build(), build(), build()]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        init_dummy_weights(model, seed)
    first, again, other = (model.model.embed_tokens.weight for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dummy_weights_leave_the_global_generator_alone():
    model = build()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    init_dummy_weights(model)
    assert torch.equal(torch.rand(3), expected)


# Several ranks.


def rank_slice(tensor, rank, size, dim=0):
    return tensor.chunk(size, dim)[rank]


def expected_parameters(tensors, rank, size):
    """Return the parameters of layer 0 on a rank, cut by hand: 8 query and 2 KV heads of 6."""
    prefix = "model.layers.0"

    def qkv(kind):
        q, k, v = (tensors[f"{prefix}.self_attn.{name}_proj.{kind}"] for name in "qkv")
        kv_head = rank * 2 // size
        heads = slice(kv_head * 6, (kv_head + max(2 // size, 1)) * 6)
        return torch.cat([rank_slice(q, rank, size), k[heads], v[heads]])

    gate_up = [
        rank_slice(tensors[f"{prefix}.mlp.{name}_proj.weight"], rank, size)
        for name in ("gate", "up")
    ]
    return {
        "self_attn.qkv_proj.weight": qkv("weight"),
        "self_attn.qkv_proj.bias": qkv("bias"),
        "self_attn.o_proj.weight": rank_slice(
            tensors[f"{prefix}.self_attn.o_proj.weight"], rank, size, dim=1
        ),
        "self_attn.o_proj.bias": tensors[f"{prefix}.self_attn.o_proj.bias"],
        "self_attn.q_norm.weight": tensors[f"{prefix}.self_attn.q_norm.weight"],
        "self_attn.k_norm.weight": tensors[f"{prefix}.self_attn.k_norm.weight"],
        "mlp.gate_up_proj.weight": torch.cat(gate_up),
        "mlp.down_proj.weight": rank_slice(
            tensors[f"{prefix}.mlp.down_proj.weight"], rank, size, dim=1
        ),
        "input_layernorm.weight": tensors[f"{prefix}.input_layernorm.weight"],
        "post_attention_layernorm.weight": tensors[f"{prefix}.post_attention_layernorm.weight"],
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_takes_its_part(checkpoint, as_rank, size):
    """With 4 ranks, two ranks hold copies of each KV head."""
    tensors = random_tensors(build())
    file = checkpoint(tensors)
    for rank in range(size):
        as_rank(rank, size)
        model = build()
        load(model, file)
        expected = expected_parameters(tensors, rank, size)
        found = dict(model.model.layers[0].named_parameters())
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            assert torch.equal(parameter, expected[name]), (rank, name)


@pytest.mark.parametrize("vocab_size", [1003, 5, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_vocabularies_are_the_whole_then_zeros(checkpoint, as_rank, size, vocab_size):
    """With 4 ranks and 5 tokens the last rank's slice is only padding."""
    tensors = random_tensors(build(vocab_size=vocab_size))
    file = checkpoint(tensors)
    embeddings, heads = [], []
    for rank in range(size):
        as_rank(rank, size)
        model = build(vocab_size=vocab_size)
        load(model, file)
        embeddings.append(model.model.embed_tokens.weight)
        heads.append(model.lm_head.weight)
    for name, parts in (("model.embed_tokens.weight", embeddings), ("lm_head.weight", heads)):
        assert len({part.shape for part in parts}) == 1
        whole = torch.cat(parts)
        assert torch.equal(whole[:vocab_size], tensors[name])
        assert (whole[vocab_size:] == 0).all()


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1}])
@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_shards_rebuild_the_checkpoint(checkpoint, as_rank, size, changes):
    tensors = random_tensors(build(**changes))
    file = checkpoint(tensors)
    rebuilt = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    for rank in range(size):
        as_rank(rank, size)
        model = build(**changes)
        load(model, file)
        assert not any(parameter.isnan().any() for parameter in model.parameters())
        for name, shard in shards_by_name(model).items():
            if name in model.ignored_weights:
                continue
            length = min(shard.target.shape[shard.dim], shard.shape[shard.dim] - shard.start)
            part = shard.target.narrow(shard.dim, 0, length)
            place = rebuilt[name].narrow(shard.dim, shard.start, length)
            assert place.isnan().all() or torch.equal(place, part), name
            place.copy_(part)
    assert all(torch.equal(rebuilt[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("changes", "size", "named"),
    [
        ({}, 3, r"num_attention_heads \(8\)"),
        ({"num_key_value_heads": 1, "num_attention_heads": 6, "intermediate_size": 77}, 2, "77"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, r"num_key_value_heads \(4\)"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(as_rank, changes, size, named):
    as_rank(0, size)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size {size} .*{named}"):
        build(**changes)


# Memory.

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def memory(field):
    """Return VmRSS or VmHWM, its peak, of this process in bytes."""
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


@pytest.mark.skipif(not CLEAR.exists(), reason="only Linux forgets a peak")
@pytest.mark.parametrize("count", [1, 4])
def test_loading_needs_little_memory_beside_the_weights(tmp_path, count):
    """The weights are 160 MB, in one tensor (as an embedding may be) or in four."""
    rows = 40_000 // count
    file = tmp_path / "model.safetensors"
    save_file({f"parts.{i}.weight": torch.ones(rows, 1024) for i in range(count)}, file)
    ctypes.CDLL(None).malloc_trim(0)  # pages that were freed are not used again
    model = nn.Module()
    model.parts = nn.ModuleList(
        nn.Embedding(rows, 1024, _weight=torch.empty(rows, 1024)) for _ in range(count)
    )
    CLEAR.write_text("5", encoding="utf-8")
    before = memory("VmRSS")
    load_weights(model, [file], progress=False)
    growth = memory("VmHWM") - before
    assert all((part.weight[::1000] == 1).all() for part in model.parts)
    size = file.stat().st_size
    file.unlink()
    assert size * 0.5 < growth < size + 100 * 2**20


@pytest.mark.parametrize("maps", [False, True])
def test_a_file_cut_after_its_header_was_read(maps, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(6000.0).view(60, 100)}, file)
    header = tensor_files.read_header(file)
    rows = (slice(7, 60), slice(0, 100))
    tensors = tensor_files.TensorFile(file, header, maps=maps)
    found = tensors.read("weight", rows, raw=False)
    assert torch.equal(found, torch.arange(700.0, 6000.0).view(53, 100))
    assert (str(file) in Path("/proc/self/maps").read_text(encoding="utf-8")) == maps
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="ends within tensor weight"):
        tensors.read("weight", rows, raw=False)


def test_a_gguf_file_cut_after_its_header_was_read(tmp_path):
    file = Path(make_gguf(tmp_path, kind="Q8_0")[0])
    header = tensor_files.read_header(file)
    tensors = tensor_files.TensorFile(file, header)
    name = max(header, key=lambda name: header[name].offset)
    slices = tuple(slice(0, size) for size in header[name].shape)
    found = tensors.read(name, slices, raw=True)
    assert len(found) == slices[0].stop
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert str(file) not in maps, "cutting it would end the process"
    os.truncate(file, max(info.offset for info in header.values()))
    with pytest.raises(CheckpointError, match="ends within its tensors"):
        tensors.read(name, slices, raw=False)
