"""Products with packed weights of 4 and 8 bits agree with float64, and compile without spills.

Without a GPU they are interpreted.
"""

import pytest
import torch

from nanovllm.features.quantization.integer import IntTensor, IntWeight, quantize
from nanovllm.kernels.triton import int4
from nanovllm.kernels.triton.int4 import (
    FP4,
    INT4,
    INT8,
    PackedIntWeight,
    empty_ints,
    part_size,
    store_rows,
)
from nanovllm.kernels.triton.kernels import TritonKernels
from nanovllm.kernels.triton.split_k import new_counters, split_options
from tests.closeness import assert_close
from tests.kernels.cpu.helpers import make_int_method
from tests.kernels.triton.harness import ARCHS, SHARED, compile_launches
from tests.kernels.triton.inputs import CAPABILITY, DEVICE, randn
from tests.kernels.triton.interpreter import patch_interpreter
from tests.kernels.triton.test_compile import meta

patch_interpreter()

DTYPES = [torch.float16, *([torch.bfloat16] if CAPABILITY > (0, 0) else [])]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def random_weight(outputs, inputs, group, kind="int4", *extra):
    """Return a weight, and what it stands for in float64.

    Args:
        kind: "int4", "int8" or "fp4".
        extra: any of "zeros", "minimums", "factors".
    """
    generator = torch.Generator().manual_seed(1)
    bits = 8 if kind == "int8" else 4
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)

    def draw(*shape):
        return torch.rand(*shape, generator=generator)

    def integers(end, *shape):
        return torch.randint(low, end, shape, generator=generator, dtype=torch.int8)

    groups = inputs // group
    values = integers(high, outputs, inputs)
    scales = (draw(outputs, groups) + 0.1).to(torch.bfloat16 if kind == "fp4" else torch.float16)
    zeros = integers(120 if bits == 4 else 128, outputs, groups) if "zeros" in extra else None
    minimums = -draw(outputs, groups).half() * 8 if "minimums" in extra else None
    factors = draw(outputs) * 3 if "factors" in extra else None
    wide = values.double().view(outputs, groups, group)
    if kind == "fp4":
        wide = torch.cat([NUMBERS, -NUMBERS])[(wide + 8).long()]
    if zeros is not None:
        wide = wide - zeros[..., None]
    if minimums is not None:
        wide += 8
    wide = wide * scales[..., None].double()
    if minimums is not None:
        wide += minimums[..., None]
    if factors is not None:
        wide = wide * factors[:, None, None].double()
    weight = IntTensor(values, scales, minimums, bits, zeros, factors, None, kind == "fp4")
    return weight.by_rows(lambda rows: rows.to(DEVICE)), wide.flatten(1).to(DEVICE)


def packed(weight):
    """Return the weight as the kernels read it, stored in two parts."""
    found = empty_ints(len(weight.values), weight)
    for start, stop in ((0, 32), (32, len(weight.values))):
        found = store_rows(found, start, weight.by_rows(lambda rows: rows[start:stop]))  # noqa: B023
    return found


@each_dtype
@pytest.mark.parametrize(
    ("rows", "case"),
    [
        (3, (40, 256, 128)),
        (16, (33, 192, 32, "int4", "minimums")),
        (17, (70, 512, 64, "int4", "zeros", "factors")),
        (5, (40, 96, 16, "fp4", "factors")),
        (2, (33, 640, 640, "int8", "zeros")),
        (129, (40, 160, 32, "int8", "factors")),
        (65, (20, 160, 16, "fp4")),
        (0, (20, 128, 128)),
    ],
    ids=str,
)
def test_multiply(rows, case, dtype):
    weight, wide = random_weight(*case)
    outputs, inputs = wide.shape
    x, bias = randn(rows, inputs, dtype=dtype), randn(outputs, dtype=dtype, seed=2)
    counters = new_counters(outputs, DEVICE)
    y = int4.multiply(x, packed(weight), bias, counters)
    assert not counters.any()
    expected = x.double() @ wide.T + bias.double()
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    # Up to 64 rows the weights are exact, and so are their products with x.
    eps = torch.finfo(dtype).eps
    bound = eps * expected.abs() + (2.0**-16 if rows <= 64 else eps) * (
        x.abs().double() @ wide.abs().T
    )
    assert ((y.double() - expected).abs() <= bound).all()


@each_dtype
@pytest.mark.parametrize(
    "case",
    [
        (5, 192, 32, "int4", "minimums"),
        (7, 96, 96, "int8", "zeros", "factors"),
        (3, 80, 16, "fp4", "factors"),
    ],
    ids=str,
)
def test_take_rows(case, dtype):
    weight, wide = random_weight(*case)
    ids = torch.tensor([2, 0, 2, 1], device=DEVICE)
    order = torch.randperm(case[1], generator=torch.Generator().manual_seed(3))
    order = order.to(DEVICE, torch.int32)
    for inputs in (None, order):
        rows = int4.take_rows(packed(weight), ids, inputs, dtype)
        if inputs is not None:
            rows = rows[:, inputs]
        assert_close(rows, wide[ids], atol=torch.finfo(dtype).eps * wide.abs().max())


@each_dtype
def test_a_row_has_the_same_bits_in_every_batch_of_up_to_16(dtype):
    """The inputs are split, by the shape of the weight alone. No row sees another's NaN."""
    weight, counters = (
        packed(random_weight(40, 1024, 128, "int4", "zeros")[0]),
        new_counters(40, DEVICE),
    )
    assert split_options(16, 40, 8, 528)["SPLITS"] == 4
    x = randn(16, 1024, dtype=dtype)
    expected = int4.multiply(x, weight, None, counters)
    for some in (slice(1), slice(9, 12)):
        assert torch.equal(int4.multiply(x[some], weight, None, counters), expected[some])
    x[:8] = float("nan")
    assert torch.equal(int4.multiply(x, weight, None, counters)[8:], expected[8:])


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
def test_each_tile_has_a_counter(rows):
    for outputs in (1, 31, 32, 33, 64, 65, 1000):
        options = split_options(rows, outputs, 1000, 528)
        tiles = -(-rows // options["M"]) * -(-outputs // options["N"])
        assert tiles <= len(new_counters(outputs, DEVICE))


def test_groups_that_the_products_support():
    parts = {128: 32, 32: 32, 96: 32, 16: 16, 48: 16, 24: 0, 1000: 32}
    assert {group: part_size(group, 1000) for group in parts} == parts


def make_weight(bits=4, group=32, **fields):
    return quantize(randn(40, 192), bits, group)._replace(**fields)


def permutation():
    order = torch.randperm(192, generator=torch.Generator().manual_seed(1))
    return order.to(DEVICE, torch.int32)


@pytest.mark.parametrize("rows", [3])
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


def multiply(rows, outputs, inputs, group, kind, dtype, *extra):
    """Launch the product of a linear layer, and the widening of its rows."""
    shape = outputs, inputs // group
    weight = IntTensor(
        meta(outputs, inputs, dtype=torch.int8),
        meta(*shape, dtype=torch.bfloat16 if kind == FP4 else torch.float16),
        meta(*shape, dtype=torch.float16) if "minimums" in extra else None,
        8 if kind == INT8 else 4,
        meta(*shape, dtype=torch.int8) if "zeros" in extra else None,
        fp4=kind == FP4,
    )
    weight = empty_ints(outputs, weight)
    counters = new_counters(outputs, weight.words.device)
    int4.multiply(meta(rows, inputs, dtype=dtype), weight, None, counters)
    int4.take_rows(weight, meta(rows), None, dtype)


@pytest.mark.parametrize(
    "case",
    [
        (1, 4096, 1024, 32, INT4, torch.bfloat16, "minimums"),
        (64, 1024, 3072, 128, INT8, torch.bfloat16),
        pytest.param(
            (4096, 4096, 4096, 128, INT4, torch.bfloat16, "zeros"), marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_compiles(case):
    """For GPUs that are not present, at shapes of Qwen3-0.6B and 8B; no register is spilled."""
    compiled = compile_launches((multiply, *case), archs=ARCHS)
    names = ["_multiply", "_take_rows"]
    for arch, kernels in compiled.items():
        assert [kernel.name for kernel in kernels] == names
        for kernel in kernels:
            assert kernel.n_spills == 0, kernel
            assert kernel.shared <= min(SHARED[arch], 120) * 1024, kernel
        # Enough registers for two programs of an SM with many rows, for five with few.
        assert kernels[0].n_regs <= (128 if case[0] > 64 and arch > 80 else 224), kernels[0]
        assert case[0] > 16 or kernels[0].n_regs <= 96, kernels[0]
