"""Storing into the paged cache and attention over it, against float64, built for each kind of
processor.
"""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from nanovllm.attention.batch import Batch
from nanovllm.attention.cpu import CPUBackend
from nanovllm.attention.spec import AttentionSpec, QKNormRope
from nanovllm.kernels.cpu import ops
from nanovllm.kernels.torch_math import NORM_CENTRED, NORM_WIDE
from nanovllm.layers.rotary_embedding import RotaryEmbedding, inverse_frequencies
from tests.closeness import assert_close, token_names
from tests.kernels.cpu.helpers import native, randn

pytestmark = [native, pytest.mark.usefixtures("inference_mode")]


OPTIONS = {
    "rotation only": {"weights": False},
    "rounded": {},
    "wide": {"kind": NORM_WIDE},
    "centred": {"kind": NORM_CENTRED},
    "norm last": {"after_rotation": True},
    "interleaved": {"interleaved": True},
    "interleaved, no norm": {"interleaved": True, "weights": False},
    "values normed": {"v_norm": True, "kind": NORM_WIDE},
    "queries scaled": {"scaled": True},
    "part rotated": {"rotary": 1 / 2},
    "part rotated, interleaved": {"rotary": 1 / 4, "interleaved": True, "weights": False},
    "not rotated": {"rotary": 0},
    "values are keys": {"kv_parts": 1},
    "values are keys, normed": {"kv_parts": 1, "v_norm": True, "rotary": 1 / 4},
    "queries only": {"kv_parts": 0, "scaled": True},
}


def make_qk_norm(head_dim, *, weights=True, rotary=1, scaled=False, kv_parts=2, **fields):
    """Return a QKNormRope with random weights, and the number of head groups in qkv beside q."""
    rotary_dim = int(head_dim * rotary) // 2 * 2
    cos_sin = torch.zeros(512, 0)
    if rotary_dim:
        cos_sin = RotaryEmbedding(512, inverse_frequencies(rotary_dim, 10000.0)).cos_sin
    q_weight, k_weight = (
        randn(head_dim, seed=seed).abs() + 0.5 if weights else None for seed in (3, 4)
    )
    q_scale = 1 + torch.rand(512, generator=torch.Generator().manual_seed(5)) if scaled else None
    k_weight = k_weight if kv_parts else None
    return QKNormRope(q_weight, k_weight, 1e-6, cos_sin, **fields, q_scale=q_scale), kv_parts


def prepared(x, weight, norm, positions):
    """Return the normed and rotated heads in float64, and a bound on each number's rounding."""

    def norm_factor(x):
        if weight is None:
            return 1
        inverse = (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        return inverse * (weight.double() + (norm.kind == NORM_CENTRED))

    x = x if norm.after_rotation else x * norm_factor(x)
    cos, sin = norm.cos_sin.double()[positions, None].chunk(2, -1)
    rotary = norm.cos_sin.shape[1]
    pairs, rest = x[..., :rotary], x[..., rotary:]
    first, second = pairs[..., : rotary // 2], pairs[..., rotary // 2 :]
    if norm.interleaved:
        first, second = pairs[..., 0::2], pairs[..., 1::2]
    x = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
    size = torch.cat([torch.hypot(first, second).repeat(1, 1, 2), rest.abs()], -1)
    if norm.after_rotation:
        x, size = x * norm_factor(x), size * norm_factor(x)
    return x, 2**-8 * x.abs() + 1e-6 * size if weight is None else 3 * 2**-8 * size


def exact_parts(parts, norm, positions):
    """Return q, and k and v if `parts` has keys, in float64; and bounds of q and k."""
    q, bound = prepared(parts[0], norm.q_weight, norm, positions)
    if norm.q_scale is not None:
        scale = norm.q_scale.double()[positions, None, None]
        q, bound = q * scale, (bound + 2**-8 * q.abs()) * scale
    if len(parts) == 1:
        return [q], [bound]
    k, k_bound = prepared(parts[1], norm.k_weight, norm, positions)
    v = parts[-1]
    if norm.v_norm:
        v = v * (v.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return [q, k, v], [bound, k_bound]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tokens"),
    [(6, 2, 64, 70), (3, 1, 80, 33), (4, 4, 18, 1), (2, 1, 512, 20)],
)
def test_store_is_float64s(heads, kv_heads, head_dim, tokens, options):
    """Without a norm, a number is rounded once: its error is half of its last bit.

    Another owner of the pages left NaN. A key's padding, which is multiplied by 0, must lose it.
    """
    block_size, num_blocks = 32, 4
    norm, kv_parts = make_qk_norm(head_dim, **OPTIONS[options])
    qkv = randn(tokens, (heads + kv_parts * kv_heads) * head_dim, seed=tokens)
    order = torch.Generator().manual_seed(1)
    positions = torch.randint(len(norm.cos_sin), (tokens,), generator=order)
    slots = torch.randperm(num_blocks * block_size, generator=order)[:tokens].sort().values
    spec = AttentionSpec(heads, kv_heads, head_dim, torch.bfloat16, torch.device("cpu"), block_size)
    shape = CPUBackend(spec).kv_cache_shape(num_blocks)
    cache = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    found_q = ops.store(qkv, positions, slots, cache, heads, head_dim, **norm._asdict())
    parts = [
        part.unflatten(-1, (-1, head_dim)).double()
        for part in qkv.split_with_sizes([heads * head_dim, *[kv_heads * head_dim] * kv_parts], -1)
    ]
    exact, bounds = exact_parts(parts, norm, positions)
    assert_close(found_q, exact[0], atol=bounds[0])
    if not kv_parts:
        assert cache.isnan().all()
        return
    width = cache.shape[-1]
    panels = cache[:, :, 0].flatten(2).unflatten(2, (-1, width // 2, 32, 2))
    keys = panels.permute(1, 2, 4, 0, 3, 5).reshape(num_blocks * block_size, kv_heads, -1)
    assert_close(keys[slots][..., :head_dim], exact[1], atol=bounds[1])
    assert not keys[slots][..., head_dim:].any()
    panels = cache[:, :, 1].flatten(2).unflatten(2, (width // 32, block_size // 2, 32, 2))
    values = panels.permute(1, 3, 5, 0, 2, 4).reshape(num_blocks * block_size, kv_heads, -1)
    assert_close(values[slots][..., :head_dim], exact[2], rtol=1.01 * 2**-9 * 2 * norm.v_norm)


@pytest.mark.parametrize("options", OPTIONS)
def test_torchs_preparation_is_float64s(options):
    """QKNormRope.apply, which the backends in torch use, in float32."""
    norm, kv_parts = make_qk_norm(64, **OPTIONS[options])
    spec = AttentionSpec(6, 2, 64, torch.float32, torch.device("cpu"), None)
    qkv, positions = randn(9, (6 + kv_parts * 2) * 64).float(), torch.arange(40, 49)
    found = [part for part in norm.apply(qkv, positions, spec) if part is not None]
    parts = qkv.double().unflatten(-1, (-1, 64)).split([6, *[2] * kv_parts], 1)
    exact, _ = exact_parts(parts, norm, positions)
    for part, expected in zip(found, exact, strict=True):
        assert_close(part, expected, atol=1e-5, rtol=1e-5)


def reference(
    q, k, v, seq_lens, query_lens, scale=None, window=None, softcap=0.0, sinks=None, causal=True,
    ends=None,
):  # fmt: skip
    """Return attention in float64. A sequence's q rows are its last tokens. `ends`: see `Batch`."""
    outs, start, end = [], 0, 0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for seq_len, query_len in zip(seq_lens, query_lens, strict=True):
        queries, keys, values = (
            q[start : start + query_len],
            k[end : end + seq_len],
            v[end : end + seq_len],
        )
        start, end = start + query_len, end + seq_len
        group = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(seq_len - query_len, seq_len)[:, None] - torch.arange(seq_len)
        upper = distance >= 0
        if ends is not None:
            upper = torch.arange(seq_len) < ends[start - query_len : start, None]
        seen = upper & (distance < (window or seq_len)) | (not causal)
        scores.masked_fill_(~seen, -torch.inf)
        if sinks is not None:  # a key more, whose value is 0
            column = sinks.double()[:, None, None].expand(-1, query_len, 1)
            scores = torch.cat([scores, column], -1)
            values = F.pad(values, (0, 0, 0, 0, 0, 1))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outs)


def hadamard(size):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def rounded(x, dtype, *, values):
    """Return heads as a cache of int8, or of 4 bits in uint8, keeps them: see cache.h."""
    head_dim = x.shape[-1]
    width = -(-head_dim // 32) * 32
    turn = math.gcd(width, 256)
    x = F.pad(x.double(), (0, width - head_dim)).unflatten(-1, (-1, turn)) @ hadamard(turn)
    group = width if values or (dtype == torch.int8 and width <= 256) else turn
    if dtype == torch.uint8 and not values:
        group = 32
    x = x.flatten(-2).unflatten(-1, (-1, group))
    zero = torch.zeros_like(x[..., :1])
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    lowest, scale, least, most = zero, largest.abs() / 127, -127, 127
    if dtype == torch.uint8:
        scale, least, most = largest / -8, -8, 7
        if not values:
            lowest = x.amin(-1, keepdim=True).half().double()
            scale, least, most = (x.amax(-1, keepdim=True) - lowest) / 15, 0, 15
    scale = scale.half().double()
    x = ((x - lowest) / scale).nan_to_num().round().clamp(least, most) * scale + lowest
    x = x.flatten(-2).unflatten(-1, (-1, turn)) @ hadamard(turn)
    return x.flatten(-2)[..., :head_dim]


def assert_attention(spec, found, exact, **names):
    """Assert that `found` is attention over what the cache keeps. With 8 and 4 bits queries and
    weights are rounded, too, which moves few numbers far.
    """
    most, mean = (0.05, 0.004) if spec.quantized_kv else (0.01, 0.001)
    assert_close(found, exact, atol=most, rtol=2**-8, **names)
    assert (found - exact).abs().mean() < mean + 2**-9 * exact.abs().mean()


class Stored:
    """Sequences in a cache, their queries, and what attention needs beside them."""

    def __init__(self, spec, seq_lens, qkv=None, norm=None):
        self.backend, self.seq_lens = CPUBackend(spec), seq_lens
        size, kv_parts = self.backend.block_size, 1 if spec.value_dim else 2
        heads = spec.num_heads + kv_parts * spec.num_kv_heads
        widths = [-(-n // size) for n in seq_lens]
        order = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(5))
        self.blocks = order.int().split(widths)
        self.stale = sum(widths)  # a block that no query may read
        dtype = spec.kv_dtype or spec.dtype
        self.cache = torch.zeros(self.backend.kv_cache_shape(self.stale + 1), dtype=dtype)
        norm = norm or make_qk_norm(spec.head_dim, weights=False)[0]
        positions = torch.cat([torch.arange(n) for n in seq_lens])
        slots = torch.cat(
            [
                self.blocks[row][torch.arange(n) // size].long() * size + torch.arange(n) % size
                for row, n in enumerate(seq_lens)
            ]
        )
        if qkv is None:
            qkv = randn(len(positions), heads * spec.head_dim, seed=heads)
        self.q = ops.store(
            qkv, positions, slots, self.cache, spec.num_heads, spec.head_dim, **norm._asdict()
        )
        _, k, v = norm.apply(qkv, positions, spec)
        self.kv = [k, k[..., -spec.value_dim :] if spec.value_dim else v]
        if spec.quantized_kv:
            self.kv = [rounded(k, dtype, values=False), rounded(v, dtype, values=True)]
        self.cache[:, self.stale].view(torch.uint8).fill_(0xFF)  # NaN, also as a scale of int8
        self.sinks = randn(spec.num_heads, seed=9).float() * 2 if spec.sinks else None

    def attend(self, chunks, ends=None):
        """Return the attention of tokens [start, stop) of each row in `chunks`, by chunk. `ends` is
        that of all tokens of each row.

        Table entries of blocks that the windows have left are those of a block of NaN.
        """
        size, window = self.backend.block_size, self.backend.spec.window or 2**30
        tables = torch.full((len(chunks), max(map(len, self.blocks))), 2**30, dtype=torch.int32)
        for line, (row, start, _) in zip(tables, chunks, strict=True):
            line[: len(self.blocks[row])] = self.blocks[row]
            line[: max(start + 1 - window, 0) // size] = self.stale
        queries = self.q.split(self.seq_lens)
        queries = [queries[row][start:stop] for row, start, stop in chunks]
        if ends is not None:
            ends = torch.cat([ends[row][start:stop] for row, start, stop in chunks]).int()
        return self.attend_rows(queries, tables, [stop for _, _, stop in chunks], ends)

    def attend_rows(self, queries, tables, seq_lens, ends=None):
        """Return the attention of rows whose last tokens have `queries`, by row."""
        lens = [len(q) for q in queries]
        empty = torch.empty(0)
        batch = Batch(
            input_ids=empty,
            positions=empty,
            slot_mapping=empty,
            cu_seqlens_q=torch.tensor([0, *lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=tables,
            ends=ends,
        )
        q = torch.cat(queries)
        return self.backend.attend(q, self.cache, batch, sinks=self.sinks).split(lens)


@native
@pytest.mark.parametrize("sinks", [True, False])
def test_sinks_are_given_if_the_spec_has_them(sinks):
    cpu = torch.device("cpu")
    stored = Stored(AttentionSpec(2, 1, 64, torch.bfloat16, cpu, 32, sinks=sinks), [40])
    stored.sinks = None if sinks else torch.zeros(2)
    with pytest.raises(AssertionError):
        stored.attend([(0, 0, 40)])


@native
def test_all_tokens_see_several_segments():
    sizes = 1, 1, 32, torch.bfloat16, torch.device("cpu"), 64
    not_rotated = QKNormRope(None, None, 1e-6, torch.zeros(4500, 0))
    stored = Stored(AttentionSpec(*sizes, causal=False), [4500], norm=not_rotated)
    [found] = stored.attend([(0, 4400, 4500)])
    keys = (x.double() for x in stored.kv)
    exact = reference(stored.q[4400:].double(), *keys, [4500], [100], causal=False)
    assert_close(found, exact, atol=0.002, rtol=2**-7)


INT8, INT4 = {"kv_dtype": torch.int8}, {"kv_dtype": torch.uint8}


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((4, 2, 64, 32), {}),
        ((4, 2, 80, 64), {"window": 5, "sinks": True, **INT8}),
        ((8, 1, 256, 64), {"window": 64, "softcap": 30.0}),
        ((2, 2, 96, 32), {"window": 150}),
        ((6, 2, 64, 128), INT8),
        ((6, 2, 64, 128), INT4),
        ((40, 1, 96, 32), {"value_dim": 64}),
    ],
    ids=str,
)
def test_tokens_of_a_picture_see_each_other(sizes, options):
    """Whole prompts against float64; then chunks that begin anywhere and end behind a picture."""
    rng = random.Random(str(options))
    *heads, block_size = sizes
    spec = AttentionSpec(
        *heads, torch.bfloat16, torch.device("cpu"), block_size, sees_pictures=True, **options
    )
    seq_lens = [1, 70, 333, 500]
    pictures = [[(0, 1)], [(5, 45), (45, 70)], [(0, 33), (34, 35), (100, 290)], [(2, 482)]]
    ends = [torch.arange(1, n + 1) for n in seq_lens]
    for row, spans in enumerate(pictures):
        for start, stop in spans:
            ends[row][start:stop] = stop
    stored = Stored(spec, seq_lens)
    whole = stored.attend([(row, 0, n) for row, n in enumerate(seq_lens)], ends)
    exact = reference(
        *(x.double() for x in (stored.q, *stored.kv)),
        *(seq_lens, seq_lens, spec.scale, spec.window, spec.softcap, stored.sinks),
        ends=torch.cat(ends),
    )
    found = torch.cat(whole)
    assert_attention(spec, found, exact, rows=token_names(seq_lens, seq_lens))
    for _ in range(8):
        chunks = []
        for row, n in enumerate(seq_lens):
            start = rng.randrange(n)
            cut = rng.randint(start, n - 1)
            chunks.append((row, start, int(ends[row][cut])))
        for (row, start, stop), part in zip(chunks, stored.attend(chunks, ends), strict=True):
            assert torch.equal(part, whole[row][start:stop])
    # Text alone has the bits that it has in a batch without pictures.
    text = [(2, 290, 333), (3, 485, 500)]
    for alone, part in zip(stored.attend(text), stored.attend(text, ends), strict=True):
        assert torch.equal(alone, part)


SPECS = [
    ((16, 8, 128, 64), {}),
    ((7, 1, 96, 32), INT8),
    ((4, 4, 64, 32), {"window": 1}),
    ((4, 2, 80, 64), {"window": 5, "sinks": True, **INT8}),
    ((8, 1, 256, 64), {"window": 64, "softcap": 30.0, "scale": 0.1, **INT8}),
    ((2, 1, 576, 64), {"window": 65, "sinks": True, "scale": 1.0}),
    ((4, 4, 64, 32), {"window": 33, **INT8}),
    ((4, 2, 64, 128), {"window": 1000, "softcap": 2.0, "sinks": True, "scale": 0.5}),
    ((3, 1, 288, 32), {"softcap": 5.0}),
    ((6, 2, 80, 32), {"window": 200, "sinks": True, "scale": 0.02, **INT8}),
    ((4, 4, 32, 64), {"causal": False, **INT8}),
    ((9, 1, 128, 64), {"window": 130, "sinks": True, **INT4}),
    ((2, 2, 80, 32), {"softcap": 2.0, "scale": 0.1, **INT4}),
    ((7, 1, 320, 96), INT4),
    ((3, 3, 32, 512), {"causal": False, **INT4}),
    ((2, 1, 512, 512), INT8),
    ((6, 2, 64, 32), {"causal": False}),
    # More query heads than a tile has rows:
    ((20, 1, 576, 64), {"value_dim": 512}),
    ((80, 2, 96, 32), {"value_dim": 64, "sinks": True}),
    ((37, 1, 70, 128), {"value_dim": 54, "window": 64}),
    ((5, 1, 66, 32), {"value_dim": 6, "window": 5, "sinks": True}),
]
"""Heads, KV heads, head_dim and block size, and what else a spec has."""


@pytest.mark.thinned(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("sizes", "options"), SPECS, ids=str)
def test_attention_is_float64s(sizes, options):
    *heads, block_size = sizes
    cpu = torch.device("cpu")
    check_prompts_and_chunks(AttentionSpec(*heads, torch.bfloat16, cpu, block_size, **options))


def check_prompts_and_chunks(spec):
    """Whole prompts against float64; then in chunks, whose rows are the same bits."""
    assert CPUBackend.unsupported(spec) is None
    seq_lens = [1, 70, 333]
    stored = Stored(spec, seq_lens)
    whole = stored.attend([(row, 0, n) for row, n in enumerate(seq_lens)])
    exact = reference(
        *(x.double() for x in (stored.q, *stored.kv)),
        *(seq_lens, seq_lens, spec.scale, spec.window, spec.softcap, stored.sinks, spec.causal),
    )
    found = torch.cat(whole)
    assert_attention(spec, found, exact, rows=token_names(seq_lens, seq_lens))
    if spec.causal and not spec.sinks:
        # A sequence's first token sees itself alone: what comes out is the value that is kept.
        first = torch.tensor([0, *seq_lens[:-1]]).cumsum(0)
        assert_close(found[first], exact[first], rtol=2**-7, atol=1e-3)
    if not spec.causal:  # there are no chunks: each prompt alone
        for row, n in enumerate(seq_lens):
            assert torch.equal(stored.attend([(row, 0, n)])[0], whole[row])
        return
    chunks = [(2, 40, 290), (1, 69, 70), (2, 0, 40), (2, 332, 333), (1, 0, 33), (2, 290, 332)]
    for together in (chunks, [(1, 33, 69)], [(2, 300, 301)]):
        for (row, start, stop), found in zip(together, stored.attend(together), strict=True):
            assert torch.equal(found, whole[row][start:stop])


@pytest.mark.thinned(5)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (4, 2, {}),
        (4, 2, {"kv_dtype": torch.int8, "window": 450, "sinks": True}),
        (3, 1, {"value_dim": 32, "window": 333, "softcap": 5.0}),
        (8, 1, {"kv_dtype": torch.int8, "sinks": True}),
        (4, 1, {"kv_dtype": torch.uint8, "window": 450}),
        (20, 1, {"value_dim": 48, "sinks": True}),
        (6, 2, {"window": 450, "sinks": True}),
    ],
)
def test_rows_that_share_blocks_are_alone_to_the_bit(heads, kv_heads, options):
    rng = random.Random(heads)
    spec = AttentionSpec(heads, kv_heads, 64, torch.bfloat16, torch.device("cpu"), 64, **options)
    num_blocks, size, width, window = 24, 64, 12, spec.window or 2**30
    stored = Stored(spec, [512] * 3)
    for num_rows in (3, 25):
        trunks = [rng.choices(range(num_blocks), k=width) for _ in range(3)]
        trunks[1][:5] = trunks[0][:5]
        queries, tables, seq_lens = [], [], []
        for _ in range(num_rows):
            trunk = rng.choice(trunks)
            shared = rng.choice([0, 4, 8, 9, 11, width, rng.randint(0, width)])
            table = [*trunk[:shared], *rng.choices(range(num_blocks), k=width - shared)]
            tokens = rng.choice([1, 1, 1, 2, 5, 20])
            seq_len = rng.choice([rng.randint(tokens, width * size), 512, 516, 600])
            begin = max(seq_len - tokens + 1 - window, 0) // size
            end = -(-seq_len // size)
            tables.append([stored.stale] * begin + table[begin:end] + [2**30] * (width - end))
            seq_lens.append(seq_len)
            at = rng.randrange(num_blocks * size - tokens)
            queries.append(stored.q[at : at + tokens])
        block_tables = torch.tensor(tables, dtype=torch.int32)
        together = stored.attend_rows(queries, block_tables, seq_lens)
        for row, found in enumerate(together):
            one = slice(row, row + 1)
            (alone,) = stored.attend_rows(queries[one], block_tables[one], seq_lens[one])
            assert torch.equal(found, alone)


@pytest.fixture
def threads():
    """A function that sets the number of threads, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.thinned(5)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (4, 1, {}),
        (4, 2, {"kv_dtype": torch.int8, "window": 4500, "sinks": True}),
        (5, 1, {"value_dim": 32, "softcap": 5.0, "sinks": True}),
        (3, 1, {"kv_dtype": torch.int8, "softcap": 2.0}),
        (4, 2, {"kv_dtype": torch.uint8, "window": 4500}),
        (6, 2, {"window": 70, "sinks": True}),
        (3, 1, {"block_size": 96, "window": 4200}),
    ],
)
def test_threads_share_a_long_sequence_and_change_no_bit(heads, kv_heads, options, threads):
    """Sums begin anew every 4,096 keys: whole sequences against float64, then in other batches."""
    size = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "block_size": 64}
    spec = AttentionSpec(heads, kv_heads, 48, **{**size, **options})
    seq_lens = [8260, 4200]
    stored = Stored(spec, seq_lens, norm=QKNormRope(None, None, 1e-6, torch.zeros(8260, 0)))
    chunks = [(0, 8235, 8260), (0, 8190, 8194), (1, 4080, 4110), (0, 4097, 4098), (1, 10, 11)]
    threads(1)
    whole = stored.attend(chunks)
    q, k, v = (x.double().split(seq_lens) for x in (stored.q, *stored.kv))
    for (row, start, stop), found in zip(chunks, whole, strict=True):
        tokens = q[row][start:stop], k[row][:stop], v[row][:stop], [stop], [stop - start]
        exact = reference(*tokens, spec.scale, spec.window, spec.softcap, stored.sinks)
        assert_attention(spec, found, exact)
    for count in (1, 2, 7):
        threads(count)
        for (row, start, stop), expected in zip(chunks, whole, strict=True):
            cut = (start + stop) // 2
            parts = [(row, cut, stop), (row, start, cut)][: stop - start]
            parts = sorted(zip(parts, stored.attend(parts), strict=True), key=lambda part: part[0])
            assert torch.equal(torch.cat([found for _, found in parts]), expected)
    if spec.window is None:
        check_long_rows_that_share_blocks(stored, threads)


@pytest.mark.usefixtures("kernels")
def test_threads_do_not_write_to_one_byte(threads):
    """Two tokens' values of 4 bits share a byte; parts of a batch end anywhere."""
    norm, _ = make_qk_norm(64)
    cpu = torch.device("cpu")
    backend = CPUBackend(AttentionSpec(3, 1, 64, torch.bfloat16, cpu, 64, kv_dtype=torch.uint8))
    slots = torch.cat([torch.arange(3, 130), torch.arange(193, 197), torch.arange(261, 300)])
    qkv, positions = randn(len(slots), 5 * 64, seed=3), torch.arange(len(slots))
    found = []
    for count in (1, 7, 7, 7, 7):
        threads(count)
        cache = torch.zeros(backend.kv_cache_shape(5), dtype=torch.uint8)
        ops.store(qkv, positions, slots, cache, 3, 64, **norm._asdict())
        found.append(cache)
    assert all(torch.equal(cache, found[0]) for cache in found)


def check_long_rows_that_share_blocks(stored, threads):
    size = stored.backend.block_size
    tables = stored.blocks[0].repeat(5, 1)
    for row, same in enumerate((0, 64, 66, 100, 128)):
        tables[row, same:] = tables[row, same:].roll(row)
    seq_lens = [8259, 4097, 4500, 6399, 8250]
    queries = list(stored.q[: 5 * 4].split(4))
    queries[2] = queries[2][:1]
    for count in (1, 3, 8):
        threads(count)
        together = stored.attend_rows(queries, tables, seq_lens)
        threads(1)
        for row, found in enumerate(together):
            one = slice(row, row + 1)
            width = -(-seq_lens[row] // size)
            (alone,) = stored.attend_rows(queries[one], tables[one, :width], seq_lens[one])
            assert torch.equal(found, alone)


def test_unsupported_shapes_are_named():
    def spec(**changes):
        base = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": None}
        return AttentionSpec(
            **{**base, "dtype": torch.bfloat16, "device": torch.device("cpu"), **changes}
        )

    assert CPUBackend.unsupported(spec()) is None
    assert "head_dim 81" in CPUBackend.unsupported(spec(head_dim=81))
    assert "kvcache_block_size 16" in CPUBackend.unsupported(spec(block_size=16))
    assert "bfloat16" in CPUBackend.unsupported(spec(dtype=torch.float32))
    assert "head_dim 578" in CPUBackend.unsupported(spec(head_dim=578))
    assert "33 numbers" in CPUBackend.unsupported(spec(value_dim=33))
    assert "are also values" in CPUBackend.unsupported(spec(value_dim=32, kv_dtype=torch.int8))
