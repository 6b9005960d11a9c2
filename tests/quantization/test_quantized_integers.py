"""Integers loaded by parts and ranks, against the dequantised weights of their writers."""

import pytest
import torch
from safetensors.torch import save_file

from nanovllm.errors import ConfigError
from nanovllm.features.quantization.weight_formats import expect_format
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.loading.loader import load_weights
from tests.quantization.integer_cases import CASES, awq, case, gptq

PACKED = "pack-quantized"
LAYOUTS = {
    **{name: CASES[name] for name in ("W4A16 channel", "W8A8", "GPTQ 8 bits", "AWQ channel")},
    "packed": case(PACKED, 4, 32, symmetric=False),
    "packed in 8 bits": case(PACKED, 8, 64, symmetric=False),
    "bytes": case("int-quantized", 8, 64, symmetric=False),
    "GPTQ": gptq(4, 32, symmetric=False, bias=True),
    "AWQ": awq(32),
}
ORDERED = {
    "packed": case(PACKED, 4, 32, actorder="group"),
    "GPTQ": gptq(4, 32, symmetric=False, desc_act=True),
}


def write(path, shapes, layout):
    """Write random linears; return their dequantised weights."""
    generator = torch.Generator().manual_seed(0)
    tensors, expected = {}, []
    for name, shape in shapes.items():
        fields, wide = layout[0](name, torch.randn(shape, generator=generator))
        tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in fields.items()}
        expected.append(wide)
    save_file(tensors, path)
    return expected


def load(module, path, layout, dtype=torch.float32):
    """Load `module` from the file at `path`; return how it was stored, and its method."""
    model = torch.nn.ModuleDict({"attn": torch.nn.ModuleDict({"proj": module})})
    expect_format(model, layout[1])
    load_weights(model, [path], progress=False)
    return module.quantized, module.quantized.method(dtype, TORCH)


def weight_of(method, module):
    return method.embedding(torch.arange(module.output_size))


def check(module, path, layout, ours):
    """The weight is `ours` in float32, and its nearest bfloat16 in the kept bits."""
    _, method = load(module, path, layout)
    torch.testing.assert_close(weight_of(method, module), ours, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs_are_split_inside_words(name, size, as_rank, tmp_path):
    """A rank's first output may be in the middle of a packed word: 12 of 24 here."""
    layout, path = LAYOUTS[name], tmp_path / "model.safetensors"
    rows = 24 if name not in ("GPTQ", "GPTQ 8 bits") else 32  # of which GPTQ packs whole words
    expected = write(path, {"attn.gate": (rows, 64), "attn.up": (rows, 64)}, layout)
    for rank in range(size):
        as_rank(rank, size)
        module = MergedColumnParallelLinear(64, {"gate": rows, "up": rows}, bias=False)
        ours = torch.cat([weight.chunk(size)[rank] for weight in expected])
        check(module, path, layout, ours)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2])
def test_heads_are_split(name, size, as_rank, tmp_path):
    layout, path = LAYOUTS[name], tmp_path / "model.safetensors"
    shapes = {"attn.q_proj": (64, 64), "attn.k_proj": (32, 64), "attn.v_proj": (32, 64)}
    expected = write(path, shapes, layout)
    for rank in range(size):
        as_rank(rank, size)
        module = QKVParallelLinear(64, 4, 2, 16, bias=False)
        ours = torch.cat([weight.chunk(size)[rank] for weight in expected])
        check(module, path, layout, ours)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2])
def test_inputs_are_split_with_their_groups(name, size, as_rank, tmp_path):
    layout, path = LAYOUTS[name], tmp_path / "model.safetensors"
    (expected,) = write(path, {"attn.proj": (32, 128)}, layout)
    for rank in range(size):
        as_rank(rank, size)
        module = RowParallelLinear(128, 32, bias=False)
        check(module, path, layout, expected.chunk(size, 1)[rank])


@pytest.mark.parametrize("name", [*LAYOUTS, *(f"{name} ordered" for name in ORDERED)])
def test_the_kept_bits_are_exact(name, tmp_path):
    layouts = {**LAYOUTS, **{f"{key} ordered": layout for key, layout in ORDERED.items()}}
    layout, path = layouts[name], tmp_path / "model.safetensors"
    shapes = {"attn.q_proj": (64, 64), "attn.k_proj": (32, 64), "attn.v_proj": (32, 64)}
    expected = torch.cat(write(path, shapes, layout))
    module = QKVParallelLinear(64, 4, 2, 16, bias=False)
    stored, method = load(module, path, layout, torch.bfloat16)
    assert "kept in" in stored.description
    assert torch.equal(weight_of(method, module), expected.bfloat16())


@pytest.mark.parametrize("name", ORDERED)
def test_inputs_in_an_order_are_split_by_widening(name, as_rank, tmp_path):
    """A rank has a part of most groups."""
    layout, path = ORDERED[name], tmp_path / "model.safetensors"
    (expected,) = write(path, {"attn.proj": (32, 128)}, layout)
    for rank in range(2):
        as_rank(rank, 2)
        module = RowParallelLinear(128, 32, bias=False)
        stored, method = load(module, path, layout, torch.bfloat16)
        assert "widened to bfloat16 because groups do not" in stored.description
        ours = expected.chunk(2, 1)[rank].bfloat16()
        assert torch.equal(weight_of(method, module), ours)


@pytest.mark.parametrize(
    ("name", "inputs", "rule"),
    [
        ("packed", 96, r"attn.proj.weight \(32, 96\) within a group of 32 inputs of weight_scale"),
        ("GPTQ", 96, "within a group of 32 inputs of scales"),
        ("AWQ", 96, "within a group of 32 inputs of scales"),
        ("bytes", 192, "within a group of 64 inputs of weight_scale"),
        ("W4A16 channel", 24, "within a packed word of 8 inputs of weight_packed"),
    ],
)
def test_ranks_do_not_cut_groups(name, inputs, rule, as_rank):
    as_rank(1, 2)
    model = torch.nn.ModuleDict({"attn": torch.nn.ModuleDict()})
    model["attn"]["proj"] = RowParallelLinear(inputs, 32, bias=False)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size 2 cuts .*{rule}"):
        expect_format(model, LAYOUTS[name][1])


@pytest.mark.parametrize("number", [2.0**-30, 2.0**20, 1.0])
def test_scales_beyond_float16(number, tmp_path):
    """A power of two a row brings them there; if that is not exact, the weight is widened."""
    layout, path = case(PACKED, 4, 32, dtype=torch.float32), tmp_path / "model.safetensors"
    fields, _ = layout[0]("attn.proj", torch.randn(32, 64))
    scales = fields["weight_scale"].bfloat16().float()
    fields["weight_scale"] = scales * number
    if number == 1.0:
        fields["weight_scale"] = scales * (1 + 2.0**-15)
    tensors = {f"attn.proj.{suffix}": tensor for suffix, tensor in fields.items()}
    save_file(tensors, path)
    module = RowParallelLinear(64, 32, bias=False)
    _, wide = load(module, path, layout)
    module = RowParallelLinear(64, 32, bias=False)
    stored, method = load(module, path, layout, torch.bfloat16)
    expected = weight_of(wide, module).bfloat16()
    assert torch.equal(weight_of(method, module), expected)
    assert ("kept in 4 bits" in stored.description) == (number != 1.0)
    if number == 1.0:
        assert "16 bits do not hold its scales exactly" in stored.description
