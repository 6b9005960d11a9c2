"""Captures steps as CUDA graphs that share one memory.

A step may leave functions out of its graph. Then the graph is several CUDA graphs, and a replay
calls the functions between them.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

_CAPTURING = threading.Lock()
"""Held while the capture stream is in use: several threads may build engines."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch the work again, on the same memory."""
        ...


Step = Callable[[], torch.Tensor | None]
"""The work that a graph captures. Returns an output such as logits, or None on a rank without."""


class Capture(Protocol):
    """Captures graphs that share memory: a replay of any graph may overwrite another's output."""

    def __call__(self, step: Step) -> tuple[Graph, torch.Tensor | None]:
        """Return `step` as a graph, with its output. May also run the step."""
        ...

    def leave_out(self, function: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Called by a step: each replay of its graph calls `function(*tensors)` here.

        Capturing does not call it. `tensors` may lie in the graphs' memory.
        """
        ...


class CUDACapture:
    """Captures graphs into one memory pool.

    All captures of a GPU use the same stream, because cuBLAS allocates a workspace for each stream
    and never frees it.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)
        self._parts: _Parts | None = None

    def __call__(self, step: Step) -> tuple[Graph, torch.Tensor | None]:
        """Run `step` once, then capture it.

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
            parts = self._parts = _Parts(self._pool)
            with torch.cuda.stream(self._stream):
                try:
                    parts.begin()
                    output = step()
                finally:
                    parts.end()
                    self._parts = None
        return parts, None if output is None else unowned(output)

    def leave_out(self, function: Callable[..., object], *tensors: torch.Tensor) -> None:
        """See `Capture`. The first run of a step leaves it out as well."""
        if self._parts is not None:
            self._parts.end()
            self._parts.add(functools.partial(function, *map(unowned, tensors)))
            self._parts.begin()


class _Parts:
    """A graph in parts, with calls of functions between them."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._calls: list[Callable[[], object]] = []
        self._graph: torch.cuda.CUDAGraph | None = None  # the part that is being captured

    def begin(self) -> None:
        """Capture on the current stream. The mode is thread_local, because other threads (NCCL's
        watchdog) may use CUDA meanwhile.
        """
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """End the part, if one has begun: a stream must not go on capturing after an error."""
        graph = self._graph
        self._graph = None
        if graph is not None:
            graph.capture_end()
            self.add(graph.replay)

    def add(self, call: Callable[[], object]) -> None:
        self._calls.append(call)

    def replay(self) -> None:
        for call in self._calls:
            call()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


make_capture: Callable[[torch.device], Capture] = CUDACapture
"""Returns a `Capture` for a device with its own memory pool."""


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
