"""Test batches over a paged cache with known keys and values, and reference implementations."""

import dataclasses
import random

import torch

from nanovllm.attention.batch import Batch, HostLengths
from nanovllm.attention.spec import AttentionSpec
from tests.closeness import token_names

OUT_OF_RANGE = (-1, 2**31 - 1)


@dataclasses.dataclass
class Case:
    """A batch with its paged cache, and the same keys and values as contiguous tensors."""

    spec: AttentionSpec
    batch: Batch
    cache: torch.Tensor
    """[2, num_blocks, block_size, num_kv_heads, head_dim], without the KV of the batch's tokens."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: list[torch.Tensor]
    """By row, [seq_len, num_kv_heads, head_dim]."""
    values: list[torch.Tensor]

    def token_names(self) -> list[str]:
        """Return a name for each token of the batch: its row and its position."""
        return token_names(*self.batch.lengths)

    def stored(self) -> torch.Tensor:
        """Return a copy of the cache with the batch's tokens stored."""
        cache = self.cache.clone()
        for part, new in zip(cache.flatten(1, 2), (self.k, self.v), strict=True):
            part[self.batch.slot_mapping] = new
        return cache


def make_case(
    rows,
    num_kv_heads,
    group,
    head_dim,
    block_size,
    dtype=torch.float32,
    seed=0,
    fill=1e4,
    device="cpu",
):
    """Make a case of `rows`, each a pair (query length, sequence length).

    Blocks are drawn in random order from a pool with a few more. Every slot without a prefix token
    holds `fill`, so a wrong read changes the result. Block table columns past a row's last block
    hold ids out of range.
    """
    generator = torch.Generator().manual_seed(seed)
    chooser = random.Random(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    widths = [-(-seq_len // block_size) for _, seq_len in rows]
    num_blocks = sum(widths) + 3
    cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), fill, dtype=dtype)
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
        where = torch.arange(seq_len)
        where = torch.tensor(blocks)[where // block_size] * block_size + where % block_size
        before = seq_len - query_len
        cache[0].flatten(0, 1)[where[:before]] = keys[row][:before]
        cache[1].flatten(0, 1)[where[:before]] = values[row][:before]
        positions += range(before, seq_len)
        slots += where[before:].tolist()
    query_lens, seq_lens = zip(*rows, strict=True)
    ends = torch.tensor([0, *query_lens]).cumsum(0)
    batch = Batch(
        input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        cu_seqlens_q=ends.int().to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        lengths=HostLengths(query_lens, seq_lens),
    )
    queries = normal(len(positions), num_kv_heads * group, head_dim)
    own_keys = torch.cat([key[s - q :] for key, (q, s) in zip(keys, rows, strict=True)])
    own_values = torch.cat([value[s - q :] for value, (q, s) in zip(values, rows, strict=True)])
    return Case(
        AttentionSpec(
            num_kv_heads * group, num_kv_heads, head_dim, dtype, torch.device(device), block_size
        ),
        batch,
        cache.to(device),
        q=queries.to(device),
        k=own_keys.to(device),
        v=own_values.to(device),
        keys=[key.to(device) for key in keys],
        values=[value.to(device) for value in values],
    )


def reference(case, sinks=None):
    """Return attention in float64, computed one token at a time from the contiguous tensors."""
    spec, token = case.spec, 0
    out = torch.empty(*case.q.shape[:2], spec.output_dim, dtype=torch.float64, device=case.q.device)
    group = spec.num_heads // spec.num_kv_heads
    rows = zip(case.keys, case.values, case.batch.lengths.query_lens, strict=True)
    for keys, values, query_len in rows:
        keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
        for seen in range(len(keys) - query_len + 1, len(keys) + 1):
            last = seen if case.batch.ends is None else int(case.batch.ends[token])
            seen_keys = slice(max(seen - (spec.window or seen), 0), last)
            scores = torch.einsum("khd,hd->hk", keys[seen_keys], case.q[token].double())
            scores *= spec.head_dim**-0.5 if spec.scale is None else spec.scale
            if spec.softcap:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            weights = torch.softmax(scores, 1)[:, : seen_keys.stop - seen_keys.start]
            out[token] = torch.einsum("hk,khd->hd", weights, values[seen_keys])
            token += 1
    return out


def contiguous_sdpa(case):
    """Return torch's attention over the contiguous tensors, in the case's dtype."""
    parts = []
    rows = zip(case.q.split(case.batch.lengths.query_lens), case.keys, case.values, strict=True)
    for q, k, v in rows:
        visible = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
        visible = visible.tril(len(k) - len(q))
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=visible, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def random_rows(seed, block_size):
    """Return whole prompts, chunks after a prefix and single tokens, some ending at block edges."""
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
