"""Inputs of the Triton kernels' tests: the device, the dtypes that it computes, random logits and
sampling parameters. And what the tests compare results with.
"""

import os

import pytest
import torch

from nanovllm.kernels.triton import sampling as triton_sampling
from nanovllm.layers.sampler import Sampling
from nanovllm.platform.cpu import CPU as CPUPlatform
from nanovllm.platform.cuda import CUDA as CUDAPlatform
from tests.closeness import assert_close

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
PLATFORM = CUDAPlatform(DEVICE) if CUDA else CPUPlatform()
SIMULATED = int(os.environ.get("SIMULATED_GPU", 0))
"""The compute capability of a simulated GPU, such as 90; else 0."""
CAPABILITY = torch.cuda.get_device_capability() if CUDA else divmod(SIMULATED, 10)
"""(0, 0) in the interpreter."""
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if CAPABILITY > (0, 0) else [])]
"""Without bfloat16 in the interpreter, which computes it wrongly."""
EPS = 1e-6
"""Of norms."""
EVERYTHING = 2**31 - 1
"""The top_k of rows without one."""

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
each_half = pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype.itemsize == 2], ids=lambda d: str(d)[6:]
)
few_dtypes = pytest.mark.parametrize(
    "dtype", DTYPES if CAPABILITY > (0, 0) else [torch.float32], ids=lambda d: str(d)[6:]
)
"""One in the interpreter: of cases that take long, or whose result alone has the dtype."""
has_fp8 = pytest.mark.skipif((0, 0) < CAPABILITY < (8, 9), reason="the GPU has no float8_e4m3fn")


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def make_sampling(rows, *, temperature=1.0, top_k=EVERYTHING, top_p=1.0, min_p=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def column(value):
        return torch.as_tensor(value).float().expand(rows).to(DEVICE).contiguous()

    return Sampling(
        temperatures=column(temperature),
        seeds=torch.randint(2**63 - 1, (rows,), generator=generator).to(DEVICE),
        positions=torch.randint(5000, (rows,), generator=generator).to(DEVICE),
        top_ks=torch.as_tensor(top_k).long().expand(rows).to(DEVICE).contiguous(),
        top_ps=column(top_p),
        min_ps=column(min_p),
    )


def sample(logits, sampling):
    return triton_sampling.sample(
        logits,
        sampling.temperatures,
        sampling.seeds,
        sampling.positions,
        sampling.top_ks,
        sampling.top_ps,
        sampling.min_ps,
    )


def assert_as_good(ours, torchs, exact, roundings=1):
    """Check that the error is at most twice that of torch, plus `roundings` of the largest."""
    assert ours.dtype == torchs.dtype
    assert ours.shape == exact.shape
    if exact.numel():
        rounding = torch.finfo(ours.dtype).eps * exact.abs().max()
        limit = 2 * (torchs.double() - exact).abs().max() + roundings * rounding
        assert_close(ours, exact, atol=limit)


def exact_norm(x, weight):
    scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x * scale * weight
