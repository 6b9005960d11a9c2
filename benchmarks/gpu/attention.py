"""Part `attention`: decode attention by each backend, then the Triton kernel with other options."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bench import QWEN3_06B
from benchmarks.gpu.bandwidth import gpu_seconds
from benchmarks.gpu.part import Part, Record, describe
from benchmarks.gpu.tables import percent, table

if TYPE_CHECKING:
    from nanovllm.attention.batch import Batch
    from nanovllm.attention.paged import PagedBackend

SHAPES = ((256, 600), (128, 1060), (37, 1490), (1, 4096))
"""Rows of a batch, and tokens of each row."""
SWEEP: tuple[dict[str, int], ...] = (
    {"SPLIT_TOKENS": 128},
    {"SPLIT_TOKENS": 512},
    {"_PROGRAMS": 1024},
    {"_PROGRAMS": 4096},
    {"N": 32},
    {"N": 128},
    {"num_warps": 2},
    {"num_warps": 8},
    {"num_stages": 2},
    {"num_stages": 4},
)
"""Options of the Triton decode kernel to try, each in place of its present value. An option is a
constant of kernels/triton/decode_attention.py or a launch argument of the kernel.
"""


def attention(record: Record) -> None:
    """Measure each backend, then the Triton backend with each option of SWEEP."""
    import torch

    from nanovllm.attention.backend import AttentionSpec
    from nanovllm.attention.flash_attn import FlashAttnBackend
    from nanovllm.attention.triton import TritonBackend
    from nanovllm.attention.varlen import VarlenBackend

    spec = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cuda"), None)
    kinds: list[Any] = [TritonBackend, FlashAttnBackend, VarlenBackend]
    for kind in kinds:
        label = {"backend": kind.name, "options": ""}
        reason = kind.unsupported(spec)
        if reason is None:
            measure(record, kind(spec), label)
        else:
            record.add("rows", {**label, "error": reason})
    for options in SWEEP:
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        label = {"backend": TritonBackend.name, "options": text}
        set_decode_options(options)
        measure(record, kinds[0](spec), label)


def set_decode_options(options: dict[str, int]) -> None:
    """Reload the Triton kernels with other constants or launch arguments."""
    import triton.language as tl

    from nanovllm.kernels.triton import decode_attention

    # A compiled kernel rejects a changed constant, so the module is loaded again.
    names = vars(importlib.reload(decode_attention))
    launched: Callable[..., dict[str, int]] = names["_decode_options"]
    chosen: dict[str, int] = {}
    for name, value in options.items():
        if name in names:
            names[name] = value
            twin = f"_{name}"  # the kernels' copy of a constant
            if isinstance(names.get(twin), tl.constexpr):
                names[twin] = tl.constexpr(value)
        else:
            chosen[name] = value
    names["_decode_options"] = lambda *args: {**launched(*args), **chosen}


def measure(record: Record, backend: "PagedBackend", label: dict[str, str]) -> None:
    """Add a row for each of SHAPES: its time, or its error."""
    import torch

    for batch, length in SHAPES:
        try:
            seconds, num_bytes = time_attention(backend, batch, length)
        except Exception as error:
            record.add("rows", {**label, "error": f"{batch} x {length}: {describe(error)}"})
            if isinstance(error, torch.AcceleratorError):
                raise  # the CUDA context is lost: this process can run nothing more
            continue
        row = {"batch": batch, "length": length, "seconds": seconds, "bytes": num_bytes}
        record.add("rows", {**label, **row})


def time_attention(backend: "PagedBackend", batch: int, length: int) -> tuple[float, int]:
    """Return one layer's seconds, and the bytes of keys and values that it reads.

    Times a CUDA graph of all layers of a model. Each layer has a cache of its own, as in a model,
    so that no layer finds its keys and values in the L2 cache.
    """
    import torch

    spec = backend.spec
    layers = QWEN3_06B["num_hidden_layers"]
    assert isinstance(layers, int)
    with torch.inference_mode():
        rows, num_blocks = decode_batch(backend, batch, length)
        shape = backend.kv_cache_shape(num_blocks)
        caches = torch.empty(layers, *shape, dtype=spec.dtype, device=spec.device).normal_()
        q = torch.randn(batch, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)

        def step() -> None:
            planned = dataclasses.replace(rows, metadata=backend.plan(rows))
            for cache in caches:
                backend.attend(q, cache, planned)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        seconds = gpu_seconds(graph.replay) / layers
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    return seconds, batch * length * token_bytes


def decode_batch(backend: "PagedBackend", batch: int, length: int) -> tuple["Batch", int]:
    """Return `batch` rows of one token each at position `length` - 1, and their number of blocks.

    The blocks of a row are in random order, as in a pool that has been in use for a while.
    """
    import torch

    from nanovllm.attention.batch import Batch

    device = backend.spec.device
    per_row = -(-length // backend.block_size)
    tables = torch.zeros(batch, 4096 // backend.block_size, dtype=torch.int32, device=device)
    tables[:, :per_row] = torch.randperm(batch * per_row, device=device).view(batch, per_row)
    positions = torch.full((batch,), length - 1, device=device)
    rows = Batch(
        input_ids=positions,
        positions=positions,
        slot_mapping=positions,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device),
        seq_lens=torch.full((batch,), length, dtype=torch.int32, device=device),
        block_tables=tables,
        query_lens_host=(),
        seq_lens_host=(),
    )
    return rows, batch * per_row


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of times and read rates."""
    copy = bandwidth.get("copy")
    rows = []
    for row in figures["rows"]:
        cells = [row["backend"], row["options"]]
        if "error" in row:
            rows.append([*cells, row["error"], "", "", ""])
            continue
        rate = row["bytes"] / row["seconds"]
        shape = f"{row['batch']} x {row['length']}"
        us = f"{1e6 * row['seconds']:.1f}"
        rows.append([*cells, shape, us, f"{rate / 1e12:.2f}", percent(copy and rate / copy)])
    head = ["backend", "options", "rows x tokens", "us a layer", "TB/s", "of the copy's"]
    return table(head, rows)


PART = Part(attention, 80, "Decode attention, a layer of Qwen3-0.6B", lines)
