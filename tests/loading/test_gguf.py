"""GGUF files: each type against its own dequantisation, the bits that stay, and settings."""

import dataclasses
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from nanovllm import Config, SamplingParams
from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.features.quantization.gguf import BLOCK_BITS, unpack_blocks
from nanovllm.features.quantization.integer import IntWeight
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.layers.linear import WeightModule
from nanovllm.loading import gguf_header
from nanovllm.loading.gguf import read_gguf, read_rows
from nanovllm.loading.gguf_family import rotary_pairs
from nanovllm.loading.hub import open_checkpoint
from nanovllm.models.model_config import ModelConfig
from nanovllm.parallel.rank_setup import check_network
from nanovllm.utils import distributed
from nanovllm.worker.model_loader import NetworkSpec, build_model
from tests.gguf_files import KEPT, TYPES, make_gguf

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
OPTIONS = {"max_model_len": 64, "num_kvcache_blocks": 32, "kvcache_block_size": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)


def answer(make_llm, model, **options):
    """Return the tokens and log-probabilities of a greedy continuation."""
    llm = make_llm(model, **{**OPTIONS, **options})
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    completion = output.outputs[0]
    return completion.token_ids, [
        {token: entry.logprob for token, entry in position.items()}
        for position in completion.logprobs
    ]


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_is_its_own_dequantisation(make_llm, tmp_path, kind):
    """The rows of q and k are in llama.cpp's order, in which each type has whole blocks."""
    file, wide = make_gguf(tmp_path, "llama", kind)
    assert answer(make_llm, file, dtype="float32") == answer(make_llm, wide, dtype="float32")


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 32}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True, "head_dim": 128}),
    ],
)
def test_each_family(make_llm, tmp_path, model_type, config):
    file, wide = make_gguf(tmp_path, model_type, "Q5_1", **config)
    assert answer(make_llm, file, dtype="float32") == answer(make_llm, wide, dtype="float32")


@pytest.mark.parametrize("kind", KEPT)
def test_the_bits_that_stay_are_the_same_numbers(tmp_path, kind):
    """In bfloat16: the product with each unit vector, and each row of an embedding."""
    file, _ = make_gguf(tmp_path, "llama", kind)
    name = "model.layers.1.self_attn.k_proj.weight"
    weight = read_gguf(Path(file)).weights[name]
    assert weight.reading.rows == rotary_pairs(2)
    exact = torch.from_numpy(read_rows(Path(file), weight, slice(None), raw=False))
    blocks = torch.from_numpy(read_rows(Path(file), weight, slice(None), raw=True))
    found = unpack_blocks(blocks, kind)
    assert found.bits == BLOCK_BITS[kind]
    low, high = map(int, found.values.aminmax())
    assert -(2 ** (found.bits - 1)) <= low < high < 2 ** (found.bits - 1)
    wide = IntWeight(found, torch.float32)
    assert torch.equal(wide.embedding(torch.arange(len(exact))), exact)
    rounded = IntWeight(found, torch.bfloat16)
    unit_vectors = torch.eye(exact.shape[1], dtype=torch.bfloat16)
    assert torch.equal(rounded.apply(unit_vectors), exact.bfloat16().T)


def kept_types(llm):
    """Return the block type of each matrix of the model, by its path."""
    model = llm.engine.executor._runner.network.model
    return {
        path: getattr(module.quantized, "block_type", None)
        for path, module in model.named_modules()
        if isinstance(module, WeightModule)
    }


@pytest.mark.parametrize("tied", [False, True])
def test_what_stays_in_its_bits(make_llm, tmp_path, caplog, tied):
    kinds = {
        "token_embd.weight": "Q8_0",
        "output.weight": "Q6_K",
        "blk.0.attn_v.weight": "Q5_0",  # so q, k and v of this layer are converted
        "blk.1.ffn_down.weight": "Q4_1",
    }
    file, _ = make_gguf(tmp_path, "llama", "Q4_0", kinds=kinds, tie_word_embeddings=tied)
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        llm = make_llm(file, **OPTIONS)
    found = kept_types(llm)
    assert found["model.embed_tokens"] == "Q8_0"
    assert found["lm_head"] == ("Q8_0" if tied else None)
    assert found["model.layers.0.self_attn.qkv_proj"] is None
    assert found["model.layers.1.self_attn.qkv_proj"] == "Q4_0"
    assert found["model.layers.0.mlp.gate_up_proj"] == "Q4_0"
    assert found["model.layers.1.mlp.down_proj"] == "Q4_1"
    (line,) = [r.getMessage() for r in caplog.records if "stay in their bits" in r.getMessage()]
    assert "stay in their bits: 10 Q4_0, 1 Q4_1, 1 Q8_0; converted to bfloat16: 5 F32, " in line
    assert "2 Q4_0, 1 Q5_0" in line


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"dtype": "float32"}, set()),
        ({"quantization": "none"}, set()),
        ({"quantization": "int4"}, {"Q4_0"}),
        ({"quantization": "int8"}, {"Q4_0", "Q8_0"}),
        ({}, {"Q4_0", "Q8_0"}),
        ({"native_kernels": False}, {"Q4_0", "Q8_0"}),
    ],
)
def test_what_the_options_convert(make_llm, tmp_path, options, kinds):
    file, _ = make_gguf(tmp_path, "qwen3", "Q4_0", kinds={"output.weight": "Q8_0"})
    llm = make_llm(file, **OPTIONS, **options)
    assert set(kept_types(llm).values()) - {None} == kinds
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_the_bits_that_stay_answer_as_their_numbers_do(make_llm, tmp_path, kind):
    """The kernels round the inputs, so the log-probabilities are only near."""
    file, wide = make_gguf(tmp_path, "qwen2", kind, tie_word_embeddings=True)
    _, expected = answer(make_llm, wide, dtype="float32")
    _, found = answer(make_llm, file)
    common = expected[0].keys() & found[0].keys()
    assert len(common) >= 2
    assert all(abs(expected[0][token] - found[0][token]) < 0.25 for token in common)


@pytest.mark.long
def test_tensor_parallel(make_llm, tmp_path):
    """Each rank reads its rows, columns and blocks, whether they stay in their bits or not."""
    kinds = {"attn_q": "Q5_0", "attn_output": "F16", "ffn_down": "Q5_1", "ffn_up": "Q8_0"}
    file, _ = make_gguf(
        tmp_path, "llama", "Q4_1", kinds={f"blk.0.{k}.weight": v for k, v in kinds.items()}
    )
    options = {"native_kernels": False}
    _, expected = answer(make_llm, file, **options)
    _, found = answer(make_llm, file, tensor_parallel_size=2, **options)
    common = expected[0].keys() & found[0].keys()
    assert len(common) >= 3
    assert all(abs(expected[0][token] - found[0][token]) < 0.1 for token in common)


def test_ranks_that_cut_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "_tensor_parallel", distributed.TensorParallel(1, 2))
    file, _ = make_gguf(tmp_path, "llama", "Q8_0", intermediate_size=32)
    config = Config(file, tensor_parallel_size=2)
    model_config = ModelConfig.from_hf(open_checkpoint(file).config)
    spec = NetworkSpec(config, model_config, [Path(file)])
    with pytest.raises(ConfigError, match=r"cuts .*down_proj\.weight.* within a Q8_0 block of 32"):
        build_model(spec, 16, torch.device("cpu"), TORCH)
    spec = spec._replace(config=dataclasses.replace(config, quantization="none"))
    build_model(spec, 16, torch.device("cpu"), TORCH)


# Which file.


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_gguf(tmp_path_factory.mktemp("gguf"), "llama", "Q8_0")[0]


def test_a_directory_with_one_file(small, tmp_path):
    shutil.copy(small, tmp_path / "only.gguf")
    (tmp_path / "README.md").touch()
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.path == tmp_path / "only.gguf"
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.tokenizer_path is None
    assert checkpoint.eos_token_ids == {7}


def test_a_directory_with_several_files(tmp_path):
    for name in ("a-Q4_0.gguf", "b-Q8_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF files; name one.*a-Q4_0.gguf, b-Q8_0"):
        open_checkpoint(str(tmp_path))


def test_a_link_to_a_file(small, tmp_path):
    (tmp_path / "link.gguf").symlink_to(small)
    assert open_checkpoint(str(tmp_path / "link.gguf")).path == tmp_path / "link.gguf"
    with pytest.raises(CheckpointError, match="is outside the directory"):  # nobody named it
        open_checkpoint(str(tmp_path))


def test_a_fifo_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "x.gguf")
    for model in (tmp_path, tmp_path / "x.gguf"):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            open_checkpoint(str(model))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"GGUF file '.*x\.gguf' does not exist"):
        open_checkpoint(str(tmp_path / "x.gguf"))


# What is refused by name.


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (
            {"general.architecture": "klingon"},
            r"general\.architecture 'klingon' is not supported \(.*ernie4_5, .*llama",
        ),
        ({"llama.expert_count": 8}, r"llama\.expert_count 8 is not supported"),
        ({"llama.attention.causal": False}, r"llama\.attention\.causal False is not supported"),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale 0\.5 is not supported"),
        ({"llama.rope.scaling.type": "other"}, r"scaling\.type 'other' is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, r"has no tensor rope_factors_short\.weight"),
        ({"llama.rope.scaling.type": "linear"}, r"llama\.rope\.scaling\.factor must be"),
        ({"llama.rope.dimension_count": 32}, r"dimension_count 32 .*must be the head size, 64"),
        ({"llama.attention.value_length": 32}, r"value_length 32 is not supported"),
        ({"llama.attention.head_count": [4, 4]}, r"attention\.head_count must be an integer"),
        ({"llama.block_count": None}, r"llama\.block_count must be an integer"),
        ({"llama.context_length": 0}, r"context_length must be an integer from 1"),
        ({"llama.attention.layer_norm_rms_epsilon": 2.0}, r"rms_epsilon must be from 1e-30 to 1"),
        ({"llama.rope.freq_base": float("nan")}, r"rope\.freq_base must be from 2 to 1e\+12"),
        ({"tokenizer.ggml.eos_token_id": 307}, r"eos_token_id must be an integer from 0 to 306"),
        ({"split.count": 2}, r"one part of a split model: merge"),
        (
            {"llama.attention.head_count_kv": 3},
            r"attn_k.weight' has 128 rows, must .* of 6",
        ),
        ({"llama.block_count": 2000}, r"its metadata as a config.json: num_hidden_layers must"),
    ],
)
def test_settings_that_are_refused(tmp_path, metadata, said):
    file, _ = make_gguf(tmp_path, "llama", metadata=metadata)
    with pytest.raises(CheckpointError, match=said) as raised:
        check_network(Config(file), open_checkpoint(file))
    assert file in str(raised.value)


def test_other_types_are_refused_by_name(small, monkeypatch):
    monkeypatch.delitem(gguf_header.GGUF_TYPES, 8)  # as if it were not read
    with pytest.raises(
        UnsupportedModelError, match=r"tensor .* has type Q8_0, which is not supported \(F32, F16"
    ):
        gguf_header.read_gguf_header(Path(small))


def test_weights_that_do_not_match(make_llm, tmp_path):
    file, _ = make_gguf(tmp_path, "llama", metadata={"llama.block_count": 3})
    with pytest.raises(
        CheckpointError, match=r"do not match its metadata:\n  missing model\.layers\.2"
    ):
        make_llm(file, **OPTIONS)


def test_what_a_file_recommends_for_sampling(tmp_path):
    keys = {"temp": 0.2, "top_k": 30, "top_p": 0.9, "min_p": 0.1, "penalty_repeat": 1.1}
    metadata = {f"general.sampling.{key}": value for key, value in keys.items()}
    file, _ = make_gguf(tmp_path, "qwen3", "F32", metadata=metadata, vocab_size=20)
    assert open_checkpoint(file).generation_config == {
        "temperature": 0.2,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }
