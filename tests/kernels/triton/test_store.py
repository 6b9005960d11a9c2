"""The Triton kernel that prepares q, k and v and stores k and v agrees with float64 and with torch.
Without a GPU it is interpreted, and bfloat16 is left out: the interpreter computes it wrongly.
"""

import pytest
import torch

from nanovllm.attention.spec import AttentionSpec, QKNormRope
from nanovllm.kernels.torch_math import NORM_CENTRED, NORM_ROUNDED, NORM_WIDE
from nanovllm.kernels.triton.store import store
from nanovllm.layers.rotary_embedding import RotaryEmbedding, inverse_frequencies
from tests.closeness import assert_close
from tests.kernels.triton.inputs import (
    DEVICE,
    EPS,
    PLATFORM,
    assert_as_good,
    each_dtype,
    exact_norm,
    has_fp8,
    randn,
)
from tests.kernels.triton.interpreter import patch_interpreter

pytestmark = pytest.mark.usefixtures("inference_mode")
patch_interpreter()


class StoreCase:
    """Random tokens, and q, k and v of torch."""

    def __init__(self, tokens, heads, kv_heads, head_dim, dtype):
        generator = torch.Generator().manual_seed(tokens + head_dim)
        rotary = RotaryEmbedding(4096, inverse_frequencies(head_dim, 1e6)).to(DEVICE)
        weights = [randn(head_dim, dtype=dtype, seed=seed) + 1 for seed in range(2)]
        self.norm = QKNormRope(*weights, EPS, rotary.cos_sin)
        self.positions = torch.randint(4096, (tokens,), generator=generator).to(DEVICE)
        self.qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=tokens) * 3
        spec = AttentionSpec(heads, kv_heads, head_dim, dtype, DEVICE, None)
        self.q, self.k, self.v = self.norm.apply(self.qkv, self.positions, spec)

    def store(self, slots, kv_cache):
        tables = self.positions, slots, kv_cache
        return store(self.qkv, *self.norm[:4], *tables, self.q.shape[1])


def test_no_tokens():
    case = StoreCase(1, 4, 2, 64, torch.float32)
    case.qkv, case.positions = case.qkv[:0], case.positions[:0]
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
    assert_close(q, case.q, atol=1e-5)
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
    kv_cache = PLATFORM.zeros((2, last // 16 + 1, 16, 2, 128), torch.float8_e4m3fn)
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


# --- heads of every family


def exact_head(x, weight, norm, positions):
    """Return the heads x [T, heads, dim] normalised and rotated in float64."""
    cos, sin = norm.cos_sin[positions, None].double().chunk(2, -1)
    rotary = norm.cos_sin.shape[1]
    factor = 1.0
    if weight is not None:
        factor = weight.double() + (norm.kind == NORM_CENTRED)
    if weight is not None and not norm.after_rotation:
        x = exact_norm(x, factor)
    rotating, rest = x[..., :rotary], x[..., rotary:]
    first, second = rotating.chunk(2, -1)
    if norm.interleaved:
        first, second = rotating[..., ::2], rotating[..., 1::2]
    x = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
    return exact_norm(x, factor) if weight is not None and norm.after_rotation else x


@pytest.mark.thinned(5)
@each_dtype
@pytest.mark.parametrize(
    ("heads", "parts", "head_dim", "rotary_dim", "weighted", "options"),
    [
        ((16, 8), 3, 128, 128, True, {}),
        ((7, 1), 3, 80, 80, False, {}),
        ((6, 1), 3, 2, 2, True, {}),
        ((4, 1), 3, 256, 256, True, {}),
        ((6, 3), 3, 64, 64, True, {"kind": NORM_WIDE}),
        ((5, 5), 3, 80, 80, True, {"kind": NORM_CENTRED}),
        ((6, 3), 3, 96, 72, False, {}),
        ((8, 1), 3, 64, 32, True, {"kind": NORM_WIDE, "v_norm": True}),
        ((6, 3), 3, 64, 0, True, {}),
        ((6, 3), 3, 128, 128, False, {"interleaved": True}),
        ((6, 3), 3, 96, 48, True, {"interleaved": True}),
        ((6, 3), 3, 128, 128, True, {"after_rotation": True, "kind": NORM_ROUNDED}),
        ((6, 2), 3, 64, 32, True, {"after_rotation": True, "interleaved": True, "kind": NORM_WIDE}),
        ((6, 3), 3, 64, 64, False, {"q_scale": True}),
        ((6, 3), 2, 512, 512, True, {"v_norm": True, "kind": NORM_WIDE}),
        ((6, 3), 2, 64, 32, True, {"interleaved": True}),
        ((6, 3), 2, 96, 32, False, {"interleaved": True, "halves": 1}),
        ((6, 3), 1, 64, 64, True, {"kind": NORM_WIDE, "q_scale": True}),
    ],
    ids=str,
)
def test_store(heads, parts, head_dim, rotary_dim, weighted, options, dtype):
    """The blocks of the cache lie apart. One half of it has only keys."""
    heads, kv_heads = heads
    tokens, block_size = 5, 4
    weights = [randn(head_dim, dtype=dtype, seed=n) * 0.3 + 1 if weighted else None for n in (1, 2)]
    if parts == 1:
        weights[1] = None
    options = dict(options)
    halves = options.pop("halves", 2)
    if "q_scale" in options:
        options["q_scale"] = randn(50, seed=5).abs() + 0.5
    angles = randn(50, rotary_dim // 2, seed=3)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    norm = QKNormRope(*weights, EPS, cos_sin, **options)
    qkv = randn(tokens, (heads + (parts - 1) * kv_heads) * head_dim, dtype=dtype) * 3
    positions, slots = (
        torch.tensor(x, device=DEVICE) for x in ([9, 0, 3, 49, 7], [5, 0, 11, 2, 8])
    )
    spec = AttentionSpec(heads, kv_heads, head_dim, dtype, DEVICE, block_size)
    torchs = norm.apply(qkv, positions, spec)
    q, *kv = qkv.view(tokens, -1, head_dim).double().split([heads] + [kv_heads] * (parts - 1), 1)
    exact = [exact_head(q, weights[0], norm, positions)]
    if norm.q_scale is not None:
        exact[0] = exact[0] * norm.q_scale[positions, None, None]
    if kv:
        exact.append(exact_head(kv[0], weights[1], norm, positions))
        exact.append(exact_norm(kv[-1], 1.0) if norm.v_norm else kv[-1])

    block = 2 * block_size * kv_heads * head_dim
    pages = torch.full((3, block + 32), 7.0).to(DEVICE, dtype)
    cache = pages[:, :block].view(3, 2, block_size, kv_heads, head_dim).movedim(0, 1)
    cache = cache[:halves]
    fields = norm._asdict()
    head = [fields.pop(name) for name in ("q_weight", "k_weight", "eps", "cos_sin")]
    ours = [store(qkv, *head, positions, slots, cache, heads, **fields)]
    if kv:
        ours += [cache[part, slots // block_size, slots % block_size] for part in range(halves)]
    else:
        assert (pages == 7).all()
    for result, expected, truth in zip(ours, torchs, exact, strict=False):
        assert_as_good(result, expected, truth)
    cache[:, slots // block_size, slots % block_size] = 7
    assert (pages == 7).all(), "nothing else is written"
