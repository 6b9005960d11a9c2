"""The adapters of one rank: loads those of admissions, and tells the layers each token's.

A part of the model runner. The scheduler chose the slots, and says who uses them.
"""

import logging

from nanovllm.core.messages import AdapterSlot, FinishInfo, Row, Schedule
from nanovllm.errors import NanoVLLMError
from nanovllm.features.lora.adapter_registry import adapter_targets
from nanovllm.features.lora.slots import AdapterSlots
from nanovllm.utils.distributed import smallest
from nanovllm.worker.hooks import WorkerHook
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.step_output import PendingResult

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 64
"""A recorded step, and a padded one, may have so many tokens although a schedule has fewer."""


class RankAdapters(WorkerHook):
    """The slots of a runner's adapters, and who uses them.

    A sequence whose adapter cannot be loaded takes part in steps, without an adapter, until the
    scheduler learns that it ends.

    Args:
        runner: its network is loaded. Its layers get adapters here.
    """

    def __init__(self, runner: ModelRunner) -> None:
        config = runner.config
        network = runner.network
        self.slots = AdapterSlots(
            network.model,
            adapter_targets(network.model_config),
            network.kernels,
            network.model_config.dtype,
            num_slots=config.max_loras,
            max_rank=config.max_lora_rank,
            max_tokens=max(runner.max_num_batched_tokens, _LEAST_TOKENS),
            device=runner.device,
        )
        network.adapters = self.slots.step
        self._device = runner.device
        # By table row:
        self._slot_of = [-1] * (config.max_num_seqs + 1)
        self._finish_infos: dict[int, FinishInfo] = {}

    def begin(self, schedule: Schedule) -> None:
        """Load the adapters of the step's admissions."""
        for new in schedule.admissions:
            self._finish_infos.pop(new.table_idx, None)
            self._slot_of[new.table_idx] = -1
            if new.adapter is not None:
                finish_info = self._load(new.adapter)
                if finish_info is None:
                    self._slot_of[new.table_idx] = new.adapter.slot
                else:
                    self._finish_infos[new.table_idx] = finish_info

    def begin_rows(self, rows: list[Row]) -> None:
        """Tell the layers the adapter of each token."""
        slots = [self._slot_of[row.table_idx] for row in rows]
        self.slots.step.tokens.fill(slots, [row.num_scheduled_tokens for row in rows])

    def end(self, schedule: Schedule, pending: PendingResult) -> None:
        """End the sequences of the step whose adapter cannot be loaded."""
        if self._finish_infos:
            pending.finish_infos = {
                row.seq_id: self._finish_infos[row.table_idx]
                for row in schedule.rows
                if row.table_idx in self._finish_infos
            }

    def give_back(self) -> None:
        """Give the memory of the slots to the system; admissions load their adapters again."""
        self.slots.give_back()

    def _load(self, adapter: AdapterSlot) -> FinishInfo | None:
        """Load the adapter into its slot; return why its sequence ends, or None if it is there."""
        if self.slots.holds(adapter):
            return None
        reason = "another rank cannot load the adapter; its log says why"
        loaded = True
        try:
            self.slots.load(adapter)
        except (NanoVLLMError, OSError, RuntimeError, MemoryError) as error:
            logger.warning("adapter %s cannot be loaded: %s", adapter.path, error)
            reason = f"the adapter cannot be loaded: {error}"
            loaded = False
        if smallest([int(loaded)], self._device) == [1]:
            return None
        self.slots.drop(adapter)
        return FinishInfo("error", reason)
