"""Part `attention`: each backend, then the Triton kernels with other options."""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import QWEN3_06B
from benchmarks.gpu.bandwidth import gpu_seconds
from benchmarks.gpu.part import Part, Record
from benchmarks.gpu.tables import percent, table

if TYPE_CHECKING:
    from nanovllm.attention.batch import Batch
    from nanovllm.attention.triton import PagedBackend


class Case(NamedTuple):
    """`rows` rows, each of `tokens` new tokens at the end of `length`."""

    rows: int
    tokens: int
    length: int


DECODE = (
    Case(256, 1, 600),
    Case(128, 1, 1060),
    Case(37, 1, 1490),
    Case(1, 1, 600),
    Case(1, 1, 4096),
)
PREFILL = (Case(8, 512, 512), Case(1, 4096, 4096), Case(4, 256, 4352), Case(1, 64, 32832))
CASES: dict[str, Sequence[Case]] = {"decode": DECODE, "prefill": PREFILL}
"""By kind of attention."""
SWEPT = (
    ("decode", "SPLIT_TOKENS"),
    ("prefill", "N"),
    ("decode", "N"),
    ("prefill", "M"),
    ("prefill", "num_stages"),
    ("decode", "num_stages"),
    ("prefill", "num_warps"),
    ("decode", "num_warps"),
    ("prefill", "SPLIT_TOKENS"),
    ("decode", "_PROGRAMS_PER_SM"),
    ("prefill", "SPLIT_PROGRAMS"),
)
"""Options of the Triton kernels, the most promising first: constants of the module
kernels/triton/<kind>_attention.py, or launch options of its kernel. Those that it does not have are
passed over.
"""
_SECONDS = 5
"""For the cases of one value of an option; most of it is compiling."""


def attention(record: Record) -> None:
    """Measure each backend, then the Triton backend with each choice of options."""
    import torch

    from nanovllm.attention.flash_attn import FlashAttnBackend
    from nanovllm.attention.spec import AttentionSpec
    from nanovllm.attention.triton import TritonBackend

    spec = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cuda"), None)
    kinds: list[Any] = [TritonBackend, FlashAttnBackend]
    for kind in kinds:
        label = {"backend": kind.name, "options": ""}
        reason = kind.unsupported(spec)
        if reason is None:
            for cases in CASES.values():
                measure(record, kind(spec), label, cases)
        else:
            record.add("rows", {**label, "error": reason})
    for name, option in SWEPT:
        for value in values_to_try(name, option):
            label = {"backend": TritonBackend.name, "options": f"{name}: {option}={value}"}
            if record.has_time(_SECONDS, label["options"]):
                set_options(name, {option: value})
                measure(record, kinds[0](spec), label, CASES[name])
        set_options(name, {})


def values_to_try(kind: str, option: str) -> list[int]:
    """Return half and twice the present value of an option, for tiles of keys four times too; for
    stages, one less and one more. None if the kernel has no such option.
    """
    module = importlib.import_module(f"nanovllm.kernels.triton.{kind}_attention")
    now = {**vars(module), **launch_options(module, kind)}.get(option)
    if not isinstance(now, int):
        return []
    if option == "num_stages":
        return [now - 1, now + 1]
    values = [now // 2, 2 * now, 4 * now]
    return values if option == "N" else values[:2]


def launch_options(module: ModuleType, kind: str) -> dict[str, int]:
    """Return the launch options at Qwen3-0.6B's shape."""
    import torch

    function: Callable[..., dict[str, int]] = vars(module)[f"_{kind}_options"]
    known = {"dtype": torch.bfloat16, "head_dim": 128, "output_dim": 128, "group": 2}
    return function(*(known[name] for name in inspect.signature(function).parameters))


def set_options(kind: str, options: Mapping[str, int]) -> None:
    """Load the kernels of "decode" or "prefill" again with other constants or launch options.

    A launch refuses options that the kernel does not have.
    """
    import triton.language as tl

    module = importlib.import_module(f"nanovllm.kernels.triton.{kind}_attention")
    # A compiled kernel rejects a changed constant, so the module is loaded again.
    names = vars(importlib.reload(module))
    chosen: dict[str, int] = {}
    for name, value in options.items():
        if name in names:
            names[name] = value
            twin = f"_{name}"  # the kernels' copy of a constant
            if isinstance(names.get(twin), tl.constexpr):
                names[twin] = tl.constexpr(value)
        else:
            chosen[name] = value
    function: Callable[..., dict[str, int]] = names[f"_{kind}_options"]

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> dict[str, int]:
        own = function(*args, **kwargs)
        if unknown := chosen.keys() - own.keys():
            raise ValueError(f"{kind} attention has no option {', '.join(sorted(unknown))}")
        return {**own, **chosen}

    names[f"_{kind}_options"] = replaced


def measure(
    record: Record, backend: "PagedBackend", label: Mapping[str, str], cases: Sequence[Case]
) -> None:
    """Add a row for each case: its time, or its error."""
    for case in cases:
        here = {**label, **case._asdict()}
        record.attempt("rows", here, functools.partial(time_attention, backend, case))


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
        "bytes": case.rows * case.length * token_bytes,
        "flop": 4 * case.rows * seen * spec.num_heads * spec.head_dim,
    }


def make_batch(backend: "PagedBackend", case: Case) -> tuple["Batch", int]:
    """Return a batch, and its number of blocks.

    The blocks of a row are in random order, as in a pool that has been in use for a while. Rows of
    one token have no lengths on the host, as in a CUDA graph.
    """
    import torch

    from nanovllm.attention.batch import Batch, HostLengths

    device, block_size = backend.spec.device, backend.block_size
    per_row = -(-case.length // block_size)
    width = max(per_row, 4096 // block_size)
    tables = torch.zeros(case.rows, width, dtype=torch.int32, device=device)
    blocks = torch.randperm(case.rows * per_row, device=device)
    tables[:, :per_row] = blocks.view(case.rows, per_row)
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
        cells = [row["backend"], row["options"]]
        if "rows" in row:
            cells.append(f"{row['rows']} x {row['tokens']} of {row['length']}")
        if "error" in row:
            rows.append([*cells, *[""] * (3 - len(cells)), row["error"], "", "", ""])
            continue
        rate = row["bytes"] / row["seconds"]
        us = f"{1e6 * row['seconds']:.1f}"
        flops = f"{row['flop'] / row['seconds'] / 1e12:.0f}"
        rows.append([*cells, us, f"{rate / 1e12:.2f}", percent(copy and rate / copy), flops])
    head = ["backend", "options", "rows x new tokens of all", "us a layer", "TB/s", "of the copy's"]
    return table([*head, "TFLOP/s"], rows)


PART = Part(attention, 125, "Attention, a layer of Qwen3-0.6B", lines)
