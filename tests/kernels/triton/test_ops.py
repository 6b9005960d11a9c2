"""The Triton kernels of layers agree with float64 and with torch. Without a GPU they are
interpreted, and bfloat16 is left out: the interpreter computes it wrongly.
"""

import logging

import pytest
import torch
from torch.nn.functional import silu

from nanovllm.kernels.cpu.kernels import CKernels, CSamplingKernels, OneDnnKernels
from nanovllm.kernels.cpu.library import library
from nanovllm.kernels.selector import select_kernels, triton_available
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.kernels.torch_math import rotate
from nanovllm.kernels.triton import ops as triton_ops
from nanovllm.kernels.triton.kernels import TritonKernels
from nanovllm.layers.activation import ActAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rope_scaling import inverse_frequencies
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.worker.kv_cache import zeros
from tests.kernels.triton.inputs import CUDA, DEVICE, each_dtype, has_fp8, randn
from tests.kernels.triton.interpreter import patch_interpreter

EPS = 1e-6

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()


def assert_as_good(ours, torchs, exact):
    """Check that the error is at most twice that of torch, plus one rounding."""
    assert ours.dtype == torchs.dtype
    assert ours.shape == exact.shape
    if exact.numel():
        rounding = torch.finfo(ours.dtype).eps * exact.abs().max()
        limit = 2 * (torchs.double() - exact).abs().max() + rounding
        assert (ours.double() - exact).abs().max() <= limit


def exact_norm(x, weight):
    scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x * scale * weight.double()


# --- norm and activation


@each_dtype
@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 77), (1, 1024), (3, 1000), (2, 3, 24), (2, 5120), (0, 16)]
)
def test_add_rms_norm(shape, dtype):
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1) * 5
    norm = RMSNorm(shape[-1], EPS)
    norm.weight.data = randn(shape[-1], dtype=dtype, seed=2) + 1
    torchs, total = norm.add_norm(x, residual.clone())
    norm.kernels = TritonKernels()
    changed = residual.clone()
    ours, same = norm.add_norm(x, changed)
    assert same is changed
    assert torch.equal(changed, total)
    assert_as_good(ours, torchs, exact_norm(total.double(), norm.weight))
    kept = residual.clone()
    assert torch.equal(triton_ops.add_rms_norm(None, total, norm.weight, EPS), ours)
    alone = triton_ops.add_rms_norm(None, residual, norm.weight, EPS)
    assert torch.equal(residual, kept)
    assert_as_good(alone, norm(residual), exact_norm(residual.double(), norm.weight))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@each_dtype
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("size", [1, 24, 77, 1024, 1025, 3072])
def test_silu_and_mul(rows, size, dtype):
    gate_up = randn(rows, 2 * size, dtype=dtype) * 8
    gate_up[:, 0] = -1000.0
    gate_up[1:, 0] = 1000.0
    layer = ActAndMul()
    torchs = layer(gate_up)
    layer.kernels = TritonKernels()
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_as_good(layer(gate_up), torchs, silu(gate) * up)


# --- KV store


def exact_rotation(x, positions, cos_sin):
    cos, sin = cos_sin[positions, None].double().chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class StoreCase:
    """Random tokens with the results of torch (q, k, v) and of float64 (exact_q, exact_k)."""

    def __init__(self, tokens, heads, kv_heads, head_dim, dtype, qk_norm=True):
        generator = torch.Generator().manual_seed(tokens + head_dim)
        rotary = RotaryEmbedding(4096, inverse_frequencies(head_dim, 1e6)).to(DEVICE)
        self.cos_sin = rotary.cos_sin
        self.positions = torch.randint(4096, (tokens,), generator=generator).to(DEVICE)
        self.qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=tokens) * 3
        self.weights, parts, exact = [], [], []
        sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q, k, self.v = (x.unflatten(-1, (-1, head_dim)) for x in self.qkv.split(sizes, -1))
        for part in (q, k):
            if not qk_norm:
                self.weights.append(None)
                parts.append(part)
                exact.append(exact_rotation(part.double(), self.positions, self.cos_sin))
                continue
            norm = RMSNorm(head_dim, EPS)
            norm.weight.data = randn(head_dim, dtype=dtype, seed=len(parts)) + 1
            self.weights.append(norm.weight.data)
            parts.append(norm(part))
            normed = exact_norm(part.double(), norm.weight)
            exact.append(exact_rotation(normed, self.positions, self.cos_sin))
        self.q, self.k = (rotate(part, self.cos_sin[self.positions]) for part in parts)
        self.exact_q, self.exact_k = exact

    def store(self, slots, kv_cache):
        tables = (self.cos_sin, self.positions, slots)
        return triton_ops.store(self.qkv, *self.weights, EPS, *tables, kv_cache, self.q.shape[1])


@each_dtype
@pytest.mark.parametrize(("tokens", "qk_norm"), [(1, True), (6, True), (6, False)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (16, 8, 128, 16),
        (8, 1, 64, 32),
        (7, 1, 80, 3),
        (6, 1, 2, 1),
        (15, 3, 96, 16),
        (4, 1, 256, 5),
        (6, 2, 24, 16),
        (5, 5, 80, 16),
    ],
)
def test_store(tokens, qk_norm, heads, kv_heads, head_dim, block_size, dtype):
    case = StoreCase(tokens, heads, kv_heads, head_dim, dtype, qk_norm)
    num_blocks = -(-(2 * tokens + 1) // block_size)
    kv_cache = torch.full((2, num_blocks, block_size, kv_heads, head_dim), 7.0)
    kv_cache = kv_cache.to(DEVICE, dtype)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))
    slots, unused = slots[:tokens].to(DEVICE), slots[tokens:].to(DEVICE)
    q = case.store(slots, kv_cache)
    keys, values = kv_cache.flatten(1, 2)
    assert_as_good(q, case.q, case.exact_q)
    assert_as_good(keys[slots], case.k, case.exact_k)
    assert torch.equal(values[slots], case.v)
    assert (keys[unused] == 7).all()
    assert (values[unused] == 7).all()


def test_no_tokens():
    case = StoreCase(0, 4, 2, 64, torch.float32)
    kv_cache = torch.ones(2, 1, 16, 2, 64, device=DEVICE)
    q = case.store(torch.zeros(0, dtype=torch.int64, device=DEVICE), kv_cache)
    assert q.shape == (0, 4, 64)
    assert (kv_cache == 1).all()


def test_a_negative_slot_is_not_stored():
    case = StoreCase(4, 4, 2, 64, torch.float32)
    # The memory before the cache must not change either.
    buffer = torch.full((3, 2, 4, 2, 64), 7.0, device=DEVICE)
    slots = torch.tensor([-1, 5, -1, -1], device=DEVICE)
    q = case.store(slots, buffer[1:])
    assert_as_good(q, case.q, case.exact_q)
    keys, values = buffer[1], buffer[2]
    assert torch.equal(values[1, 1], case.v[1])
    values[1, 1], keys[1, 1] = 7.0, 7.0
    assert (buffer == 7).all()


def assert_in_eight_bits(stored, exact):
    """Check that numbers were rounded to float8_e4m3fn, which has 3 bits of mantissa."""
    close = torch.isclose(stored.float(), exact.float(), rtol=2**-4, atol=2**-9)
    assert close.float().mean() > 0.999


@has_fp8
def test_slots_past_32_bits():
    """Keys and values are stored more than 2**31 elements from the start of the cache.

    The operating system provides only the memory pages that are written.
    """
    case = StoreCase(2, 2, 2, 128, torch.float32)
    last = 2**31 // 256
    kv_cache = zeros((2, last // 16 + 1, 16, 2, 128), torch.float8_e4m3fn, DEVICE)
    case.store(torch.tensor([last, last - 1], device=DEVICE), kv_cache)
    keys, values = kv_cache.flatten(1, 2)[:, [last, last - 1]]
    assert_in_eight_bits(keys, case.k)
    assert_in_eight_bits(values, case.v)


@has_fp8
@each_dtype
def test_eight_bits_saturate(dtype):
    case = StoreCase(3, 4, 2, 64, dtype)
    eight_bits = torch.float8_e4m3fn
    case.v.copy_(case.v.to(eight_bits))  # exactly representable, so storing does not round
    case.v[0, 0, :4] = torch.tensor([500.0, -500.0, 60000.0, -60000.0])
    kv_cache = torch.zeros(2, 1, 4, 2, 64, device=DEVICE).to(eight_bits)
    case.store(torch.tensor([2, 0, 1], device=DEVICE), kv_cache)
    keys, values = kv_cache[:, 0, [2, 0, 1]].float()
    assert_in_eight_bits(keys, case.k)
    assert torch.equal(values, case.v.float().clamp(-448, 448))


@has_fp8
def test_eight_bits_are_the_nearest():
    """Numbers between two of 8 bits: the middle, and next to it on both sides. NaN stays NaN."""
    eight_bits = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (eight_bits[1:] + eight_bits[:-1]) / 2
    between = [middle, middle.nextafter(eight_bits[1:]), middle.nextafter(eight_bits[:-1])]
    x = torch.cat([eight_bits, *between])
    x = torch.cat([x, -x, torch.tensor([1e9, -float("inf"), float("nan")])])
    case = StoreCase(8, 4, 2, 64, torch.float32)
    values = torch.zeros(case.v.shape)
    values.view(-1)[: len(x)] = x
    case.v.copy_(values)
    kv_cache = torch.zeros(2, 1, 8, 2, 64, device=DEVICE).to(torch.float8_e4m3fn)
    case.store(torch.arange(8, device=DEVICE), kv_cache)
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(kv_cache[1, 0].float().cpu().nan_to_num(1000), expected.nan_to_num(1000))


# --- choosing the kernels


def test_kernels_for_a_cpu():
    cpu = torch.device("cpu")
    in_c = library() is not None
    assert type(select_kernels(cpu, torch.bfloat16)) is (CKernels if in_c else OneDnnKernels)
    assert type(select_kernels(cpu, torch.float32)) is (CSamplingKernels if in_c else OneDnnKernels)
    assert select_kernels(cpu, torch.bfloat16, native=False) is TORCH
    assert select_kernels(torch.device("meta"), torch.bfloat16) is TORCH


@pytest.mark.skipif(CUDA, reason="needs a machine without a GPU")
def test_without_a_gpu_the_log_says_why(caplog):
    triton_available.cache_clear()
    with caplog.at_level(logging.INFO, logger="nanovllm.kernels.selector"):
        assert select_kernels(torch.device("cuda"), torch.bfloat16) is TORCH
        assert select_kernels(torch.device("cuda"), torch.bfloat16) is TORCH
    (record,) = caplog.records
    assert "which is slower: there is no CUDA device" in record.getMessage()
