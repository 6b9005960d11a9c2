"""Decode steps as CUDA graphs, one for each batch size.

A graph reads the last tokens from the device tables and writes the next ones there. This module
owns the static tensors that the graphs read and the memory that they share. It knows no sequence
and no scheduling: `ModelRunner` runs the steps that fit no graph.
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
"""Held while the stream for captures is in use: engines may be made in several threads."""


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Do it again, on the same memory."""
        ...


Step = Callable[[], torch.Tensor | None]
"""What a graph holds. It returns logits, or None on a rank that has none."""
Capture = Callable[[Step], tuple[Graph, torch.Tensor | None]]
"""Turns a step into a graph, and where its replays leave the logits until another graph's replay.
It may run the step."""


def graph_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes that get a graph: 1, 2, 4, every 8 to 512, every 64, and max_rows."""
    sizes = {1, 2, 4, *range(8, 513, 8), *range(512, max_rows, 64), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


class GraphRunner:
    """Runs decode steps, each row one token, by replaying graphs.

    The static state is what a step reads: table indices, positions, and how far each position moves
    (1; 0 for padding rows, which use the scratch row). A step updates the state for the next step,
    so a batch of unchanged rows needs no upload.
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
        # [3, size], laid out anew for each size, so that it is contiguous and filled by one copy.
        self._state = torch.zeros(3 * max_rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._cu_seqlens_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        # What the state holds, as far as the host knows.
        self._table_indices: list[int] = []
        self._positions: list[int] = []

    def capture(self, sizes: Seq[int], *, progress: bool = False) -> None:
        """Make a graph for each of `sizes`, the largest first: the others then fit its memory."""
        order = sorted(sizes, reverse=True)
        for size in tqdm(order, desc="Capturing CUDA graphs", disable=not progress):
            self._upload([], [], size)
            self._graphs[size] = self._capture(functools.partial(self._step, size))
        self.sizes = sorted(self._graphs)

    def fits(self, rows: Seq[Row]) -> bool:
        """Whether a graph can run `rows`: few enough, each one token, and each samples."""
        return len(rows) <= self.sizes[-1] and all(
            row.num_scheduled_tokens == 1 and row.samples and not row.draft_token_ids
            for row in rows
        )

    def run(self, rows: Seq[Row]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute `rows` and store a token for each, drawn without logits rules.

        Returns tokens [R] int64 and logits [R, vocab_size] (None on a rank without); the next run
        overwrites both.
        """
        size = self.sizes[bisect_left(self.sizes, len(rows))]
        table_indices = [row.table_idx for row in rows]
        positions = [row.num_computed_tokens for row in rows]
        if table_indices != self._table_indices or positions != self._positions:
            self._upload(table_indices, positions, size)
        self._table_indices = []  # until the replay is launched nothing is known
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
        else:  # all are candidates: no host is there to look beyond them
            tokens = draw(logits, sampling, num_candidates=logits.shape[-1])
        broadcast_from_first(tokens)
        tables.advance(table_indices, positions, moves, tokens, self._tokens[:size])
        return logits


class CUDACapture:
    """Captures into one memory pool, on the stream that all captures of a GPU share: a stream in
    which cuBLAS was used keeps its workspace for ever.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def __call__(self, step: Step) -> tuple[Graph, torch.Tensor | None]:
        """Run `step` once, then capture it.

        The first run is for what cannot be captured: compiling kernels, making communicators and
        workspaces. Other threads (NCCL's watchdog) may use CUDA meanwhile, hence thread_local.
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
    """Whether `device` has graphs."""
    return device.type == "cuda"


def make_capture(device: torch.device) -> Capture:
    """Return what captures on `device`, into a memory pool of its own."""
    return CUDACapture(device)


def unowned(x: torch.Tensor) -> torch.Tensor:
    """Return a view of the CUDA tensor `x` that does not keep its memory.

    The memory of a graph's outputs stays with the graph's pool. While a tensor owns it no other
    graph of the pool may use it, and logits of every size would be kept apart.
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
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface
