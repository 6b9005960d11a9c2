"""CUDA graphs imitated on the CPU, with their hazards. A capture records the torch operations of a
step. A replay runs them again on the same memory, and does not run the host's code again.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionSpec
from nanovllm.attention.torch_sdpa import TorchBackend, _Singles
from nanovllm.attention.triton import TritonBackend
from nanovllm.features.graphs import cuda_capture, piecewise_graphs
from nanovllm.features.graphs.cuda_capture import Step
from nanovllm.kernels.torch_kernels import TORCH, Kernels
from nanovllm.kernels.triton import decode_step, sampling as triton_sampling
from nanovllm.platform.cpu import CPU
from nanovllm.worker import attention_groups

HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh", "aten::equal"}
"""Operations that wait for the device, or copy from host memory that a replay no longer has."""


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


class RecordedGraph(TorchDispatchMode):
    """Records a step's operations with their argument and result tensors."""

    def __init__(self, capture: "FakeCapture") -> None:
        super().__init__()
        self.capture: FakeCapture = weakref.proxy(capture)  # which holds this graph
        self.calls: list[tuple[Any, Any, Any, list[tuple[int, torch.Tensor]]]] = []
        self.num_replays = 0

    def __enter__(self) -> "RecordedGraph":
        self._launch = GridExecutor.__call__
        GridExecutor.__call__ = lambda *args, **kwargs: self._record_launch(args, kwargs)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        GridExecutor.__call__ = self._launch
        super().__exit__(*error)

    def _record_launch(self, args: Any, kwargs: Any) -> None:
        """Record an interpreted Triton kernel as one operation without result tensors."""
        with _disable_current_modes():
            self._launch(*args, **kwargs)
        self.calls.append((self._launch, args, kwargs, []))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func._schema.name not in HOST, f"{func} cannot be captured"
        taken = {
            x.untyped_storage().data_ptr()
            for x in tensors((args, kwargs))
            if x.layout == torch.strided  # a weight in oneDNN's layout has no storage
        }
        result = func(*args, **kwargs)
        made = [
            (place, x)
            for place, x in enumerate(tree_leaves(result))
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in taken
        ]
        self.calls.append((func, args, kwargs, made))
        return result

    def replay(self) -> None:
        self.num_replays += 1
        for graph in self.capture.graphs:  # sharing memory: a replay may overwrite all tensors
            graph.spoil()
        for func, args, kwargs, made in self.calls:
            leaves = tree_leaves(func(*args, **kwargs))  # empty for a Triton kernel
            for place, x in made:
                x.copy_(leaves[place])

    def spoil(self) -> None:
        for *_, made in self.calls:
            for _, x in made:
                x.fill_(float("nan") if x.is_floating_point() else True)


class FakeCapture:
    """Does what CUDACapture does, and keeps its graphs for the tests."""

    made: ClassVar[list["FakeCapture"]] = []

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self._open: RecordedGraph | None = None
        self.made.append(self)

    def __call__(self, step: Step) -> tuple[RecordedGraph, torch.Tensor | None]:
        step()
        graph = self._open = RecordedGraph(self)
        with graph:
            logits = step()
        self._open = None
        self.graphs.append(graph)
        return graph, logits

    def leave_out(self, function: Callable[..., object], *tensors: torch.Tensor) -> None:
        if self._open is not None:
            self._open.calls.append((function, tensors, {}, []))


class StaticBackend(TorchBackend):
    """The torch backend with a plan for rows of one token that uses no values of the host."""

    supports_graph = True

    def plan(self, batch: Batch) -> Any:
        if batch.lengths is not None:
            return super().plan(batch)
        device = batch.input_ids.device
        num_rows, width = batch.block_tables.shape
        columns = torch.arange(width, device=device) * self.block_size
        tables = batch.block_tables.long()
        blocks = torch.where(columns < batch.seq_lens[:, None], tables, tables[:, :1])
        keys = torch.arange(width * self.block_size, device=device)
        mask = (keys < batch.seq_lens[:, None])[:, None, None]
        return [_Singles(torch.arange(num_rows, device=device), blocks, mask)]


class StepKernels(Kernels):
    """Triton's kernels that begin and end a step; the layers are in plain torch."""

    greedy = staticmethod(triton_sampling.greedy)
    sample = staticmethod(triton_sampling.sample)
    gather = staticmethod(decode_step.gather)
    advance = staticmethod(decode_step.advance)
    accept = staticmethod(decode_step.accept)


def select_static(spec: AttentionSpec, candidates: object) -> StaticBackend:
    return StaticBackend(spec)


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run the Triton kernels of a step, but for those of the layers."""
    monkeypatch.setattr(
        attention_groups, "select_backend", lambda spec, kernels: TritonBackend(spec)
    )
    monkeypatch.setattr(CPU, "kernels", lambda *_, **__: StepKernels())


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeCapture]:
    """Let model runners capture on the CPU; return the list that collects their captures."""
    monkeypatch.setattr(FakeCapture, "made", [])
    monkeypatch.setattr(CPU, "captures_graphs", True)
    monkeypatch.setattr(cuda_capture, "CUDACapture", lambda device: FakeCapture())
    monkeypatch.setattr(attention_groups, "select_backend", select_static)
    monkeypatch.setattr(CPU, "kernels", lambda *_, **__: TORCH)
    few = [16, 64]  # capturing more takes time
    monkeypatch.setattr(piecewise_graphs, "piece_sizes", lambda most: [n for n in few if n <= most])
    return FakeCapture.made
