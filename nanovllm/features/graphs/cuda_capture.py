"""Captures steps as CUDA graphs that share one memory.

A step may leave functions out of its graph. Then the graph is several CUDA graphs, and a replay
calls the functions between them.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

_CAPTURING = threading.Lock()
"""Held while the capture stream is in use: several threads may build engines."""


Step = Callable[[], torch.Tensor | None]
"""The work that a graph captures. Returns an output such as logits, or None on a rank without."""


class CUDACapture:
    """Captures graphs into one memory pool: a replay of any graph may overwrite another's output.

    All captures of a GPU use the same stream, because cuBLAS allocates a workspace for each stream
    and never frees it.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)
        self._graph: Graph | None = None  # that is being captured

    def __call__(self, step: Step) -> tuple["Graph", torch.Tensor | None]:
        """Run `step` once, then capture it; return its graph and its output.

        The first run does what a capture cannot: compile kernels, create communicators and
        workspaces.
        """
        before = torch.cuda.current_stream(self._stream.device)
        with _CAPTURING:
            self._stream.wait_stream(before)
            with torch.cuda.stream(self._stream):
                step()
            before.wait_stream(self._stream)
            torch.cuda.synchronize(self._stream.device)
            torch.cuda.empty_cache()  # the pool cannot use what is cached outside
            graph = self._graph = Graph(self._pool)
            with torch.cuda.stream(self._stream):
                try:
                    graph.begin()
                    output = step()
                finally:
                    graph.end()
                    self._graph = None
        return graph, None if output is None else unowned(output)

    def leave_out(self, function: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Called by a step: each replay of its graph calls `function(*tensors)` here.

        Neither capturing nor the first run calls it. `tensors` may lie in the graphs' memory.
        """
        if self._graph is not None:
            self._graph.end()
            self._graph.add(functools.partial(function, *map(unowned, tensors)))
            self._graph.begin()


class Graph:
    """Captured work: CUDA graphs, with calls of functions between them."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._calls: list[Callable[[], object]] = []
        self._part: torch.cuda.CUDAGraph | None = None  # that is being captured

    def begin(self) -> None:
        """Capture on the current stream. The mode is thread_local, because other threads (NCCL's
        watchdog) may use CUDA meanwhile.
        """
        self._part = torch.cuda.CUDAGraph()
        self._part.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """End the part, if one has begun: a stream must not go on capturing after an error."""
        part = self._part
        self._part = None
        if part is not None:
            part.capture_end()
            self.add(part.replay)

    def add(self, call: Callable[[], object]) -> None:
        self._calls.append(call)

    def replay(self) -> None:
        """Launch the work again, on the same memory."""
        for call in self._calls:
            call()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


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
