"""What a draft model and a draft head have in common: the KV that they catch up with, and drafting
token by token, all rows together.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from nanovllm.core.messages import Row, Schedule
from nanovllm.features.speculation.proposers.draft_kv import FEW_TOKENS, DraftKV
from nanovllm.features.speculation.proposers.proposer import Proposer
from nanovllm.utils.distributed import broadcast_from_first
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.network import Network
from nanovllm.worker.step_sampler import StepSampler

if TYPE_CHECKING:
    from nanovllm.features.graphs.cuda_graph import GraphRunner
    from nanovllm.features.graphs.step_runners import StepRunners

_MAX_GRAPH_TOKENS = 128
"""Tokens of the largest graph: only few rows have drafts."""


class DraftNetwork(Proposer):
    """A network that drafts.

    `_tables` and `_kv` are there after `allocate`, which copies the target's tables.

    Args:
        network: its blocks are as large as the target's.
        max_num_batched_tokens: tokens that it computes at once, at most.
        make_steps: makes its faster steps; None: it has none.
        lag: how many positions after its input's last a draft lies, less one.
        keeps_drafts: whether the KV of an accepted draft is right.
    """

    _tables: DeviceTables
    _kv: DraftKV

    def __init__(
        self,
        network: Network,
        max_num_batched_tokens: int,
        make_steps: "Callable[[Network, int], StepRunners] | None",
        *,
        lag: int,
        keeps_drafts: bool,
    ) -> None:
        self.block_bytes = network.block_bytes
        self._network = network
        self._steps = make_steps and make_steps(network, max_num_batched_tokens)
        self._uses_graphs = self._steps is not None and self._steps.uses_graphs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._lag = lag
        self._keeps_drafts = keeps_drafts
        self._graphs: list[GraphRunner] = []
        """For a proposal's first call of `_draft`, and for the others; empty without graphs."""

    @property
    def networks(self) -> list[Network]:
        return [self._network]

    def warm_up(self, tables: DeviceTables, num_blocks: int, rows: list[Row]) -> int:
        """See `Proposer`. The most samples at once are the target's."""
        self._tables = tables
        self._make_pools(num_blocks)
        self._forward(rows, tables.platform.upload([]), None)
        num_bytes = 0
        if self._steps is not None and self._uses_graphs:
            num_bytes = self._steps.measure_drafts(self._make_graphs(self._steps))
        self._free_pools()
        return num_bytes

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        """Make the pools, and capture small steps if the device has graphs."""
        self._tables = tables = copy.copy(tables)
        tables.state_table = None  # the states are the target's
        width = tables.block_tables.shape[1]
        self._kv = DraftKV(len(tables.params), num_blocks, tables.block_size, width)
        self._make_pools(num_blocks)
        if self._steps is not None and self._uses_graphs:
            self._graphs = self._make_graphs(self._steps)
            self._steps.capture_drafts(self._graphs)

    def admit(self, schedule: Schedule) -> None:
        """Note which blocks have new owners."""
        self._kv.admit(schedule)

    def propose(self, rows: list[Row]) -> list[int]:
        """Write drafts for `rows`, and return how many each row got: none where the network has no
        position for them. See `Proposer`.
        """
        kv = self._kv
        # As the network counts positions: those before sample_position have all of their input.
        rows = [r._replace(num_computed_tokens=r.num_computed_tokens - self._lag) for r in rows]
        counts = [self._num_drafts(row) for row in rows]
        pairs = sorted(zip(rows, counts, strict=True), key=lambda pair: -pair[1])
        drafting = {row: count for row, count in pairs if count}  # those with most drafts first
        if not drafting:
            return counts
        ends = {row: row.sample_position + count - 1 for row, count in drafting.items()}
        begun = [block for row, end in ends.items() for block in kv.begun_blocks(row, end)]
        if begun:
            self._network.pool.zero(begun)
        num_allowed = max(1, min(FEW_TOKENS, self._max_num_batched_tokens // len(drafting)))
        for chunk in kv.chunks(list(drafting), num_allowed, self._max_num_batched_tokens):
            self._forward(chunk, self._tables.platform.upload([]), None)
        hidden: torch.Tensor | None = None
        for index in range(max(counts)):
            step = []
            for row, count in drafting.items():
                if index < count:
                    end = row.sample_position + index
                    start = end - 1 if index else kv.start(row)
                    step.append(Row(row.seq_id, row.table_idx, start, end - start, samples=True))
            graphs = self._graphs[0 if index == 0 else -1] if self._graphs else None
            if graphs is not None and graphs.fits(step):
                hidden = self._replay(graphs, step, hidden)
            else:
                hidden = self._draft(step, hidden)
        for row, end in ends.items():
            kv.set_right(row.table_idx, row.sample_position)
            if self._keeps_drafts:
                kv.set_drafted(row.table_idx, end)
        return counts

    def _num_drafts(self, row: Row) -> int:
        """Return how many drafts `row` gets: none if it has no input for the network yet."""
        if row.sample_position < 1:
            return 0
        # Draft j takes the network's position sample_position + j - 1.
        room = self._network.max_model_len + 1 - row.sample_position
        return max(0, min(row.num_draft_tokens, room))

    def _draft(self, rows: list[Row], hidden: torch.Tensor | None) -> torch.Tensor:
        """Compute `rows`, write one draft behind each and return the new hidden states.

        Args:
            hidden: those of the last call, whose first rows these are; None in the first call.
        """
        sampling = self._sampling(rows)
        output_indices = sampling.output_indices
        hidden = None if hidden is None else hidden[: len(rows)]
        hidden = self._forward(rows, output_indices, hidden)
        self._sample(sampling, self._logits(hidden, output_indices))
        return hidden

    def _replay(
        self, graphs: "GraphRunner", rows: list[Row], hidden: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Do the same as `_draft`, with one of `graphs`."""
        logits = graphs.run(rows).logits
        if any(self._tables.rules[row.table_idx] is not None for row in rows):
            sampling = self._sampling(rows)
            self._sample(sampling, None if logits is None else logits[sampling.output_indices])
        return hidden

    def _sampling(self, rows: list[Row]) -> StepSampler:
        ahead = [r._replace(num_computed_tokens=r.num_computed_tokens + self._lag) for r in rows]
        return StepSampler(self._tables, ahead)

    def _sample(self, sampling: StepSampler, logits: torch.Tensor | None) -> None:
        """Write one draft behind each row."""
        if logits is None:
            tokens = torch.empty_like(sampling.output_indices)
        else:
            tokens = self._choose(sampling, logits)
        sampling.store(broadcast_from_first(tokens))

    def _make_pools(self, num_blocks: int) -> None:
        """Make what has a part for each of `num_blocks` KV blocks."""
        self._network.make_pool(num_blocks + self._uses_graphs)

    def _free_pools(self) -> None:
        self._network.free_pool()

    def _make_graphs(self, steps: "StepRunners") -> "list[GraphRunner]":
        """Return `_graphs`, not captured yet."""
        raise NotImplementedError

    def _max_graph_tokens(self, num_tokens: int) -> int:
        """Return the size of the largest graph for rows of up to `num_tokens` tokens."""
        most = min(len(self._tables.params) * num_tokens, _MAX_GRAPH_TOKENS)
        return min(most, self._max_num_batched_tokens)

    def _forward(
        self, rows: list[Row], output_indices: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Write the KV of `rows`; return hidden states for `_logits`.

        Args:
            output_indices: as for `Network.forward`.
            hidden: as for `_draft`; also None to catch up.
        """
        raise NotImplementedError

    def _logits(self, hidden: torch.Tensor, output_indices: torch.Tensor) -> torch.Tensor | None:
        """Return the target's logits as this network guesses them; None except on rank 0."""
        return self._network.logits(hidden, output_indices)

    def _choose(self, sampling: StepSampler, logits: torch.Tensor) -> torch.Tensor:
        """Return a draft or NO_TOKEN for each row of `logits`. Called on rank 0 only."""
        raise NotImplementedError


def load_draft(target: Network, draft: NetworkSpec, max_model_len: int) -> Network:
    """Return the network of `draft` beside `target`: on its device, with blocks of its size."""
    block_size = target.backend.block_size
    config = dataclasses.replace(draft.config, kvcache_block_size=block_size)
    network = Network(draft._replace(config=config, one_table=True), max_model_len, target.platform)
    assert network.backend.block_size == block_size
    return network
