"""Notes the experts that the routers of one rank choose, and adds them to the results of steps."""

from typing import Any

import torch
from torch import nn

from nanovllm.core.messages import Row, Schedule
from nanovllm.errors import ConfigError
from nanovllm.kernels.torch_experts import Routing
from nanovllm.layers.experts import Router
from nanovllm.worker.hooks import RowNeeds, WorkerHook
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.step_output import PendingResult


class RankRouting(WorkerHook):
    """The experts of each token of a step, from hooks on the routers.

    Args:
        runner: its network is loaded, and its steps run layer by layer.

    Raises:
        ConfigError: the model has no experts.
    """

    def __init__(self, runner: ModelRunner) -> None:
        model: nn.Module = runner.network.model
        routers = [module for module in model.modules() if isinstance(module, Router)]
        if not routers:
            raise ConfigError(
                "enable_return_routed_experts=True is for models with experts, and this one has "
                "none: leave it out"
            )
        most = max(router.output_size for router in routers)
        self._dtype = torch.uint8 if most <= 2**8 else torch.int32
        self._ids: list[torch.Tensor] = []  # of each layer, [T, k]
        self._rows: list[Row] = []
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, router: nn.Module, inputs: Any, routing: Routing) -> None:
        self._ids.append(routing.ids)

    def begin_rows(self, rows: list[Row]) -> RowNeeds:
        """Forget the experts of the step before, or of a measurement; ask for all tokens.

        Otherwise the last layer has only those that sample.
        """
        self._ids = []
        self._rows = rows
        return RowNeeds(indices=None)

    def end(self, schedule: Schedule, pending: PendingResult) -> None:
        """Add the experts of each row: [tokens of the row, layers with experts, k]."""
        if not schedule.rows:
            return
        ids = torch.stack(self._ids, 1).to(self._dtype).cpu().numpy()
        start = 0
        for row in self._rows:
            end = start + row.num_scheduled_tokens
            pending.add_extra(row.seq_id, "routed_experts", ids[start:end])
            start = end
