"""A `ModelRunner` whose requests may each have an adapter.

Chosen by the options. Knows no queue: the scheduler chose the slots, and says who uses them.
"""

import dataclasses
import logging
from typing import Any

import torch

from nanovllm.errors import NanoVLLMError
from nanovllm.lora.slots import AdapterSlots
from nanovllm.lora.targets import adapter_targets
from nanovllm.scheduler.messages import AdapterSlot, Ending, Row, RowDetails, Schedule, StepResult
from nanovllm.utils.distributed import smallest
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.step_output import PendingResult, StepOutput

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 64
"""A recorded step, and a padded one, may have so many tokens although a schedule has fewer."""


class AdapterPending(PendingResult):
    """The result of a step some of whose sequences end, because their adapter cannot be loaded.

    Args:
        endings: by sequence id.
    """

    def __init__(self, step: PendingResult, rows: list[Row], endings: dict[int, Ending]) -> None:
        self._step = step
        self._row_ids = [row.seq_id for row in rows]
        self._endings = endings

    def result(self) -> StepResult:
        """See `PendingResult`."""
        step = self._step.result()
        details = dict(step.details)
        for seq_id, ending in self._endings.items():
            count = details.get(seq_id, RowDetails()).num_draft_tokens
            details[seq_id] = RowDetails(count, ending)
        token_ids = [
            [] if seq_id in self._endings else tokens
            for seq_id, tokens in zip(self._row_ids, step.token_ids, strict=True)
        ]
        return dataclasses.replace(step, token_ids=token_ids, details=details)

    def keep(self) -> None:
        """See `PendingResult`."""
        self._step.keep()


class AdapterRunner(ModelRunner):
    """A runner that loads the adapters of admissions, and tells the layers each token's."""

    def __init__(self, target: NetworkSpec, device: torch.device, **options: Any) -> None:
        super().__init__(target, device, **options)
        config, network = self.config, self.network
        self._slots = AdapterSlots(
            network.model,
            adapter_targets(target.model_config),
            network.kernels,
            target.model_config.dtype,
            num_slots=config.max_loras,
            max_rank=config.max_lora_rank,
            max_tokens=max(self.max_num_batched_tokens, _LEAST_TOKENS),
            device=device,
        )
        network.model.register_forward_pre_hook(lambda _, args: self._slots.step.begin(*args))
        # By table row:
        self._slot_of = [-1] * (config.max_num_seqs + 1)
        self._endings: dict[int, Ending] = {}

    def _execute(self, schedule: Schedule) -> PendingResult:
        for new in schedule.admissions:
            self._endings.pop(new.table_idx, None)
            self._slot_of[new.table_idx] = -1
            if new.adapter is not None:
                ending = self._load(new.adapter)
                if ending is None:
                    self._slot_of[new.table_idx] = new.adapter.slot
                else:
                    self._endings[new.table_idx] = ending
        pending = super()._execute(schedule)
        if not self._endings:
            return pending
        endings = {
            row.seq_id: self._endings[row.table_idx]
            for row in schedule.rows
            if row.table_idx in self._endings
        }
        return AdapterPending(pending, schedule.rows, endings)

    def _load(self, adapter: AdapterSlot) -> Ending | None:
        """Have the adapter in its slot; return why its sequence ends, if a rank cannot load it."""
        if self._slots.holds(adapter):
            return None
        reason = "another rank cannot load the adapter; its log says why"
        loaded = True
        try:
            self._slots.load(adapter)
        except (NanoVLLMError, OSError, RuntimeError, MemoryError) as error:
            logger.warning("adapter %s cannot be loaded: %s", adapter.path, error)
            reason, loaded = f"the adapter cannot be loaded: {error}", False
        if smallest([int(loaded)], self.device) == [1]:
            return None
        self._slots.drop(adapter)
        return Ending("error", reason)

    def give_back(self) -> None:
        """Give the memory of the slots to the system; admissions load their adapters again."""
        super().give_back()
        self._slots.give_back()

    def run_rows(self, rows: list[Row]) -> StepOutput:
        """See `ModelRunner`."""
        slots = [self._slot_of[row.table_idx] for row in rows]
        self._slots.step.tokens.fill(slots, [row.num_scheduled_tokens for row in rows])
        return super().run_rows(rows)


def with_adapters(runner: type[ModelRunner]) -> type[ModelRunner]:
    """Return `runner`, a class of runners, with adapters."""
    if runner is ModelRunner:
        return AdapterRunner
    return type(f"Adapter{runner.__name__}", (AdapterRunner, runner), {})
