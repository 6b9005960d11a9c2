"""Graphs in parts: what a step leaves out is called at its place. Without a GPU, torch's graphs are
stand-ins that log what they are told.
"""

from typing import Any, ClassVar

import pytest
import torch

from nanovllm.features.graphs import cuda_capture
from nanovllm.features.graphs.cuda_capture import CUDACapture

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Graph:
    """Logs the calls of torch.cuda.CUDAGraph, each with the number of the graph."""

    log: ClassVar[list[str]] = []
    made: ClassVar[int] = 0

    def __init__(self) -> None:
        Graph.made += 1
        self.number = Graph.made

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.log.append(f"begin {self.number}")

    def capture_end(self) -> None:
        self.log.append(f"end {self.number}")

    def replay(self) -> None:
        self.log.append(f"replay {self.number}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    class Stream:
        device = torch.device("cuda", 0)

        def wait_stream(self, other: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(Graph, "log", [])
    monkeypatch.setattr(Graph, "made", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda_capture, "_capture_stream", lambda device: Stream())
    monkeypatch.setattr(cuda_capture, "unowned", lambda x: x)
    return Graph.log


def test_a_replay_calls_what_was_left_out_between_the_parts(log: list[str]) -> None:
    capture = CUDACapture(torch.device("cuda"))
    x = torch.tensor([3])

    def step() -> torch.Tensor:
        log.append("step")
        for name in "ab":
            capture.leave_out(lambda x, name=name: log.append(f"{name} {x.item()}"), x)
        return x

    graph, output = capture(step)
    assert output is x
    ends = ["end 1", "begin 2", "end 2", "begin 3", "end 3"]
    assert log == ["step", "begin 1", "step", *ends]  # the first run captures nothing
    log.clear()
    graph.replay()
    assert log == ["replay 1", "a 3", "replay 2", "b 3", "replay 3"]


def test_an_error_ends_the_capture(log: list[str]) -> None:
    """Symptom: the stream, which all engines share, captures for ever, and no engine can start."""
    capture = CUDACapture(torch.device("cuda"))

    def step() -> None:
        capture.leave_out(lambda: None)
        if "begin 2" in log:
            raise MemoryError

    with pytest.raises(MemoryError):
        capture(step)
    assert log == ["begin 1", "end 1", "begin 2", "end 2"]
    log.clear()
    capture.leave_out(lambda: log.append("called"))  # outside of a capture
    assert not log


@NEEDS_CUDA
def test_cuda_replays_in_parts() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    capture = CUDACapture(device)
    x, factor = torch.zeros(1000, device=device), [1.0]

    def outside(y: torch.Tensor, out: torch.Tensor) -> None:
        out[:10] = y[:10] * factor[0]  # the host decides anew in each replay

    def step() -> torch.Tensor:
        y = x * 2
        out = torch.zeros_like(y)
        capture.leave_out(outside, y, out)
        return out + y

    graph, output = capture(step)
    assert output is not None
    for value in (1.0, 5.0):
        factor[0] = value
        x.fill_(value)
        graph.replay()
        assert output[:10].tolist() == [2 * value * value + 2 * value] * 10
        assert output[10:].tolist() == [2 * value] * 990
