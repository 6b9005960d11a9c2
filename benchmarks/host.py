"""The host's share of a decode step on a GPU, without a GPU: graphs whose replays do nothing.

Scheduling, the launch, and turning tokens into outputs are real; no model runs. On a GPU this time
is hidden while it is shorter than the step. Calls of the CUDA runtime are not included.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch

from nanovllm import SamplingParams, demo_model, factory
from nanovllm.attention.batch import Batch
from nanovllm.attention.spec import AttentionSpec
from nanovllm.attention.torch_sdpa import TorchBackend
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.features.graphs import cuda_capture, piecewise_graphs, step_runners
from nanovllm.features.graphs.cuda_capture import Step
from nanovllm.options.config import Config
from nanovllm.worker import attention_groups


class _Backend(TorchBackend):
    """Attends to nothing."""

    supports_graph = True

    def plan(self, batch: Batch) -> list[Any]:
        return []

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: Batch,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch.zeros_like(q) if out is None else out.zero_()


class _Graph:
    def replay(self) -> None:
        """Compute nothing."""


class _Capture:
    """Runs a step once. Its graph does nothing."""

    def __call__(self, step: Step) -> tuple[_Graph, torch.Tensor | None]:
        return _Graph(), step()

    def leave_out(self, function: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Leave it out."""


def _make_capture(device: torch.device) -> _Capture:
    return _Capture()


def _select(spec: AttentionSpec, kernels: object) -> Any:
    backend: Any = _Backend
    return backend(spec)


def make_engine(batch: int, output_len: int) -> LLMEngine:
    """Return an engine that launches a step before it handles the last one's tokens.

    As on a GPU, its decode steps are graphs and its prompts are not.
    """
    config = Config(
        demo_model.MODEL,
        device="cpu",
        max_num_seqs=batch,
        max_model_len=64 + output_len,
        num_kvcache_blocks=batch * (4 + output_len // 16),
        kvcache_block_size=16,
        enable_prefix_caching=False,
    )
    with (
        mock.patch.object(attention_groups, "select_backend", _select),
        mock.patch.object(step_runners, "can_capture", return_value=True),
        mock.patch.object(cuda_capture, "make_capture", new=_make_capture),
        mock.patch.object(piecewise_graphs, "piece_sizes", return_value=[]),
    ):
        return factory.make_engine(config, queue_depth=1)


def step_seconds(engine: LLMEngine, batch: int, output_len: int) -> float:
    """Return the median seconds of a decode step of `batch` greedy requests."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    for index in range(batch):
        engine.add_request([1 + index % 100] * 8, params)
    times = []
    while not engine.is_finished():
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return median(times[len(times) // 4 :])  # the first ones hold the prompts


def main() -> None:
    """Print a line for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print("sequences  ms a step: least and median of the rounds")
    for batch in args.batch:
        engine = make_engine(batch, args.output_len)
        times = [step_seconds(engine, batch, args.output_len) for _ in range(args.rounds)]
        engine.shutdown()
        print(f"{batch:9}  {1e3 * min(times):.3f}  {1e3 * median(times):.3f}")


if __name__ == "__main__":
    main()
