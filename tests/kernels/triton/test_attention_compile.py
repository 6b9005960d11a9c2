"""Paged attention compiles for GPUs that are not here, at Qwen3's shapes, and no register is
spilled.
"""

import pytest
import torch

from nanovllm.kernels.triton import decode_attention, prefill_attention
from tests.kernels.triton.harness import ARCHS, compile_launches

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHARED = {80: 163, 90: 227, 100: 227}
"""KiB that a program may take."""


def attend(num_heads, dtype, cache_dtype, block_size):
    """What a step of each kind launches: 8 KV heads of 128, as all sizes of Qwen3 have."""

    def meta(*shape, dtype=torch.int32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    q = meta(64, num_heads, 128, dtype=dtype)
    cache = meta(2, 1000, block_size, 8, 128, dtype=cache_dtype)
    tables, cu_seqlens_q, seq_lens = meta(8, 64), meta(9), meta(8)
    plan = decode_attention.plan_decode(cu_seqlens_q, seq_lens, 4096, num_heads, 8, 128)
    decode_attention.decode(q, cache, tables, plan, q)
    prefill_attention.prefill(q, cache, tables, cu_seqlens_q, seq_lens, meta(4, 2), q)


@pytest.mark.parametrize(
    ("num_heads", "dtype", "cache_dtype", "block_size", "arch"),
    [
        *((16, dtype, dtype, 64, arch) for dtype in DTYPES for arch in ARCHS),
        (32, BF16, BF16, 64, 90),
        (64, BF16, BF16, 256, 90),
        (16, BF16, BF16, 16, 90),
        *((num_heads, BF16, FP8, 64, arch) for num_heads in (16, 32, 64) for arch in (90, 100)),
        (16, BF16, FP8, 16, 90),
    ],
    ids=str,
)
def test_attention(num_heads, dtype, cache_dtype, block_size, arch):
    launched = compile_launches(attend, num_heads, dtype, cache_dtype, block_size, arch=arch)
    assert [kernel.name for kernel in launched] == ["_plan_decode", "_decode", "_prefill"]
    for kernel in launched:
        assert kernel.n_spills == 0, kernel
        assert kernel.shared <= SHARED[arch] * 1024, kernel
