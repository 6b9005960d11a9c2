"""Linears in FP8: loading weights and scales by parts and ranks, and the engine's tokens.

"Dequantised" means the float64 or float32 values of an FP8 weight times its scales.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams
from nanovllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from nanovllm.features.quantization.integer import IntWeight
from nanovllm.features.quantization.quantized_fp8 import Fp8Format
from nanovllm.features.quantization.weight_formats import store_as
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.loading.loader import load_weights
from tests.checkpoints import copy_checkpoint, make_fp8_checkpoint, to_fp8

PROMPTS = [[1, 2, 3], list(range(20, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def model_of(names, rows, columns):
    """Return random tensors of a checkpoint, and the dequantised weights by name."""
    generator = torch.Generator().manual_seed(0)
    tensors, expected = {}, {}
    for name, shape in names.items():
        weight = torch.randn(shape, generator=generator)
        tensors[f"{name}.weight"], scales, expected[name] = to_fp8(weight, rows, columns)
        tensors[f"{name}.weight_scale_inv"] = scales
    return tensors, expected


def expect_fp8(module, prefix, block, *excluded):
    """Prepare `module`, at path `prefix` of a model, for FP8 in blocks; return the model."""
    parent, name = prefix.split(".")
    model = torch.nn.ModuleDict({parent: torch.nn.ModuleDict({name: module})})
    sizes = {"activation_scheme": "dynamic", "weight_block_size": list(block)}
    store_as(model, Fp8Format({**sizes, "ignored_layers": list(excluded)}))
    return model


def load(module, path, block):
    """Load `module` from the file at `path`; return its dequantised weight in float64."""
    model = expect_fp8(module, "attn.proj", block)
    assert module.weight.is_meta
    load_weights(model, [path], progress=False)
    method = module.quantized.method(torch.float32, TORCH)
    return method.embedding(torch.arange(module.output_size)).double()


# Blocks of 8 x 16 divide all shapes below, blocks of 5 x 7 none.
FORMATS = pytest.mark.parametrize(("rows", "columns"), [(8, 16), (5, 7)])


@FORMATS
@pytest.mark.parametrize("size", [1, 2])
def test_every_part_has_its_own_blocks(rows, columns, size, as_rank, tmp_path):
    shapes = {"attn.q_proj": (64, 48), "attn.k_proj": (16, 48), "attn.v_proj": (16, 48)}
    tensors, expected = model_of(shapes, rows, columns)
    save_file(tensors, tmp_path / "model.safetensors")
    for rank in range(size):
        as_rank(rank, size)
        layer = QKVParallelLinear(48, 8, 2, 8, bias=False)
        loaded = load(layer, tmp_path / "model.safetensors", (rows, columns))
        ours = torch.cat([weight.chunk(size)[rank] for weight in expected.values()])
        assert torch.allclose(loaded, ours, rtol=1e-6)


@FORMATS
@pytest.mark.parametrize("size", [1, 2])
def test_inputs_are_split_with_their_blocks(rows, columns, size, as_rank, tmp_path):
    if size == 2 and columns == 7:
        columns = 8  # 7 does not divide a rank's columns
    tensors, expected = model_of({"attn.proj": (20, 96)}, rows, columns)
    save_file(tensors, tmp_path / "model.safetensors")
    for rank in range(size):
        as_rank(rank, size)
        layer = RowParallelLinear(96, 20, bias=False)
        loaded = load(layer, tmp_path / "model.safetensors", (rows, columns))
        assert torch.allclose(loaded, expected["attn.proj"].chunk(size, 1)[rank], rtol=1e-6)


def test_ranks_do_not_cut_blocks_of_inputs(as_rank):
    as_rank(1, 2)
    rule = r"tensor_parallel_size 2 cuts mlp.down.weight \(64, 96\) within a group of 32 inputs"
    with pytest.raises(ConfigError, match=rule):
        expect_fp8(RowParallelLinear(96, 64, bias=False), "mlp.down", (32, 32))


def test_linears_computed_as_one_are_excluded_as_one():
    layer = MergedColumnParallelLinear(64, {"gate": 96, "up": 96}, bias=False)
    with pytest.raises(UnsupportedModelError, match=r"mlp.gate, mlp.up are computed as one"):
        expect_fp8(layer, "mlp.gate_up", (8, 8), "mlp.up")
    expect_fp8(layer, "mlp.gate_up", (8, 8), "mlp")
    assert layer.weight.dtype == torch.float32
    assert layer.quantized is None


# The engine.


@pytest.fixture(scope="module")
def checkpoints(random_model, tmp_path_factory):
    """Paths of the random model in FP8 and dequantised to float32, by kind of scales."""
    return {
        kind: make_fp8_checkpoint(random_model, tmp_path_factory.mktemp(kind), kind)
        for kind in ("blocks", "channels", "tensors")
    }


def tokens(llm):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("kind", ["blocks", "channels", "tensors"])
def test_an_fp8_checkpoint_gives_the_tokens_of_the_dequantised_one(kind, checkpoints, make_llm):
    fp8, dequantised = checkpoints[kind]
    expected = tokens(make_llm(dequantised))
    assert tokens(make_llm(fp8)) == expected


@pytest.mark.long
def test_two_ranks(checkpoints, make_llm):
    fp8, dequantised = checkpoints["blocks"]
    assert tokens(make_llm(fp8, tensor_parallel_size=2)) == tokens(make_llm(dequantised))


def test_the_weights_in_16_bits_are_rounded_if_the_user_asks(checkpoints, make_llm):
    """And those in FP8, which a CPU would widen to 16 bits."""
    fp8, plain = checkpoints["blocks"]
    llm = make_llm(fp8, quantization="int8")
    model = llm.engine.executor._runner.network.model
    assert isinstance(model.lm_head.method, IntWeight)
    linears = [module for module in model.modules() if isinstance(module, LinearBase)]
    assert {type(linear.method) for linear in linears} == {IntWeight}
    assert tokens(llm) == tokens(make_llm(plain, quantization="int8"))


def test_linears_in_fp8_are_not_converted_to_plain_numbers(checkpoints, make_llm):
    with pytest.raises(ConfigError, match="quantization 'none': .* is in .*, .*leave it out"):
        make_llm(checkpoints["blocks"][0], quantization="none")


def test_a_missing_scale_is_named(checkpoints, make_llm, tmp_path):
    copy_checkpoint(checkpoints["blocks"][0], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"missing model.layers.0.mlp.up_proj.weight_scale_inv \(12, 4\)"
    ):
        make_llm(tmp_path)


def test_dummy_weights_in_fp8(checkpoints, make_llm):
    llm = make_llm(checkpoints["blocks"][0], load_format="dummy")
    assert tokens(llm) == tokens(make_llm(checkpoints["blocks"][0], load_format="dummy"))


def test_online_leaves_embedding_and_head_alone(random_model, make_llm, tmp_path):
    """The tokens are those of a checkpoint in which only the linears were rounded to FP8."""
    copy_checkpoint(random_model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if "_proj.weight" in name:
            tensors[name] = to_fp8(tensors[name], 1, 10**6)[2].float()
    save_file(tensors, tmp_path / "model.safetensors")
    assert tokens(make_llm(random_model, quantization="fp8")) == tokens(make_llm(tmp_path))


def test_an_fp8_kv_cache_is_refused_on_a_cpu(random_model, make_llm):
    with pytest.raises(
        ConfigError, match=r'kv_cache_dtype "fp8" needs a GPU .* use "auto" \(.*torch'
    ):
        make_llm(random_model, device="cpu", kv_cache_dtype="fp8")
