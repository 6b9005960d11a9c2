"""Some of the kernels' tests on Arm, run by qemu. KERNELS=neon runs them all: see conftest.py."""

import pytest
import torch

from nanovllm.attention.spec import AttentionSpec
from tests.kernels.cpu import test_int_weights, test_ops
from tests.kernels.cpu.conftest import ARM_VARIANTS
from tests.kernels.cpu.helpers import native
from tests.kernels.cpu.test_paged_attention import check_prompts_and_chunks

pytestmark = [
    native,
    pytest.mark.parametrize("kernels", ARM_VARIANTS, indirect=True),
    pytest.mark.usefixtures("kernels", "inference_mode"),
]


def test_linear():
    test_ops.test_linear(70, 33)
    test_ops.test_linear(33, 288)


def test_rows_of_linears_do_not_depend_on_the_others():
    x = torch.randn(40, 288).bfloat16()
    for weight in test_ops.weights_of_any_size(33, 288):
        together = weight.apply(x)
        for m in (1, 2, 3, 7, 12, 13, 33):
            assert torch.equal(weight.apply(x[:m]), together[:m])
            assert torch.equal(weight.apply(x[-m:]), together[-m:])


def test_weights_of_8_and_4_bits():
    for form in test_int_weights.KINDS.values():
        test_int_weights.check_products(form, 33, 1, True, True, 0)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_attention(kv_dtype):
    cpu = torch.device("cpu")
    check_prompts_and_chunks(AttentionSpec(2, 1, 40, torch.bfloat16, cpu, 32, kv_dtype=kv_dtype))
