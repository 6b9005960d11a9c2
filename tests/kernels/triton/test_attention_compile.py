"""The attention kernels compile for GPUs that are not present. At Qwen3's shapes they spill no
register.
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


def queries_and_cache(num_heads, dtype, cache_dtype, block_size):
    """Return meta tensors. All sizes of Qwen3 have 8 KV heads of 128."""
    cache = meta(2, 1000, block_size, 8, 128, dtype=cache_dtype)
    return meta(64, num_heads, 128, dtype=dtype), cache


def decode(num_heads, *case):
    q, cache = queries_and_cache(num_heads, *case)
    plan = decode_attention.plan_decode(meta(9), meta(8), 4096, num_heads, 8, 128)
    decode_attention.decode(q, cache, meta(8, 64), plan, q)


def prefill(*case):
    q, cache = queries_and_cache(*case)
    prefill_attention.prefill(q, cache, meta(8, 64), meta(9), meta(8), meta(4, 2), q)


@pytest.mark.parametrize(
    ("num_heads", "dtype", "cache_dtype", "block_size", "archs"),
    [
        *((16, dtype, dtype, 64, ARCHS) for dtype in DTYPES),
        (32, BF16, BF16, 64, [90]),
        (64, BF16, BF16, 256, [90]),
        (16, BF16, BF16, 16, [90]),
        *((num_heads, BF16, FP8, 64, [90, 100]) for num_heads in (16, 32, 64)),
        (16, BF16, FP8, 16, [90]),
    ],
    ids=str,
)
def test_attention(num_heads, dtype, cache_dtype, block_size, archs):
    case = (num_heads, dtype, cache_dtype, block_size)
    compiled = compile_launches((decode, *case), (prefill, *case), archs=archs)
    assert list(compiled) == list(archs)
    for arch, kernels in compiled.items():
        assert [kernel.name for kernel in kernels] == ["_plan_decode", "_decode", "_prefill"]
        for kernel in kernels:
            assert kernel.n_spills == 0, kernel
            assert kernel.shared <= SHARED[arch] * 1024, kernel
