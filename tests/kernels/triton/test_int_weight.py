"""What `IntRows` gives on a GPU: a product that reads the packed weight.

Without a GPU the kernels are interpreted.
"""

import pytest
import torch

from nanovllm.features.quantization.integer import IntTensor, IntWeight, quantize
from nanovllm.kernels.triton.int4 import PackedIntWeight
from nanovllm.kernels.triton.kernels import TritonKernels
from tests.closeness import assert_close
from tests.kernels.cpu.helpers import make_int_method
from tests.kernels.triton.inputs import DEVICE, randn
from tests.kernels.triton.interpreter import patch_interpreter

patch_interpreter()


def make_weight(bits=4, group=32, **fields):
    return quantize(randn(40, 192), bits, group)._replace(**fields)


def permutation():
    order = torch.randperm(192, generator=torch.Generator().manual_seed(1))
    return order.to(DEVICE, torch.int32)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize(
    "weight",
    [make_weight(), make_weight(8, 64), make_weight(factors=randn(40), inputs=permutation())],
    ids=["int4", "int8", "an order of inputs"],
)
def test_products_and_rows_are_those_of_torch(weight, rows):
    method = make_int_method(weight, torch.float16, TritonKernels())
    assert isinstance(method, PackedIntWeight)
    torchs = IntWeight(weight, torch.float16)
    ids = torch.tensor([7, 0, 39], device=DEVICE)
    assert torch.equal(method.embedding(ids), torchs.embedding(ids))
    x = randn(rows, 2 * 192, dtype=torch.float16)[:, ::2]  # the rows lie apart
    bias = randn(40, dtype=torch.float16, seed=1)
    for given in (None, bias):
        y, expected = method.apply(x, given), torchs.apply(x, given)
        assert_close(y, expected, of_largest=2.0**-9)


def test_torch_takes_what_the_kernels_do_not():
    ones = torch.ones(4, 48, dtype=torch.int8)
    odd = IntTensor(ones, torch.ones(4, 2).half(), None, 4)  # groups of 24
    assert isinstance(make_int_method(odd, torch.float16, TritonKernels()), IntWeight)
    assert isinstance(make_int_method(make_weight(), torch.float32, TritonKernels()), IntWeight)
