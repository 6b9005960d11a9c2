"""Part `attention`: decode and prefill attention of each backend."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import QWEN3_06B
from benchmarks.gpu.bandwidth import gpu_seconds
from benchmarks.gpu.part import Part, Record, percent, table

if TYPE_CHECKING:
    from nanovllm.attention.batch import Batch
    from nanovllm.attention.triton import PagedBackend


class Case(NamedTuple):
    """`rows` rows, each of `tokens` new tokens at the end of `length`."""

    rows: int
    tokens: int
    length: int
    shared: int = 0
    """How many tokens at the beginning are the same prompt, in the same blocks."""


CASES = (
    Case(256, 1, 600),
    Case(256, 1, 600, 512),
    Case(128, 1, 1060),
    Case(37, 1, 1490),
    Case(1, 1, 600),
    Case(1, 1, 4096),
    Case(8, 512, 512),
    Case(1, 4096, 4096),
    Case(4, 256, 4352),
    Case(1, 64, 32832),
)


def attention(record: Record) -> None:
    """Time each case with each backend."""
    import torch

    from nanovllm.attention.flash_attn import FlashAttnBackend
    from nanovllm.attention.spec import AttentionSpec
    from nanovllm.attention.triton import TritonBackend

    spec = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cuda"), None)
    kinds: list[Any] = [TritonBackend, FlashAttnBackend]
    for kind in kinds:
        label = {"backend": kind.name}
        reason = kind.unsupported(spec)
        if reason is not None:
            record.add("rows", {**label, "error": reason})
            continue
        for case in CASES:
            work = functools.partial(time_attention, kind(spec), case)
            record.attempt("rows", {**label, **case._asdict()}, work)


def time_attention(backend: "PagedBackend", case: Case) -> dict[str, Any]:
    """Return the seconds of one layer, the bytes of keys and values that it reads at least, and its
    floating-point operations.

    Times a CUDA graph of all layers of a model. Each layer has a cache of its own, as in a model,
    so that no layer finds its keys and values in the L2 cache. Decoding includes the plan, which
    the host computes for prefill.
    """
    import torch

    spec = backend.spec
    layers = QWEN3_06B["num_hidden_layers"]
    assert isinstance(layers, int)
    with torch.inference_mode():
        batch, num_blocks = make_batch(backend, case)
        shape = (layers, *backend.kv_cache_shape(num_blocks))
        caches = torch.empty(shape, dtype=spec.dtype, device=spec.device).normal_()
        tokens = case.rows * case.tokens
        q = torch.randn(tokens, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
        planned = dataclasses.replace(batch, metadata=backend.plan(batch))

        def step() -> None:
            rows = planned
            if case.tokens == 1:
                rows = dataclasses.replace(batch, metadata=backend.plan(batch))
            for cache in caches:
                backend.attend(q, cache, rows)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        seconds = gpu_seconds(graph.replay) / layers
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    seen = sum(range(case.length - case.tokens + 1, case.length + 1))  # keys, over the new tokens
    return {
        "seconds": seconds,
        "bytes": (case.rows * (case.length - case.shared) + case.shared) * token_bytes,
        "flop": 4 * case.rows * seen * spec.num_heads * spec.head_dim,
    }


def make_batch(backend: "PagedBackend", case: Case) -> tuple["Batch", int]:
    """Return a batch, and its number of blocks.

    The blocks of a row are in random order, as in a pool that has been in use for a while. A block
    with the end of a shared prompt is a row's own. Rows of one token have no lengths on the host,
    as in a CUDA graph.
    """
    import torch

    from nanovllm.attention.batch import Batch, HostLengths

    device, block_size = backend.spec.device, backend.block_size
    per_row = -(-case.length // block_size)
    width = max(per_row, 4096 // block_size)
    tables = torch.zeros(case.rows, width, dtype=torch.int32, device=device)
    blocks = torch.randperm(case.rows * per_row, device=device)
    tables[:, :per_row] = blocks.view(case.rows, per_row)
    tables[:, : case.shared // block_size] = tables[0, : case.shared // block_size]
    positions = torch.arange(case.length - case.tokens, case.length, device=device)
    positions = positions.repeat(case.rows)
    starts = torch.arange(case.rows + 1, dtype=torch.int32, device=device) * case.tokens
    known = case.rows if case.tokens > 1 else 0
    rows = Batch(
        input_ids=positions,
        positions=positions,
        slot_mapping=positions,
        cu_seqlens_q=starts,
        seq_lens=torch.full((case.rows,), case.length, dtype=torch.int32, device=device),
        block_tables=tables,
        lengths=HostLengths((case.tokens,) * known, (case.length,) * known) if known else None,
    )
    return rows, case.rows * per_row


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of times and rates."""
    copy = bandwidth.get("copy")
    rows = []
    for row in figures.get("rows", []):
        cells = [row["backend"]]
        if "rows" in row:
            shared = f", {row['shared']} shared" if row["shared"] else ""
            cells.append(f"{row['rows']} x {row['tokens']} of {row['length']}{shared}")
        if "error" in row:
            rows.append([*cells, *[""] * (2 - len(cells)), row["error"], "", "", ""])
            continue
        rate = row["bytes"] / row["seconds"]
        us = f"{1e6 * row['seconds']:.1f}"
        flops = f"{row['flop'] / row['seconds'] / 1e12:.0f}"
        rows.append([*cells, us, f"{rate / 1e12:.2f}", percent(copy and rate / copy), flops])
    head = ["backend", "rows x new tokens of all", "us a layer", "TB/s", "of the copy's", "TFLOP/s"]
    return table(head, rows)


PART = Part(attention, 30, "Attention, a layer of Qwen3-0.6B", lines)
