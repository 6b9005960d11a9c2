"""Draft heads, which read hidden states of their target.

The target stores them in a pool by slot, so they are there for prefix hits too. Behind the last
ones, a head reads its own output in their place.
"""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.core.messages import Row, Schedule
from nanovllm.features.speculation.proposers.draft_kv import FEW_TOKENS, loaded_pages
from nanovllm.features.speculation.proposers.draft_network import DraftNetwork
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.network import Network
from nanovllm.worker.step_sampler import StepSampler

if TYPE_CHECKING:
    from nanovllm.features.graphs.cpu_graph import CPUGraphRunner
    from nanovllm.features.graphs.cuda_graph import ComputeLogits, GraphRunner
    from nanovllm.features.graphs.step_runners import StepRunners


class Head(nn.Module):
    """The network of a draft head. Its position i takes the token of position i + 1.

    Its methods are called in their order here, after its weights are loaded.
    """

    features_size: int
    """Numbers of a token's hidden states of the target."""

    def share(self, target: DecoderForCausalLM) -> torch.Tensor | None:
        """Use what the head lacks of `target`, which stays the target's own.

        Returns:
            The target's token, int64, of each draft id; None if they are the same.
        """
        raise NotImplementedError

    def capture(self, target: DecoderForCausalLM, features: torch.Tensor) -> None:
        """Let the target store hidden states in `features`, [slots, features_size], from its next
        forward pass on.
        """
        raise NotImplementedError

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [T, hidden_size] contiguous of `features` [T, features_size]."""
        raise NotImplementedError

    def forward(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """Write the batch's KV; return the hidden states [O, hidden_size] that are fed back.

        Args:
            hidden: [T, hidden_size] contiguous, from `combine` or fed back. The kernels overwrite
                it.
        """
        raise NotImplementedError

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return logits [N, V] of what `forward` returned; None except on rank 0."""
        raise NotImplementedError


class DraftHead(DraftNetwork):
    """A draft head, loaded from `draft`.

    Its position i takes the token of position i + 1, so the KV in a block's last slot depends on
    the token behind the block. Sequences that share a prefix share the KV of the first of them,
    and the others read one key that is not quite theirs: drafts only have to be likely.

    The KV of drafts is computed again when they are accepted, because by then there are the
    target's hidden states. A draft is the most likely token: of what a head guesses from few
    layers, more of these are accepted than of its draws.
    """

    is_head = True

    def __init__(
        self,
        target: Network,
        draft: NetworkSpec,
        max_num_batched_tokens: int,
        make_steps: "Callable[[Network, int], StepRunners] | None" = None,
    ) -> None:
        super().__init__(target, draft, max_num_batched_tokens, make_steps)
        head = self._network.model
        config = draft.model_config
        assert isinstance(head, Head)
        assert isinstance(target.model, DecoderForCausalLM)
        self._target = target.model
        self._head = head
        self._hidden_size = config.hidden_size
        self._vocab_size = config.vocab_size
        self._dtype = config.dtype
        self.block_bytes += target.backend.block_size * head.features_size * config.dtype.itemsize
        self._features: torch.Tensor | None = None
        self._token_ids = head.share(target.model)

    def admit(self, schedule: Schedule) -> None:
        """Note which blocks have new owners. For a loaded block there are no hidden states of the
        target: zeros say less that is wrong than those of the block's last owner.
        """
        super().admit(schedule)
        assert self._features is not None
        blocks = self._features.view(-1, self._inputs.block_size, self._head.features_size)
        for page in loaded_pages(schedule):
            blocks[page].zero_()

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        """Make the pools, and let the target store hidden states."""
        super().allocate(tables, num_blocks)
        assert self._features is not None
        self._head.capture(self._target, self._features)

    def _record(self, steps: "StepRunners") -> "list[CPUGraphRunner | None]":
        from nanovllm.features.graphs.cpu_graph import MAX_TOKENS

        fed_back = self._inputs.platform.zeros((MAX_TOKENS, self._hidden_size), self._dtype)
        self._hidden = fed_back
        ways = self._first_hidden, functools.partial(self._head, hidden=fed_back)
        return [steps.recorded(way, self._inputs) for way in ways]

    def _first_hidden(self, batch: Batch) -> torch.Tensor:
        """Return the head's hidden states of tokens for which there are the target's."""
        assert self._features is not None
        features = self._network.kernels.take_rows(self._features, batch.slot_mapping)
        return self._head(batch, self._head.combine(features))  # type: ignore[no-any-return]

    def _make_pools(self, num_blocks: int) -> None:
        """The feature pool has one more block, for the rows that pad a batch."""
        super()._make_pools(num_blocks)
        tables = self._tables
        shape = ((num_blocks + 1) * tables.block_size, self._head.features_size)
        self._features = tables.platform.zeros(shape, self._dtype)
        self._inputs = copy.copy(tables)  # each position holds the token of the next one
        self._inputs.token_ids = tables.token_ids[:, 1:]

    def _free_pools(self) -> None:
        super()._free_pools()
        self._features = None

    def _make_graphs(self, steps: "StepRunners") -> "list[GraphRunner]":
        """The first graphs read the target's hidden states, the others the head's own."""
        size = self._max_graph_tokens(FEW_TOKENS)
        shape = (size, self._hidden_size)
        hidden = self._hidden = torch.zeros(shape, dtype=self._dtype, device=self._inputs.device)
        return [
            steps.graphs(
                self._inputs,
                self._max_graph_tokens(count),
                self._graph_step(hidden, features),
                max_known_tokens=count,
                choose=lambda logits, sampling: sampling.kernels.greedy(logits),
            )
            for features, count in ((self._features, FEW_TOKENS), (None, 1))
        ]

    def _graph_step(self, hidden: torch.Tensor, features: torch.Tensor | None) -> "ComputeLogits":
        """Return what a graph computes: the head reads `features`, or else `hidden`, and writes its
        own output to `hidden`.
        """
        head = self._head
        token_ids = self._token_ids
        vocab_size = self._vocab_size

        def compute(batch: Batch) -> torch.Tensor | None:
            fed_back = hidden[: len(batch.input_ids)]
            read = fed_back if features is None else head.combine(features[batch.slot_mapping])
            output = head(batch, read)
            logits = head.compute_logits(output)
            fed_back.copy_(output)
            return _spread(logits, token_ids, vocab_size)

        return compute

    def _replay(
        self, graphs: "GraphRunner", rows: list[Row], hidden: torch.Tensor | None
    ) -> torch.Tensor | None:
        assert self._hidden is not None
        if hidden is not None and hidden is not self._hidden:  # the first call fitted no graph
            self._hidden[: len(rows)].copy_(hidden[: len(rows)])
        super()._replay(graphs, rows, hidden)
        ends = list(itertools.accumulate(row.num_scheduled_tokens for row in rows))
        if ends[-1] > len(rows):  # keep the hidden state of each row's last token
            last_tokens = self._tables.platform.upload([end - 1 for end in ends])
            self._hidden[: len(rows)] = self._hidden[last_tokens]
        return self._hidden

    def _compute(self, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is None:
            return self._first_hidden(batch)
        return self._head(batch, hidden)  # type: ignore[no-any-return]

    def _logits(self, hidden: torch.Tensor, output_indices: torch.Tensor) -> torch.Tensor | None:
        logits = super()._logits(hidden, output_indices)
        return _spread(logits, self._token_ids, self._vocab_size)

    def _choose(self, sampling: StepSampler, logits: torch.Tensor) -> torch.Tensor:
        return self._inputs.kernels.greedy(sampling.apply_rules(logits))


def _spread(
    logits: torch.Tensor | None, token_ids: torch.Tensor | None, vocab_size: int
) -> torch.Tensor | None:
    """Return the logits of the target's tokens, where those of the drafts' are `logits`."""
    if logits is None or token_ids is None:
        return logits
    spread = logits.new_full((len(logits), vocab_size), -torch.inf)
    return spread.index_copy_(1, token_ids, logits)
