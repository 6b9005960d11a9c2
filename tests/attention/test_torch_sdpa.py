"""The torch backend against attention written out in float64, one head and one token at a time."""

import dataclasses
import random

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nanovllm.attention import torch_sdpa
from nanovllm.attention.backend import AttentionSpec, Batch, select_backend
from nanovllm.attention.torch_sdpa import TorchBackend

OUT_OF_RANGE = (-1, 2**31 - 1)


@dataclasses.dataclass
class Case:
    """A batch with its cache, and the contiguous keys and values that the cache stands for."""

    backend: TorchBackend
    batch: Batch
    cache: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: list[torch.Tensor]
    """By row, [seq_len, num_kv_heads, head_dim]."""
    values: list[torch.Tensor]

    def run(self):
        return self.backend.forward(self.q, self.k, self.v, self.cache, self.batch)


def make_case(rows, num_kv_heads, group, head_dim, block_size, dtype=torch.float32, seed=0):
    """Make a case of `rows`, (query length, sequence length) each.

    Blocks are drawn in random order from a pool that holds more; all that is not a prefix's is
    large and finite, so reading it shows. Columns past a row's blocks name blocks out of range.
    """
    generator = torch.Generator().manual_seed(seed)
    chooser = random.Random(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    spec = AttentionSpec(
        num_kv_heads * group, num_kv_heads, head_dim, dtype, torch.device("cpu"), block_size
    )
    backend = TorchBackend(spec)
    widths = [-(-seq_len // block_size) for _, seq_len in rows]
    num_blocks = sum(widths) + 3
    cache = torch.full(backend.kv_cache_shape(num_blocks), 1e4).to(dtype)
    free = chooser.sample(range(num_blocks), num_blocks)
    tables = torch.tensor(
        [[chooser.choice(OUT_OF_RANGE) for _ in range(max(widths) + 2)] for _ in rows],
        dtype=torch.int32,
    )
    keys = [normal(seq_len, num_kv_heads, head_dim) for _, seq_len in rows]
    values = [normal(seq_len, num_kv_heads, head_dim) for _, seq_len in rows]
    positions, slots = [], []
    for row, (query_len, seq_len) in enumerate(rows):
        blocks = [free.pop() for _ in range(widths[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(seq_len):
            block, offset = blocks[position // block_size], position % block_size
            if position < seq_len - query_len:
                cache[0, block, offset] = keys[row][position]
                cache[1, block, offset] = values[row][position]
            else:
                positions.append(position)
                slots.append(block * block_size + offset)
    query_lens, seq_lens = zip(*rows, strict=True)
    ends = torch.tensor([0, *query_lens]).cumsum(0)
    batch = Batch(
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        cu_seqlens_q=ends.int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables,
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    return Case(
        backend,
        dataclasses.replace(batch, metadata=backend.plan(batch)),
        cache,
        q=normal(len(positions), num_kv_heads * group, head_dim),
        k=torch.cat([key[s - q :] for key, (q, s) in zip(keys, rows, strict=True)]),
        v=torch.cat([value[s - q :] for value, (q, s) in zip(values, rows, strict=True)]),
        keys=keys,
        values=values,
    )


def reference(case):
    """Attend one token and one head at a time, in float64."""
    out = torch.empty(case.q.shape, dtype=torch.float64)
    group = case.q.shape[1] // case.k.shape[1]
    token = 0
    for row, query_len in enumerate(case.batch.query_lens_host):
        keys, values = case.keys[row].double(), case.values[row].double()
        for seen in range(len(keys) - query_len + 1, len(keys) + 1):
            for head in range(case.q.shape[1]):
                k, v = keys[:seen, head // group], values[:seen, head // group]
                weights = torch.softmax(k @ case.q[token, head].double() / k.shape[1] ** 0.5, 0)
                out[token, head] = weights @ v
            token += 1
    return out


def contiguous_sdpa(case):
    """What torch gives in the case's own dtype on contiguous keys and values."""
    parts = []
    rows = zip(case.q.split(case.batch.query_lens_host), case.keys, case.values, strict=True)
    for q, k, v in rows:
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(*heads, attn_mask=visible, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def random_rows(seed, block_size):
    """Mix whole prompts, chunks that continue a prefix, and single tokens, some at block edges."""
    chooser = random.Random(seed)
    longest = min(6 * block_size, 300)
    rows = []
    for _ in range(chooser.randint(1, 9)):
        length = chooser.randint(1, longest)
        if chooser.random() < 0.3:
            length = max(1, length // block_size) * block_size
        query = chooser.choice([1, 1, length, chooser.randint(1, length)])
        rows.append((min(query, 40), length))
    return rows


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_mixed_batches(head_dim, block_size, seed):
    chooser = random.Random(f"{head_dim} {block_size} {seed}")
    num_kv_heads, group = chooser.choice([1, 2, 3]), chooser.randint(1, 8)
    rows = random_rows(chooser.random(), block_size)
    case = make_case(rows, num_kv_heads, group, head_dim, block_size, seed=seed)
    assert (case.run() - reference(case)).abs().max() < 1e-5


@pytest.mark.parametrize("group", range(1, 9))
def test_group_sizes(group):
    case = make_case([(5, 5), (1, 30), (4, 19), (1, 1)], 2, group, 64, 16, seed=group)
    assert (case.run() - reference(case)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(16, 16)],
        [(17, 17)],
        [(1, 16)],
        [(1, 17)],
        [(16, 32)],
        [(2, 17), (2, 18)],
        [(1, n) for n in range(1, 40)],
        [(1, 1), (1, 500), (1, 2), (1, 499), (1, 33)],
        [(n, n) for n in range(1, 20)],
        [(n, 40) for n in range(1, 41, 5)],
    ],
    ids=str,
)
def test_block_edges_and_lone_kinds_of_row(rows):
    case = make_case(rows, 2, 3, 16, 16)
    assert (case.run() - reference(case)).abs().max() < 1e-5


@pytest.mark.parametrize("limit", [1, 40, 200])
def test_single_tokens_split_over_several_calls(monkeypatch, limit):
    """The bound on gathered tokens cuts a call, not a row; one row above the bound still runs."""
    monkeypatch.setattr(torch_sdpa, "_MAX_GATHERED_TOKENS", limit)
    rows = [(1, length) for length in (30, 7, 90, 31, 8, 29, 1, 88)]
    case = make_case(rows, 2, 2, 16, 4)
    assert len(case.batch.metadata) >= 3
    assert (case.run() - reference(case)).abs().max() < 1e-5


def test_single_tokens_of_like_length_share_a_call():
    case = make_case([(1, 100 + n) for n in range(20)], 1, 2, 16, 16)
    assert len(case.batch.metadata) == 1


@pytest.mark.parametrize("seed", range(6))
def test_bfloat16_is_no_worse_than_twice_torchs_own_error(seed):
    chooser = random.Random(seed)
    block_size, head_dim = chooser.choice([3, 16, 256]), chooser.choice([64, 80, 128])
    rows = [*random_rows(seed, block_size), (1, 250), (30, 200), (20, 20)]
    case = make_case(rows, 2, 4, head_dim, block_size, torch.bfloat16, seed)
    exact = reference(case)
    out = case.run()
    assert out.dtype == torch.bfloat16
    ours, torchs = (out - exact).abs(), (contiguous_sdpa(case) - exact).abs()
    assert ours.max() <= 2 * torchs.max()
    assert ours.mean() <= 2 * torchs.mean()


def test_a_row_does_not_read_its_neighbours():
    """Changing one row's cached keys and values leaves every other row as it was."""
    rows = [(1, 20), (6, 22), (1, 21), (9, 9)]
    case = make_case(rows, 2, 2, 16, 4)
    before = case.run()
    blocks = case.batch.block_tables[0, :5].long()
    case.cache[:, blocks] += 3.0
    after = case.run()
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


def test_keys_and_values_land_in_their_slots_and_nowhere_else():
    case = make_case([(3, 10), (1, 5), (7, 7)], 2, 2, 16, 4)
    expected = case.cache.clone()
    for token, slot in enumerate(case.batch.slot_mapping.tolist()):
        expected[0, slot // 4, slot % 4] = case.k[token]
        expected[1, slot // 4, slot % 4] = case.v[token]
    case.run()
    assert torch.equal(case.cache, expected)


@pytest.mark.parametrize(("asked", "given"), [(None, 16), (1, 1), (48, 48)])
def test_the_backend_chooses_the_block_size_where_it_may(asked, given):
    spec = AttentionSpec(4, 2, 8, torch.float32, torch.device("cpu"), asked)
    backend = select_backend(spec)
    assert backend.block_size == given
    assert backend.kv_cache_shape(5) == (2, 5, given, 2, 8)
