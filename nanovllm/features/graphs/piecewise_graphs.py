"""The forward pass of steps with prompts, as CUDA graphs for everything except attention.

Attention depends on the rows of a step, so its kernels are launched one by one between the pieces.
This module owns the static tensors that the pieces read.
"""

import functools
import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence as Seq
from typing import ClassVar

import torch

from nanovllm.attention.batch import Batch
from nanovllm.core.messages import Row
from nanovllm.features.graphs.cuda_capture import CUDACapture, Graph
from nanovllm.utils.distributed import broadcast_from_first
from nanovllm.utils.progress import progress_bar
from nanovllm.worker.hooks import StepRunner, StepTensors

logger = logging.getLogger(__name__)

Forward = Callable[[Batch], torch.Tensor]  # returns hidden states [T, hidden_size]

MAX_TOKENS = 4096  # larger steps keep a GPU busy for longer than their launches take


def piece_sizes(max_tokens: int) -> list[int]:
    """Return the tokens of the graphs: 16 to 256, each twice the last, then every 64 to 512, every
    128 to 1280, every 256 to 2048 and every 512 to 4096; none larger than `max_tokens`, which is
    the last if it is less than 4096.

    Up to about 256 tokens a matrix product takes the time of reading the weight, so that padding
    costs little.
    """
    sizes = {16, 32, 64, 128, *range(256, 512, 64), *range(512, 1281, 128)}
    sizes |= {*range(1536, 2048, 256), *range(2048, MAX_TOKENS + 1, 512)}
    sizes.add(min(max_tokens, MAX_TOKENS))
    return sorted(size for size in sizes if size <= max_tokens)


class PiecewiseGraphs(StepRunner):
    """Runs a model's forward pass by replaying graphs, with attention between them.

    A graph computes a fixed number of tokens. Those after the tokens of the step are padding: they
    are computed, except for attention, and write to `padding_slot`, of which nothing is read.

    Args:
        make_batch: returns the planned batch of some rows.
        capture: the graphs' own.
        padding_slot: a slot of the KV cache that no sequence gets.
    """

    follows_drafts: ClassVar[bool] = True

    def __init__(
        self,
        model: Forward,
        make_batch: Callable[[list[Row]], Batch],
        capture: CUDACapture,
        padding_slot: int,
        device: torch.device,
    ) -> None:
        self.sizes: list[int] = []
        self._model = model
        self._make_batch = make_batch
        self._capture = capture
        self._padding_slot = padding_slot
        self._graphs: dict[int, tuple[Graph, torch.Tensor | None]] = {}
        self._input_ids = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._input_ids)
        self._rope_positions = torch.zeros_like(self._input_ids)
        self._slot_mapping = torch.full_like(self._input_ids, padding_slot)
        self._step = _Step()

    def capture(self, sizes: Seq[int], *, progress: bool = False) -> None:
        """Capture a graph of each size, the largest first: the others then reuse its memory."""
        order = sorted(sizes, reverse=True)
        for size in progress_bar(order, desc="Capturing graphs for prompts", shown=progress):
            self._graphs[size] = self._capture(functools.partial(self._forward, size))
        self.sizes = sorted(self._graphs)

    def keep_faster(
        self,
        make_rows: Callable[[int], list[Row]],
        measure: Callable[[Callable[[int], object], list[int]], tuple[tuple[int, float], ...]],
    ) -> None:
        """Drop the graphs from the first size on that is not faster than kernel by kernel.

        Each is timed with the fewest tokens that it gets, which leave it the most padding. The
        first rank decides, because all ranks must run a step in the same way.

        Args:
            make_rows: returns rows of so many tokens, which write to the padding's slot.
            measure: returns (size, seconds of a call with it) for the sizes that it gets; see
                `measure_seconds`.
        """
        fewest = [min(less + 1, size) for less, size in itertools.pairwise([1, *self.sizes])]
        batches = {size: self._make_batch(make_rows(size)) for size in fewest}
        pieces = measure(lambda size: self._replay(batches[size]), fewest)
        whole = measure(lambda size: self._model(batches[size]), fewest)
        timed = [
            (size, ours, theirs)
            for size, (_, ours), (_, theirs) in zip(self.sizes, pieces, whole, strict=True)
        ]
        faster = itertools.takewhile(lambda item: item[1] < item[2], timed)
        count = torch.tensor([len(list(faster))], device=self._input_ids.device)
        self.sizes = self.sizes[: int(broadcast_from_first(count).item())]
        self._graphs = {size: self._graphs[size] for size in self.sizes}
        shown = ", ".join(f"{s}: {1e3 * a:.2f} or {1e3 * b:.2f}" for s, a, b in timed)
        logger.info("graphs for prompts of %s tokens; ms with or without: %s", self.sizes, shown)

    def fits(self, rows: Seq[Row]) -> bool:
        """Return whether a graph is large enough for `rows`."""
        num_tokens = sum(row.num_scheduled_tokens for row in rows)
        return bool(self.sizes) and num_tokens <= self.sizes[-1]

    def run(self, rows: list[Row]) -> StepTensors:
        """Write the KV of the tokens of `rows`; return their hidden states."""
        return StepTensors(self._replay(self._make_batch(rows)))

    def _replay(self, batch: Batch) -> torch.Tensor:
        """Do the same for a planned batch of T tokens; return [T, hidden_size]."""
        num_tokens = len(batch.input_ids)
        size = self.sizes[bisect_left(self.sizes, num_tokens)]
        self._input_ids[:num_tokens].copy_(batch.input_ids)
        self._positions[:num_tokens].copy_(batch.positions)
        self._rope_positions[:num_tokens].copy_(batch.angle_rows)
        self._slot_mapping[:num_tokens].copy_(batch.slot_mapping)
        self._slot_mapping[num_tokens:size].fill_(self._padding_slot)
        graph, hidden = self._graphs[size]
        assert hidden is not None
        self._step.batch = batch
        graph.replay()
        del self._step.batch  # its plan may hold much memory
        return hidden[:num_tokens]

    def _forward(self, size: int) -> torch.Tensor:
        """Compute what a graph of `size` tokens captures."""
        rows = self._input_ids.new_empty(0, dtype=torch.int32)  # only attention reads the rows
        return self._model(
            Batch(
                input_ids=self._input_ids[:size],
                positions=self._positions[:size],
                slot_mapping=self._slot_mapping[:size],
                cu_seqlens_q=rows,
                seq_lens=rows,
                block_tables=rows,
                rope_positions=self._rope_positions[:size],
                attend=self._leave_out,
            )
        )

    def _leave_out(
        self,
        attend: Callable[..., torch.Tensor],
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        self._capture.leave_out(functools.partial(self._step.attend, attend), q, kv_cache, out)
        return out


class _Step:
    """The step that is running. The graphs hold it, and must not hold what holds them."""

    batch: Batch

    def attend(
        self,
        attend: Callable[..., torch.Tensor],
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of the step's tokens to the first rows of `out`."""
        num_tokens = len(self.batch.input_ids)
        attend(q[:num_tokens], kv_cache, self.batch, out[:num_tokens])
