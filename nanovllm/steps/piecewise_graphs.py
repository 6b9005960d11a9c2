"""The forward pass of steps with prompts, as CUDA graphs for all that is not attention.

Attention depends on the rows of a step, so its kernels are launched one by one between the pieces.
This module owns the static tensors that the pieces read. Knows no sequence and no sampling.
"""

import functools
import itertools
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence as Seq

import torch

from nanovllm.attention.batch import Batch
from nanovllm.steps.cuda_capture import Capture, Graph
from nanovllm.utils.distributed import broadcast_from_first
from nanovllm.utils.progress import progress_bar

logger = logging.getLogger(__name__)

Forward = Callable[[Batch], torch.Tensor]
"""Returns hidden states [T, hidden_size]."""

MAX_TOKENS = 1280
"""Larger steps keep a GPU busy for longer than their launches take."""


def piece_sizes(max_tokens: int) -> list[int]:
    """Return the tokens of the graphs: 16 to 256, each twice the last, then every 64 to 512 and
    every 128 to 1280; none larger than `max_tokens`, which is the last if it is less than 1280.

    Up to about 256 tokens a matrix product takes the time of reading the weight, so that padding
    costs little.
    """
    sizes = {16, 32, 64, 128, *range(256, 512, 64), *range(512, MAX_TOKENS + 1, 128)}
    sizes.add(min(max_tokens, MAX_TOKENS))
    return sorted(size for size in sizes if size <= max_tokens)


class PiecewiseGraphs:
    """Runs a model's forward pass by replaying graphs, with attention between them.

    A graph computes a fixed number of tokens. Those behind the tokens of the step are padding: they
    are computed, except for attention, and write to `padding_slot`, of which nothing is read.

    Args:
        capture: the graphs' own.
        padding_slot: a slot of the KV cache that no sequence gets.
    """

    def __init__(
        self, model: Forward, capture: Capture, padding_slot: int, device: torch.device
    ) -> None:
        self.sizes: list[int] = []
        self._model = model
        self._capture = capture
        self._padding_slot = padding_slot
        self._graphs: dict[int, tuple[Graph, torch.Tensor | None]] = {}
        self._input_ids = torch.zeros(MAX_TOKENS, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._input_ids)
        self._slot_mapping = torch.full_like(self._input_ids, padding_slot)
        self._step = _Step()

    def capture(self, sizes: Seq[int], *, progress: bool = False) -> None:
        """Capture a graph of each size, the largest first: the others then reuse its memory."""
        order = sorted(sizes, reverse=True)
        for size in progress_bar(order, desc="Capturing graphs for prompts", shown=progress):
            self._graphs[size] = self._capture(functools.partial(self._forward, size))
        self.sizes = sorted(self._graphs)

    def keep_faster(
        self, make_batch: Callable[[int], Batch], seconds: Callable[[Callable[[], object]], float]
    ) -> None:
        """Drop the graphs from the first size on that is no faster than kernel by kernel.

        Each is timed with the fewest tokens that it gets, which leave it the most padding. The
        first rank decides, because all ranks must run a step in the same way.

        Args:
            make_batch: returns a planned batch of so many tokens that writes to the padding's slot.
            seconds: returns how long a call takes. All ranks make the same calls.
        """
        timed = []
        for smaller, size in itertools.pairwise([1, *self.sizes]):
            batch = make_batch(min(smaller + 1, size))
            pieces = seconds(functools.partial(self.run, batch))
            timed.append((size, pieces, seconds(functools.partial(self._model, batch))))
        faster = itertools.takewhile(lambda item: item[1] < item[2], timed)
        count = torch.tensor([len(list(faster))], device=self._input_ids.device)
        self.sizes = self.sizes[: int(broadcast_from_first(count).item())]
        self._graphs = {size: self._graphs[size] for size in self.sizes}
        shown = ", ".join(f"{s}: {1e3 * a:.2f} or {1e3 * b:.2f}" for s, a, b in timed)
        logger.info("graphs for prompts of %s tokens; ms with or without: %s", self.sizes, shown)

    def fits(self, num_tokens: int) -> bool:
        """Return whether a graph can run a step of so many tokens."""
        return bool(self.sizes) and num_tokens <= self.sizes[-1]

    def run(self, batch: Batch) -> torch.Tensor:
        """Write the KV of the T tokens of a planned batch; return their hidden states [T,
        hidden_size], which the next replay of any graph of `capture` overwrites.
        """
        num_tokens = len(batch.input_ids)
        size = self.sizes[bisect_left(self.sizes, num_tokens)]
        self._input_ids[:num_tokens].copy_(batch.input_ids)
        self._positions[:num_tokens].copy_(batch.positions)
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
                attend=self._leave_out,
            )
        )

    def _leave_out(
        self, attend: Callable[..., torch.Tensor], q: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(q)
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


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return how long `run` and what it launched on `device` took, the least of a few times."""
    found = []
    for _ in range(4):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)
