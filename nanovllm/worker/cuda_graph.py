"""Decode steps as CUDA graphs, one graph for each batch size.

A graph reads the last tokens from the device tables and writes the next ones there. This module
owns the static tensors that the graphs read and the memory that they share. It knows no sequence
and no scheduling. `ModelRunner` runs the steps that fit no graph.
"""

import dataclasses
import functools
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence as Seq
from typing import Any, Protocol

import torch
from torch import nn
from tqdm.auto import tqdm

from nanovllm.attention.backend import Backend
from nanovllm.layers.sampler import draw
from nanovllm.scheduler.messages import Row
from nanovllm.utils.distributed import broadcast_from_first
from nanovllm.worker.device_tables import DeviceTables

_CAPTURING = threading.Lock()
"""Held while the capture stream is in use: several threads may build engines."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch the work again, on the same memory."""
        ...


Step = Callable[[], torch.Tensor | None]
"""The work that a graph captures. Returns logits, or None on a rank without logits."""
Capture = Callable[[Step], tuple[Graph, torch.Tensor | None]]
"""Captures a step; returns the graph and its logits. Graphs share memory: a replay of any graph may
overwrite the logits. The capture may also run the step."""


def graph_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes that get a graph: 1, 2, 4, every 8 to 512, every 64, and max_rows."""
    sizes = {1, 2, 4, *range(8, 513, 8), *range(512, max_rows, 64), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


class GraphRunner:
    """Runs decode steps, in which each row has one token, by replaying graphs.

    A graph reads its static state: for each row the table index, the position, and the move, by
    which the step advances the position (1; 0 for padding rows, which use the scratch table row).
    The step itself advances the state, so a following step with the same rows needs no upload.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        tables: DeviceTables,
        max_rows: int,
        capture: Capture,
    ) -> None:
        self.sizes: list[int] = []
        self._model = model
        self._backend = backend
        self._tables = tables
        self._capture = capture
        self._graphs: dict[int, tuple[Graph, torch.Tensor | None]] = {}
        device = tables.device
        # A graph of `size` rows reads the first 3 * size numbers as [3, size]: table indices,
        # positions, moves. So one copy fills them.
        self._state = torch.zeros(3 * max_rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._cu_seqlens_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        # The host's copy of what the state holds; empty if unknown.
        self._table_indices: list[int] = []
        self._positions: list[int] = []

    def capture(self, sizes: Seq[int], *, progress: bool = False) -> None:
        """Capture a graph of each size, the largest first: the others then reuse its memory."""
        order = sorted(sizes, reverse=True)
        for size in tqdm(order, desc="Capturing CUDA graphs", disable=not progress):
            self._upload([], [], size)
            self._graphs[size] = self._capture(functools.partial(self._step, size))
        self.sizes = sorted(self._graphs)

    def fits(self, rows: Seq[Row]) -> bool:
        """Return whether a graph can run `rows`: each row has one token and samples."""
        return len(rows) <= self.sizes[-1] and all(
            row.num_scheduled_tokens == 1 and row.samples for row in rows
        )

    def run(self, rows: Seq[Row]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute `rows`, and draw and store a token for each row, without its logits rules.

        Returns tokens [R] int64 and logits [R, vocab_size] (None on a rank without logits). The
        next run overwrites both.
        """
        size = self.sizes[bisect_left(self.sizes, len(rows))]
        table_indices = [row.table_idx for row in rows]
        positions = [row.num_computed_tokens for row in rows]
        if table_indices != self._table_indices or positions != self._positions:
            self._upload(table_indices, positions, size)
        self._table_indices = []  # unknown, in case the replay fails
        graph, logits = self._graphs[size]
        graph.replay()
        self._table_indices, self._positions = (
            table_indices,
            [position + 1 for position in positions],
        )
        return self._tokens[: len(rows)], None if logits is None else logits[: len(rows)]

    def _upload(self, table_indices: list[int], positions: list[int], size: int) -> None:
        padding = size - len(table_indices)
        state = [*table_indices, *[self._tables.scratch_idx] * padding, *positions, *[0] * padding]
        state += [1] * len(table_indices) + [0] * padding
        pinned = self._state.is_cuda
        host = torch.tensor(state, dtype=torch.int64, pin_memory=pinned)
        self._state[: 3 * size].copy_(host, non_blocking=True)

    def _step(self, size: int) -> torch.Tensor | None:
        table_indices, positions, moves = self._state[: 3 * size].view(3, size).unbind()
        tables, model = self._tables, self._model
        batch, sampling = tables.decode_inputs(
            table_indices, positions, self._cu_seqlens_q[: size + 1]
        )
        batch = dataclasses.replace(batch, metadata=self._backend.plan(batch))
        logits: torch.Tensor | None = model.compute_logits(model(batch))  # type: ignore[operator]
        if logits is None:
            tokens = torch.empty_like(table_indices)
        else:  # all tokens are candidates: a graph cannot return to the host to look for more
            tokens = draw(logits, sampling, num_candidates=logits.shape[-1])
        broadcast_from_first(tokens)
        tables.advance(table_indices, positions, moves, tokens, self._tokens[:size])
        return logits


class CUDACapture:
    """Captures graphs into one memory pool.

    All captures of a GPU use the same stream, because cuBLAS allocates a workspace for each stream
    and never frees it.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def __call__(self, step: Step) -> tuple[Graph, torch.Tensor | None]:
        """Run `step` once, then capture it.

        The first run does what a capture cannot: compile kernels, create communicators and
        workspaces. The capture mode is thread_local, because other threads (NCCL's watchdog) may
        use CUDA during the capture.
        """
        before = torch.cuda.current_stream(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING:
            self._stream.wait_stream(before)
            with torch.cuda.stream(self._stream):
                step()
            before.wait_stream(self._stream)
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                logits = step()
        return graph, None if logits is None else unowned(logits)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def can_capture(device: torch.device) -> bool:
    """Return whether `device` supports CUDA graphs."""
    return device.type == "cuda"


def make_capture(device: torch.device) -> Capture:
    """Return a `Capture` for `device` with its own memory pool."""
    return CUDACapture(device)


def unowned(x: torch.Tensor) -> torch.Tensor:
    """Return a view of the CUDA tensor `x` that does not own its memory.

    The memory of a graph's output belongs to the graph's pool, which outlives the view. If a tensor
    owned the memory, no other graph of the pool could use it, and each size would keep its own
    logits.
    """
    integers = {1: "|i1", 2: "<i2", 4: "<i4"}
    return torch.as_tensor(
        _Memory(
            {
                "data": (x.data_ptr(), False),
                "shape": tuple(x.shape),
                "strides": tuple(stride * x.itemsize for stride in x.stride()),
                "typestr": integers[x.itemsize],
                "version": 3,
            }
        ),
        device=x.device,
    ).view(x.dtype)


class _Memory:
    """Device memory described by the CUDA array interface (version 3)."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface
