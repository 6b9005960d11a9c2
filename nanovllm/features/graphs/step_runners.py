"""Chooses among the ways to run a step: which of them a network has, and in which order they are
asked. A new way is one file here and a line in `StepRunners.make`.
"""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.attention.batch import Batch
from nanovllm.core.messages import MAX_SAMPLES, Row
from nanovllm.platform import Platform
from nanovllm.utils.distributed import tensor_parallel
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.hooks import StepRunner
from nanovllm.worker.kv_cache import graph_bytes
from nanovllm.worker.network import Network

if TYPE_CHECKING:
    from nanovllm.features.graphs.cpu_graph import CPUGraphRunner, Forward
    from nanovllm.features.graphs.cuda_graph import ComputeLogits, GraphRunner
    from nanovllm.features.graphs.piecewise_graphs import PiecewiseGraphs

logger = logging.getLogger(__name__)


class StepRunners:
    """Makes the step runners of `network`.

    Attributes:
        uses_graphs: whether CUDA graphs are among them. Then the KV pool has one more block, for
            the tokens that pad a step, and the device can count the drafts that a step confirms.
    """

    def __init__(self, network: Network, max_num_batched_tokens: int) -> None:
        config = network.config
        backends = network.attention.backends
        # The graphs of whole steps lay out one block table, for one plan, and no states.
        graphs = len(backends) == 1 and network.backend.supports_graph
        graphs &= not network.attention.states.num_pages
        records = all(backend.supports_recording for backend in backends)
        self.uses_graphs = graphs and not config.enforce_eager and network.platform.captures_graphs
        self._records = records and not config.enforce_eager
        self._network = network
        self._max_num_batched_tokens = max_num_batched_tokens
        num_tokens = config.max_num_seqs
        spec = config.speculation
        if spec is not None:  # steps verify drafts
            verified = num_tokens * (1 + spec.max_draft_tokens)
            num_tokens = max(num_tokens, min(verified, MAX_SAMPLES))
        self._max_graph_tokens = min(num_tokens, max_num_batched_tokens)

    def measure(self, tables: DeviceTables, *, accepts: bool) -> int:
        """Return the bytes that CUDA graphs will take. Called with a small pool that does not stay.

        Args:
            accepts: whether the steps count confirmed drafts, see `Kernels.accept`.
        """
        if not self.uses_graphs:
            return 0
        from nanovllm.features.graphs.cuda_graph import graph_sizes
        from nanovllm.features.graphs.piecewise_graphs import piece_sizes

        graphs = self.graphs(tables, self._max_graph_tokens, accepts=accepts)
        num_bytes = measured_bytes(graphs, graph_sizes(graphs.max_tokens), tables.platform)
        pieces = self._pieces(tables)
        sizes = piece_sizes(self._max_num_batched_tokens)
        return num_bytes + measured_bytes(pieces, sizes, tables.platform)

    def make(self, tables: DeviceTables, *, accepts: bool) -> list[StepRunner]:
        """Return the step runners: CUDA graphs of whole steps and of all but attention, or a
        recording. The first one that fits a step runs it. Called once.
        """
        if not self.uses_graphs:
            recorded = self.recorded(self._forward, tables)
            return [] if recorded is None else [recorded]
        from nanovllm.features.graphs.cuda_graph import graph_sizes
        from nanovllm.features.graphs.piecewise_graphs import piece_sizes

        progress = tensor_parallel().rank == 0
        graphs = self.graphs(tables, self._max_graph_tokens, accepts=accepts)
        graphs.capture(graph_sizes(graphs.max_tokens), progress=progress)
        pieces = self._pieces(tables)
        pieces.capture(piece_sizes(self._max_num_batched_tokens), progress=progress)
        if tables.platform.runs_ahead:
            from nanovllm.worker.timing import measure_seconds

            prompts = partial(_prompts, tables.scratch_idx, self._network.max_model_len)
            pieces.keep_faster(prompts, partial(measure_seconds, platform=tables.platform))
        return [graphs, pieces]

    def graphs(
        self,
        tables: DeviceTables,
        max_tokens: int,
        compute_logits: "ComputeLogits | None" = None,
        **options: Any,
    ) -> "GraphRunner":
        """Return a runner for steps of up to `max_tokens` tokens, with no graph captured yet.

        Args:
            compute_logits: None: the model does, or fused kernels where those are faster.
            options: of `GraphRunner`.
        """
        from nanovllm.features.graphs.cuda_capture import CUDACapture
        from nanovllm.features.graphs.cuda_graph import GraphRunner
        from nanovllm.features.graphs.fused_step import faster_logits

        network = self._network
        if compute_logits is None:
            compute_logits = faster_logits(
                lambda batch: network.model.compute_logits(network.run(batch)),  # type: ignore[operator]
                network.model,
                network.backend,
                num_blocks=network.num_blocks,
                max_model_len=network.max_model_len,
                max_tokens=max_tokens,
            )
        capture = CUDACapture(network.device)
        return GraphRunner(compute_logits, network.backend, tables, max_tokens, capture, **options)

    def measure_drafts(self, runners: "list[GraphRunner]") -> int:
        """Return the bytes of the graphs of a draft network, which are captured for it."""
        from nanovllm.features.graphs.cuda_graph import draft_graph_sizes

        return sum(
            measured_bytes(each, draft_graph_sizes(each.max_tokens), self._network.platform)
            for each in runners
        )

    def capture_drafts(self, runners: "list[GraphRunner]") -> None:
        """Capture the graphs of a draft network."""
        from nanovllm.features.graphs.cuda_graph import draft_graph_sizes

        for runner in runners:
            runner.capture(draft_graph_sizes(runner.max_tokens))

    def recorded(self, forward: "Forward", tables: DeviceTables) -> "CPUGraphRunner | None":
        """Return `forward` recorded over the pool and `tables`; None if that is not possible."""
        if self._records:
            from nanovllm.features.graphs.cpu_graph import CPUGraphRunner, Unrecordable

            try:
                return CPUGraphRunner(forward, tables)
            except Unrecordable as reason:
                logger.info("steps run call by call: %s", reason)
        return None

    def _forward(self, batch: Batch) -> torch.Tensor:
        return self._network.run(self._network.attention.planned(batch))

    def _pieces(self, tables: DeviceTables) -> "PiecewiseGraphs":
        """Return a runner for the forward pass of any rows, with no graph captured yet.

        Padding writes to the last block of the pool.
        """
        from nanovllm.features.graphs.cuda_capture import CUDACapture
        from nanovllm.features.graphs.piecewise_graphs import PiecewiseGraphs

        network = self._network
        padding_slot = (network.num_blocks - 1) * network.backend.block_size
        make_batch = partial(network.batch, tables, output_indices=None)
        capture = CUDACapture(network.device)
        return PiecewiseGraphs(network.run, make_batch, capture, padding_slot, network.device)


def _prompts(table_idx: int, max_model_len: int, num_tokens: int) -> list[Row]:
    """Return rows of `num_tokens` tokens in all, none longer than `max_model_len`."""
    whole, rest = divmod(num_tokens, max_model_len)
    lengths = [max_model_len] * whole + [rest] * (rest > 0)
    return [Row(-1, table_idx, 0, length, False) for length in lengths]


def measured_bytes(
    runner: "GraphRunner | PiecewiseGraphs", sizes: list[int], platform: Platform
) -> int:
    """Return the bytes of the graphs of `sizes`, which are captured for it."""
    return graph_bytes(sizes, lambda size: runner.capture([size]), platform)
