"""Experts in MXFP4 against transformers' conversion, loaded from tensors as gpt-oss has them."""

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.features.quantization.fp4 import Mxfp4Format
from nanovllm.features.quantization.weight_formats import checkpoint_format, expect_format
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.layers import linear as linear_module
from nanovllm.layers.experts import Experts, StackedLinear, StoredExperts
from nanovllm.loading.loader import load_weights
from nanovllm.utils.distributed import TensorParallel

NUM_EXPERTS, HIDDEN_SIZE, SIZE = 3, 64, 128
GPT_OSS = StoredExperts(linears=None, transposed=True, interleaved=True)


def random_tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_up_proj": (2 * SIZE, HIDDEN_SIZE), "down_proj": (HIDDEN_SIZE, SIZE)}
    tensors = {}
    for name, (n, k) in shapes.items():
        blocks = torch.randint(256, (NUM_EXPERTS, n, k // 32, 16), generator=generator)
        scales = torch.randint(110, 128, (NUM_EXPERTS, n, k // 32), generator=generator)
        tensors[f"{name}_blocks"] = blocks.to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
        tensors[f"{name}_bias"] = torch.randn(NUM_EXPERTS, n, generator=generator)
    return tensors


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_the_weights_are_those_of_transformers(rank, size, monkeypatch, tmp_path):
    for module in ("layers.linear", "layers.experts"):
        monkeypatch.setattr(
            f"nanovllm.{module}.tensor_parallel", lambda: TensorParallel(rank, size)
        )
    tensors = random_tensors()
    save_file({f"experts.{k}": v for k, v in tensors.items()}, tmp_path / "model.safetensors")
    model = torch.nn.Module()
    model.experts = Experts(
        NUM_EXPERTS, HIDDEN_SIZE, SIZE, activation="swiglu_oai", bias=True, stored=GPT_OSS
    )
    expect_format(model, {"quant_method": "mxfp4"})
    load_weights(model, [tmp_path / "model.safetensors"], progress=False)
    own = SIZE // size
    parts = {
        "gate_up_proj": (slice(2 * rank * own, 2 * (rank + 1) * own), slice(None)),
        "down_proj": (slice(None), slice(rank * own, (rank + 1) * own)),
    }
    for name, (rows, columns) in parts.items():
        matrix = getattr(model.experts, name)
        assert isinstance(matrix, StackedLinear)
        blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        expected = theirs[:, rows, columns].flatten(0, 1)
        method = matrix.quantized.method(torch.float32, TORCH)
        assert torch.equal(method.embedding(torch.arange(len(expected))), expected)
        bias = tensors[f"{name}_bias"][:, rows].flatten()
        assert torch.equal(matrix.bias, bias)


def test_a_part_of_a_block_is_refused(monkeypatch):
    monkeypatch.setattr(linear_module, "tensor_parallel", lambda: TensorParallel(0, 8))
    experts = Experts(2, 64, SIZE, stored=GPT_OSS)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        expect_format(experts, {"quant_method": "mxfp4"})


def test_the_name_of_the_format():
    assert isinstance(checkpoint_format({"quant_method": "mxfp4"}), Mxfp4Format)
    with pytest.raises(UnsupportedModelError, match="mxfp5.* is not supported .*mxfp4"):
        checkpoint_format({"quant_method": "mxfp5"})
