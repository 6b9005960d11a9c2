"""Proposes what a smaller model of the same vocabulary goes on with."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from nanovllm.core.messages import Row
from nanovllm.features.speculation.proposers.draft_kv import FEW_TOKENS
from nanovllm.features.speculation.proposers.draft_network import DraftNetwork, load_draft
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.network import Network
from nanovllm.worker.step_sampler import StepSampler

if TYPE_CHECKING:
    from nanovllm.features.graphs.cpu_graph import CPUGraphRunner
    from nanovllm.features.graphs.cuda_graph import GraphRunner
    from nanovllm.features.graphs.step_runners import StepRunners


class DraftModel(DraftNetwork):
    """A draft model, loaded from `draft`.

    A draft is what the model itself would sample with the request's parameters, and with the
    target's random number of the position: where the two models agree, so do their draws. Of a
    model with much to say, more of these are accepted than of the most likely tokens.
    """

    def __init__(
        self,
        target: Network,
        draft: NetworkSpec,
        max_num_batched_tokens: int,
        make_steps: "Callable[[Network, int], StepRunners] | None" = None,
    ) -> None:
        max_model_len = min(target.max_model_len, draft.model_config.max_position)
        network = load_draft(target, draft, max_model_len)
        super().__init__(network, max_num_batched_tokens, make_steps, lag=0, keeps_drafts=True)
        self._recorded: CPUGraphRunner | None = None

    def allocate(self, tables: DeviceTables, num_blocks: int) -> None:
        """Make the KV pool, and record small steps."""
        super().allocate(tables, num_blocks)
        if self._steps is not None:
            self._recorded = self._steps.recorded(self._network.model, self._tables)

    def _make_graphs(self, steps: "StepRunners") -> "list[GraphRunner]":
        size = self._max_graph_tokens(FEW_TOKENS)
        return [steps.graphs(self._tables, size, max_known_tokens=FEW_TOKENS)]

    def _forward(
        self, rows: list[Row], output_indices: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        if self._recorded is not None and self._recorded.fits(rows):
            return self._recorded.forward(rows)
        return self._network.forward(self._tables, rows, output_indices)

    def _choose(self, sampling: StepSampler, logits: torch.Tensor) -> torch.Tensor:
        return sampling.sample(logits)
