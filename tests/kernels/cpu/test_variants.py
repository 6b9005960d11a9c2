"""A few tests with the kernels of every kind of processor: Arm's are run by qemu. EVERY_CASE=1 runs
each case of the other tests with one of them, and KERNELS=neon all tests with one: see conftest.py.
"""

import pytest
import torch

from nanovllm.attention.spec import AttentionSpec
from nanovllm.kernels.cpu import ops
from tests.kernels.cpu import test_experts, test_int_weights, test_layer_ops, test_ops, test_state
from tests.kernels.cpu.conftest import ARM_VARIANTS, variants_here
from tests.kernels.cpu.helpers import native
from tests.kernels.cpu.test_paged_attention import check_prompts_and_chunks

pytestmark = [
    native,
    pytest.mark.parametrize("kernels", [*variants_here()[1:], *ARM_VARIANTS], indirect=True),
    pytest.mark.usefixtures("kernels", "inference_mode"),
]


def test_linears() -> None:
    test_ops.test_linear(70, 33)
    test_ops.test_linear(150, 288)


def test_weights_of_8_and_4_bits() -> None:
    for form in test_int_weights.KINDS.values():
        test_int_weights.check_products(form, 33, 1, True, True, 0)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.uint8])
def test_attention(kv_dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    check_prompts_and_chunks(AttentionSpec(2, 1, 40, torch.bfloat16, cpu, 32, kv_dtype=kv_dtype))


def test_what_is_between_linears() -> None:
    test_layer_ops.test_norms_of_each_kind(77, "c")
    test_layer_ops.test_activations(24, "c")
    test_experts.test_experts(96, 160, 16, "silu", False, False)


def test_layers_with_state() -> None:
    test_state.test_causal_conv(77, 3, (1, 2, 9), True, "c")
    test_state.test_gated_delta(((2, 9), 2, 4, 77, 51), False, None, "c")
    test_state.test_mamba2(((2, 9), 2, 6, 77, 51), "c")


def test_sampling() -> None:
    logits = torch.randn(3, 1003, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ops.sample(logits), logits.argmax(-1))
