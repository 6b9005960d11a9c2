"""The attention kernels compile for GPUs that are not present. At Qwen3's and Llama's shapes they
spill no register.
"""

import pytest
import torch

from nanovllm.kernels.triton import decode_attention, prefill_attention
from tests.kernels.triton.harness import ARCHS, compile_launches

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHARED = {80: 163, 90: 227, 100: 227}
"""KiB of shared memory that a program may use."""


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch(num_heads, head_dim, dtype, cache_dtype, block_size):
    """Decode; prefill, without and with a row whose keys are split. All models have 8 KV heads."""
    cache = meta(2, 1000, block_size, 8, head_dim, dtype=cache_dtype)
    q = meta(64, num_heads, head_dim, dtype=dtype)
    heads = num_heads, 8, head_dim
    decode = decode_attention.plan_decode(meta(9), meta(8), 4096, *heads)
    decode_attention.decode(q, cache, meta(8, 64), decode, q)
    for seq_len in (3, 2000):
        prefill = prefill_attention.plan_prefill(
            (3,), (seq_len,), *heads, dtype, torch.device("meta")
        )
        prefill_attention.prefill(q, cache, meta(8, 64), meta(9), meta(8), prefill, q)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype", "cache_dtype", "block_size", "archs"),
    [
        *((16, 128, dtype, dtype, 64, ARCHS) for dtype in DTYPES),
        *((num_heads, 128, BF16, BF16, 64, ARCHS) for num_heads in (32, 64)),
        *((num_heads, 128, BF16, BF16, 64, [90]) for num_heads in (24, 40)),
        (32, 64, BF16, BF16, 64, ARCHS),
        (64, 128, BF16, BF16, 256, [90]),
        (16, 128, BF16, BF16, 16, [90]),
        *((num_heads, 128, BF16, FP8, 64, [90, 100]) for num_heads in (16, 32, 64)),
        (32, 64, BF16, FP8, 64, [90]),
        (16, 128, BF16, FP8, 16, [90]),
    ],
    ids=str,
)
def test_attention(num_heads, head_dim, dtype, cache_dtype, block_size, archs):
    """Shapes of Qwen3-0.6B, 8B, 32B and 14B, of Llama-3.1-8B and 70B, Llama-3.2-1B and 3B."""
    call = (launch, num_heads, head_dim, dtype, cache_dtype, block_size)
    compiled = compile_launches(call, archs=archs)
    assert list(compiled) == list(archs)
    for arch, kernels in compiled.items():
        names = ["_plan_decode", "_decode", "_prefill", "_prefill", "_merge_prefill"]
        assert [kernel.name for kernel in kernels] == names
        for kernel in kernels:
            assert kernel.n_spills == 0, kernel
            assert kernel.shared <= SHARED[arch] * 1024, kernel
