"""The Triton kernels against float64 and against torch's own path: interpreted without a GPU, on
it with one. bfloat16 only there: the interpreter computes it wrongly.
"""

import logging

import pytest
import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from nanovllm.engine.kv_cache import zeros
from nanovllm.kernels import cpu, gpu, kernels_for, on_gpu
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.quantization import quantize_fp8
from nanovllm.layers.rotary_embedding import RopeConfig, RotaryEmbedding
from nanovllm.layers.sampler import Sampling, draw, greedy, uniform
from tests.triton_interpreter import round_to_fp8

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if CUDA else [])]
EPS = 1e-6

round_to_fp8()

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_as_good(ours, torchs, exact):
    """No further from the float64 result than twice torch's path, or than one rounding."""
    assert ours.dtype == torchs.dtype
    assert ours.shape == exact.shape
    if exact.numel():
        rounding = torch.finfo(ours.dtype).eps * exact.abs().max()
        limit = 2 * (torchs.double() - exact).abs().max() + rounding
        assert (ours.double() - exact).abs().max() <= limit


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1), (5, 77), (3, 4096), (2, 5000), (0, 16)])
def test_quantize_fp8(shape, dtype):
    x = randn(*shape, dtype=dtype)
    if len(x) > 2:
        x[1], x[2] = 0, x[2] * 1e-3
    (values, scales), (torchs, torchs_scales) = gpu.quantize_fp8(x), quantize_fp8(x)
    assert values.dtype == torchs.dtype
    assert torch.allclose(scales, torchs_scales, rtol=1e-6)
    # A division that ends on another float32 may tip what lies between two steps.
    assert (values.float() != torchs.float()).sum() <= x.numel() / 1000
    ours, theirs = values.double() * scales.double(), torchs.double() * torchs_scales.double()
    assert ((ours - theirs).abs() <= theirs.abs() / 7 + scales.double() * 2.0**-9).all()


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
    torchs, total = norm.add(x, residual)
    norm.kernels = gpu
    changed = residual.clone()
    ours, same = norm.add(x, changed)
    assert same is changed
    assert torch.equal(changed, total)
    assert_as_good(ours, torchs, exact_norm(total.double(), norm.weight))
    kept = residual.clone()
    assert torch.equal(gpu.add_rms_norm(None, total, norm.weight, EPS), ours)
    alone = gpu.add_rms_norm(None, residual, norm.weight, EPS)
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
    layer = SiluAndMul()
    torchs = layer(gate_up)
    layer.kernels = gpu
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_as_good(layer(gate_up), torchs, silu(gate) * up)


# --- KV store


def exact_rotation(x, positions, cos_sin):
    cos, sin = cos_sin[positions, None].double().chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class StoreCase:
    """Random tokens; what torch makes of them, and what is exact."""

    def __init__(self, tokens, heads, kv_heads, head_dim, dtype):
        generator = torch.Generator().manual_seed(tokens + head_dim)
        rotary = RotaryEmbedding(head_dim, 4096, RopeConfig(theta=1e6)).to(DEVICE)
        self.cos_sin = rotary.cos_sin
        self.positions = torch.randint(4096, (tokens,), generator=generator).to(DEVICE)
        self.qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=tokens) * 3
        self.weights, parts, exact = [], [], []
        sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q, k, self.v = (x.unflatten(-1, (-1, head_dim)) for x in self.qkv.split(sizes, -1))
        for part in (q, k):
            norm = RMSNorm(head_dim, EPS)
            norm.weight.data = randn(head_dim, dtype=dtype, seed=len(parts)) + 1
            self.weights.append(norm.weight.data)
            parts.append(norm(part))
            normed = exact_norm(part.double(), norm.weight)
            exact.append(exact_rotation(normed, self.positions, self.cos_sin))
        self.q, self.k = rotary(self.positions, *parts)
        self.exact_q, self.exact_k = exact

    def store(self, slots, kv_cache):
        tables = (self.cos_sin, self.positions, slots)
        return gpu.store(self.qkv, *self.weights, EPS, *tables, kv_cache, self.q.shape[1])


@each_dtype
@pytest.mark.parametrize("tokens", [1, 6])
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
def test_store(tokens, heads, kv_heads, head_dim, block_size, dtype):
    case = StoreCase(tokens, heads, kv_heads, head_dim, dtype)
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
    # The slots before the first one's belong to somebody too.
    buffer = torch.full((3, 2, 4, 2, 64), 7.0, device=DEVICE)
    slots = torch.tensor([-1, 5, -1, -1], device=DEVICE)
    q = case.store(slots, buffer[1:])
    assert_as_good(q, case.q, case.exact_q)
    keys, values = buffer[1], buffer[2]
    assert torch.equal(values[1, 1], case.v[1])
    values[1, 1], keys[1, 1] = 7.0, 7.0
    assert (buffer == 7).all()


def assert_in_eight_bits(stored, exact):
    """The interpreter forgets to carry where rounding leads to the next power of two."""
    close = torch.isclose(stored.float(), exact.float(), rtol=2**-4, atol=2**-9)
    assert close.float().mean() > (0.999 if CUDA else 0.9)


def test_slots_past_32_bits():
    """Keys and values lie more than 2**31 elements into the cache (its pages are not touched)."""
    case = StoreCase(2, 2, 2, 128, torch.float32)
    last = 2**31 // 256
    kv_cache = zeros((2, last // 16 + 1, 16, 2, 128), torch.float8_e4m3fn, DEVICE)
    case.store(torch.tensor([last, last - 1], device=DEVICE), kv_cache)
    keys, values = kv_cache.flatten(1, 2)[:, [last, last - 1]]
    assert_in_eight_bits(keys, case.k)
    assert_in_eight_bits(values, case.v)


@each_dtype
def test_eight_bits_saturate(dtype):
    case = StoreCase(3, 4, 2, 64, dtype)
    eight_bits = torch.float8_e4m3fn
    case.v.copy_(case.v.to(eight_bits))  # exact numbers: no rounding
    case.v[0, 0, :4] = torch.tensor([500.0, -500.0, 60000.0, -60000.0])
    kv_cache = torch.zeros(2, 1, 4, 2, 64, device=DEVICE).to(eight_bits)
    case.store(torch.tensor([2, 0, 1], device=DEVICE), kv_cache)
    keys, values = kv_cache[:, 0, [2, 0, 1]].float()
    assert_in_eight_bits(keys, case.k)
    assert torch.equal(values, case.v.float().clamp(-448, 448))


# --- sampling


def make_sampling(rows, *, temperature=1.0, min_p=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def column(value):
        return torch.as_tensor(value).float().expand(rows).to(DEVICE).contiguous()

    return Sampling(
        temperatures=column(temperature),
        seeds=torch.randint(2**63 - 1, (rows,), generator=generator).to(DEVICE),
        positions=torch.randint(5000, (rows,), generator=generator).to(DEVICE),
        top_ks=torch.full((rows,), 2**31 - 1).to(DEVICE),
        top_ps=column(1.0),
        min_ps=column(min_p),
    )


def sample(logits, sampling):
    temperatures, min_ps = sampling.temperatures, sampling.min_ps
    return gpu.sample(logits, temperatures, sampling.seeds, sampling.positions, min_ps)


def assert_inverts(tokens, logits, sampling):
    """Each token has weight, and its share of the distribution holds the row's uniform number; the
    CPU's draw agrees wherever the number is not near a boundary.
    """
    tokens, logits = tokens.cpu(), logits.cpu()
    columns = ("temperatures", "seeds", "positions", "min_ps")
    temperatures, seeds, positions, min_ps = (getattr(sampling, name).cpu() for name in columns)
    weights = logits.double().sub(logits.double().amax(-1, keepdim=True))
    weights = weights.div(temperatures[:, None].double()).exp()
    weights[weights < min_ps[:, None] * (1 - 1e-6)] = 0
    ends = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    starts = ends - weights / weights.sum(-1, keepdim=True)
    number, place = uniform(seeds, positions), tokens[:, None]
    assert (weights.gather(1, place) > 0).all()
    before, after = starts.gather(1, place)[:, 0], ends.gather(1, place)[:, 0]
    assert (before - 1e-5 <= number).all()
    assert (number <= after + 1e-5).all()
    clear = (ends - number[:, None]).abs().amin(-1) > 1e-5
    everything = torch.full_like(seeds, 2**31 - 1)
    one = torch.ones_like(min_ps)
    rows = Sampling(temperatures, seeds, positions, everything, one, min_ps)
    assert torch.equal(tokens[clear], draw(logits.float(), rows)[clear])
    return clear.float().mean()


@each_dtype
@pytest.mark.parametrize("vocab_size", [1, 127, 2049, 6003])
def test_sample_inverts_the_distribution(vocab_size, dtype):
    rows = 8
    logits = randn(rows, vocab_size, dtype=dtype) * 3
    temperature = torch.linspace(0.3, 1.5, rows)
    for min_p in (0.0, torch.tensor([0.0, 1e-4, 0.05, 1.0]).repeat(rows // 4)):
        sampling = make_sampling(rows, temperature=temperature, min_p=min_p)
        share_clear = assert_inverts(sample(logits, sampling), logits, sampling)
        assert share_clear > 0.7 or vocab_size > 127


def test_sample_from_qwen3s_vocabulary():
    logits = randn(3, 151936, dtype=torch.float16) * 4
    sampling = make_sampling(3, temperature=0.6, min_p=torch.tensor([0.0, 0.0, 0.01]))
    assert_inverts(sample(logits, sampling), logits, sampling)


def test_the_uniform_numbers_are_the_samplers():
    """Of flat logits the token is the number, rounded down."""
    seeds = torch.tensor([0, 1, 2**31, 2**53 + 1, 2**62 + 12345, 2**63 - 1])
    positions = torch.tensor([0, 1, 63, 2**31])
    pairs = torch.cartesian_prod(seeds, positions).to(DEVICE)
    rows, size = len(pairs), 2048
    numbers = uniform(*pairs.T)
    ones = torch.ones(rows, device=DEVICE)
    logits = torch.full((rows, size), -2.5, device=DEVICE)
    tokens = gpu.sample(logits, ones, *pairs.T.contiguous(), 0 * ones)
    assert torch.equal(tokens, (numbers * size).long())


def test_a_row_does_not_depend_on_the_others():
    logits, sampling = randn(9, 5000) * 2, make_sampling(9, temperature=0.9)
    together = sample(logits, sampling)
    for row in range(9):
        alone = sampling.take(torch.tensor([row], device=DEVICE))
        assert torch.equal(sample(logits[row : row + 1], alone), together[row : row + 1])


def test_rows_that_lie_apart():
    """Logits of a padded vocabulary, sliced: the padding is never chosen."""
    padded = randn(4, 3000)
    padded[:, 2500:] = 50.0
    logits, sampling = padded[:, :2500], make_sampling(4)
    assert torch.equal(sample(logits, sampling), sample(logits.contiguous(), sampling))
    assert torch.equal(gpu.greedy(logits), logits.argmax(-1))


@each_dtype
def test_forbidden_tokens_are_never_drawn(dtype):
    """Whole blocks at -inf, before and behind those with weight; and a single token left."""
    logits = randn(16, 9000, dtype=dtype)
    logits[:, :2500] = -torch.inf
    logits[:, 6000:] = -torch.inf
    logits[8:, 2501:] = -torch.inf
    sampling = make_sampling(16, min_p=torch.tensor([0.0, 0.01]).repeat(8))
    tokens = sample(logits, sampling)
    assert ((tokens >= 2500) & (tokens < 6000)).all()
    assert (tokens[8:] == 2500).all()
    assert_inverts(tokens, logits, sampling)


@triton.jit
def invert(weights, targets, places, SIZE: tl.constexpr):
    row = tl.program_id(0)
    place, _ = gpu._invert(tl.load(weights + tl.arange(0, SIZE)), tl.load(targets + row))
    tl.store(places + row, place)


def test_rounding_leads_to_no_token_without_weight():
    """A sum that is aimed a little below 0, or at the end and beyond."""
    weights = torch.tensor([0, 0, 1, 0, 2, 0, 0, 0], dtype=torch.float64, device=DEVICE)
    targets = torch.tensor([-1e-17, 0, 0.99, 1, 2.99, 3, 3.01], dtype=torch.float64, device=DEVICE)
    places = torch.zeros(7, dtype=torch.int32, device=DEVICE)
    invert[(7,)](weights, targets, places, SIZE=8)
    assert places.tolist() == [2, 2, 2, 4, 4, 4, 4]


@each_dtype
@pytest.mark.parametrize("vocab_size", [1, 5, 2048, 7001])
def test_greedy_takes_the_first_of_the_largest(vocab_size, dtype):
    logits = randn(6, vocab_size, dtype=dtype)
    for row, places in enumerate([(0, -1), (vocab_size // 2, -1), (-2 % vocab_size, -1)]):
        logits[row, list(places)] = 9.0
    logits[5] = -torch.inf
    logits[5, vocab_size // 3] = -5.0
    expected = torch.tensor([row.tolist().index(row.max()) for row in logits.cpu()])
    assert torch.equal(gpu.greedy(logits).cpu(), expected)
    sampling = make_sampling(6, temperature=torch.tensor([0.0, 9e-6, 0.0, 0.0, 1.0, 0.0]))
    mixed = sample(logits, sampling)
    greedy_rows = torch.tensor([0, 1, 2, 3, 5])
    assert torch.equal(mixed.cpu()[greedy_rows], expected[greedy_rows])
    alone = sampling.take(torch.tensor([4], device=DEVICE))
    assert torch.equal(mixed[4:5], sample(logits[4:5], alone))


def test_no_rows():
    assert sample(randn(0, 100), make_sampling(0)).shape == (0,)
    assert gpu.greedy(randn(0, 100)).dtype == torch.int64


# --- which kernels serve a device


def test_kernels_for_a_cpu():
    assert kernels_for(torch.device("cpu"), torch.float32) is None
    expected = None if cpu.library() is None else cpu
    assert kernels_for(torch.device("cpu"), torch.bfloat16) is expected


@pytest.mark.skipif(CUDA, reason="needs a machine without a GPU")
def test_without_a_gpu_the_log_says_why(caplog):
    on_gpu.cache_clear()
    with caplog.at_level(logging.INFO, logger="nanovllm.kernels"):
        assert on_gpu() is None
        assert on_gpu() is None
    (record,) = caplog.records
    assert "plain torch serves: there is no CUDA device" in record.getMessage()


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_the_sampler_uses_the_kernels_on_a_gpu():
    assert kernels_for(DEVICE, torch.bfloat16) is on_gpu() is gpu
    logits, sampling = randn(8, 5000), make_sampling(8)
    assert torch.equal(draw(logits, sampling), sample(logits, sampling))
    assert torch.equal(greedy(logits), gpu.greedy(logits))
