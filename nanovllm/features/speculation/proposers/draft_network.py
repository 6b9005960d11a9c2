"""Networks that draft: they catch up with their KV, then draft token by token, all rows together.

A draft model is one, and so is a draft head, which reads hidden states of its target.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch

from nanovllm.attention.batch import Batch
from nanovllm.core.messages import Row, Schedule
from nanovllm.features.speculation.proposers.draft_kv import FEW_TOKENS, DraftKV
from nanovllm.features.speculation.proposers.proposer import Proposer
from nanovllm.utils.distributed import broadcast_from_first
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.network import Network
from nanovllm.worker.step_sampler import StepSampler

if TYPE_CHECKING:
    from nanovllm.features.graphs.cpu_graph import CPUGraphRunner
    from nanovllm.features.graphs.cuda_graph import GraphRunner
    from nanovllm.features.graphs.step_runners import StepRunners

_MAX_GRAPH_TOKENS = 128
"""Tokens of the largest graph: only few rows have drafts."""


class DraftNetwork(Proposer):
    """A draft model of the target's vocabulary, loaded from `draft`.

    A draft is what the model itself would sample with the request's parameters, and with the
    target's random number of the position: where the two models agree, so do their draws. Of a
    model with much to say, more of these are accepted than of the most likely tokens.

    `_tables`, `_inputs` and `_kv` are there after `allocate`, which copies the target's tables.

    Args:
        max_num_batched_tokens: tokens that it computes at once, at most.
        make_steps: makes its faster steps; None: it has none.
    """

    is_head: ClassVar[bool] = False
    """Whether position i takes the token of position i + 1, and hidden states of the target, so
    that the KV of an accepted draft is not right. Its own positions are no limit then."""
    _tables: DeviceTables
    _inputs: DeviceTables
    """Those that the network reads."""
    _kv: DraftKV

    def __init__(
        self,
        target: Network,
        draft: NetworkSpec,
        max_num_batched_tokens: int,
        make_steps: "Callable[[Network, int], StepRunners] | None" = None,
    ) -> None:
        block_size = target.backend.block_size
        config = dataclasses.replace(draft.config, kvcache_block_size=block_size)
        max_model_len = target.max_model_len
        if not self.is_head:
            max_model_len = min(max_model_len, draft.model_config.max_position)
        spec = draft._replace(config=config, one_table=True)
        self._network = network = Network(spec, max_model_len, target.platform)
        assert network.backend.block_size == block_size
        self.block_bytes = network.block_bytes
        self._steps = make_steps and make_steps(network, max_num_batched_tokens)
        self._uses_graphs = self._steps is not None and self._steps.uses_graphs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._graphs: list[GraphRunner] = []
        """For a proposal's first call of `_draft`, and for the others; empty without graphs."""
        self._recorded: list[CPUGraphRunner | None] = [None, None]
        """The same for recordings."""
        self._hidden: torch.Tensor | None = None
        """The hidden states that are fed back to graphs and recordings, where there are any."""

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
        """Make the pools; capture small steps if the device has graphs, or else record them."""
        self._tables = tables = copy.copy(tables)
        tables.state_table = None  # the states are the target's
        width = tables.block_tables.shape[1]
        self._kv = DraftKV(len(tables.params), num_blocks, tables.block_size, width)
        self._make_pools(num_blocks)
        if self._steps is not None and self._uses_graphs:
            self._graphs = self._make_graphs(self._steps)
            self._steps.capture_drafts(self._graphs)
        elif self._steps is not None:
            self._recorded = self._record(self._steps)

    def admit(self, schedule: Schedule) -> None:
        """Note which blocks have new owners."""
        self._kv.admit(schedule)

    def propose(self, rows: list[Row]) -> list[int]:
        """Write drafts for `rows`, and return how many each row got: none where the network has no
        position for them. See `Proposer`.
        """
        kv = self._kv
        # As the network counts positions: those before sample_position have all of their input.
        rows = [r._replace(num_computed_tokens=r.num_computed_tokens - self.is_head) for r in rows]
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
            if not self.is_head:
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
        ahead = [r._replace(num_computed_tokens=r.num_computed_tokens + self.is_head) for r in rows]
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
        self._inputs = self._tables

    def _free_pools(self) -> None:
        self._network.free_pool()

    def _make_graphs(self, steps: "StepRunners") -> "list[GraphRunner]":
        """Return `_graphs`, not captured yet."""
        size = self._max_graph_tokens(FEW_TOKENS)
        return [steps.graphs(self._inputs, size, max_known_tokens=FEW_TOKENS)]

    def _record(self, steps: "StepRunners") -> "list[CPUGraphRunner | None]":
        """Return `_recorded`."""
        return [steps.recorded(self._network.model, self._inputs)] * 2

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
        recorded = self._recorded[hidden is not None]
        if recorded is None or not recorded.fits(rows):
            return self._compute(self._network.batch(self._inputs, rows, output_indices), hidden)
        if hidden is not None and self._hidden is not None:
            self._hidden[: len(hidden)].copy_(hidden)
        output = recorded.forward(rows)
        return output if len(output) == len(output_indices) else output[output_indices]

    def _compute(self, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Do what `_forward` does for a planned batch."""
        return self._network.run(batch)

    def _logits(self, hidden: torch.Tensor, output_indices: torch.Tensor) -> torch.Tensor | None:
        """Return the target's logits as this network guesses them; None except on rank 0."""
        return self._network.logits(hidden, output_indices)

    def _choose(self, sampling: StepSampler, logits: torch.Tensor) -> torch.Tensor:
        """Return a draft or NO_TOKEN for each row of `logits`. Called on rank 0 only."""
        return sampling.sample(logits)
