"""The adapters of one rank: each has a slot in every layer's table, filled when first needed.

The scheduler chose the slots, and says who uses them. `RankAdapters` is a part of the model runner.
"""

import dataclasses
import logging
from collections.abc import Mapping

import torch
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.core.messages import AdapterSlot, FinishInfo, Row, Schedule
from nanovllm.errors import CheckpointError, NanoVLLMError
from nanovllm.features.lora.adapter_registry import adapter_targets
from nanovllm.features.lora.layer_parts import LoRATarget, named_slices
from nanovllm.features.lora.peft_files import Adapter, Factors, fitting, read_adapter
from nanovllm.kernels.adapters import AdapterRows, AdapterTable, empty_table
from nanovllm.kernels.torch_kernels import Kernels, LinearMethod, PlainWeight
from nanovllm.layers.linear import LinearBase
from nanovllm.utils.distributed import smallest
from nanovllm.utils.memory import return_pages
from nanovllm.worker.hooks import WorkerHook
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.step_output import PendingResult

logger = logging.getLogger(__name__)


class StepAdapters:
    """Which adapter each token of the running step has.

    The last layer of a step may compute some of the tokens only, those of `Batch.output_indices`.
    They are fewer than all, so the number of a layer's inputs tells which of both these are.
    """

    def __init__(self, max_tokens: int, num_slots: int, device: torch.device) -> None:
        self.tokens = AdapterRows(max_tokens, num_slots, device)
        self._outputs = AdapterRows(max_tokens, num_slots, device)
        self._num_outputs: int | None = None

    def begin(self, batch: Batch) -> None:
        """Note which tokens the last layer computes. Called before a forward pass.

        Recordings and graphs compute all tokens: they read `tokens` when they run.
        """
        indices = batch.output_indices
        self._num_outputs = None
        if indices is not None:
            self._num_outputs = len(indices)
            self._outputs.take(self.tokens, indices)

    def rows(self, num_inputs: int) -> AdapterRows:
        """Return the adapters of the `num_inputs` tokens that a layer computes."""
        return self._outputs if num_inputs == self._num_outputs else self.tokens


@dataclasses.dataclass(eq=False)
class AdaptedWeight:
    """A weight, and the adapters of its layer. With a bias, that is added before them."""

    base: LinearMethod
    table: AdapterTable
    step: StepAdapters
    kernels: Kernels

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self.base.apply(x, bias)
        self.kernels.add_lora(y, x, self.step.rows(len(x)), self.table)
        return y

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return self.base.embedding(ids)


class AdapterSlots:
    """The tables of a network's layers, with the digest of what each slot holds.

    Makes the layers of `model` use them: its weights must be loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, LoRATarget],
        kernels: Kernels,
        dtype: torch.dtype,
        *,
        num_slots: int,
        max_rank: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._targets = targets
        self._max_rank = max_rank
        self._dtype = dtype
        self._digests: list[str | None] = [None] * num_slots
        self._linears = named_slices(model, targets.values())
        self._tables: dict[str, AdapterTable] = {}
        self.step = StepAdapters(max_tokens, num_slots, device)
        most = max(len(target.slices) for target in targets.values())
        scratch = torch.zeros(max_tokens, most * max_rank, device=device)
        for path, target in targets.items():
            widths = [part.size for part in target.slices]
            table = empty_table(num_slots, max_rank, target.inputs, widths, scratch, dtype)
            self._tables[path] = table
            layer = model.get_submodule(path)
            assert isinstance(layer, LinearBase)
            base = layer.method
            if base is None:  # new weights for the layer need the parameter
                assert layer.weight is not None
                base = PlainWeight(layer.weight.data)
            layer.method = AdaptedWeight(base, table, self.step, kernels)

    def holds(self, adapter: AdapterSlot) -> bool:
        """Return whether the adapter is in its slot already."""
        return self._digests[adapter.slot] == adapter.digest

    def drop(self, adapter: AdapterSlot) -> None:
        """Forget what the adapter's slot holds."""
        self._digests[adapter.slot] = None

    def give_back(self) -> None:
        """Empty all slots, and give their memory to the system. For CPUs."""
        self._digests = [None] * len(self._digests)
        for table in self._tables.values():
            for factors in (table.a, table.b):
                return_pages(factors.view(-1).view(torch.uint8))

    def load(self, wanted: AdapterSlot) -> None:
        """Read the adapter from its files into its slot.

        Raises:
            CheckpointError, InvalidRequestError: as for `read_adapter` and `fitting`, or the
                files are not those of `wanted.digest` any more. The slot is empty then.
        """
        self.drop(wanted)
        adapter = read_adapter(wanted.path, self._max_rank)
        if adapter.digest != wanted.digest:
            raise CheckpointError(
                f"adapter {wanted.path}: its files have changed since it was read; load it "
                "again, under another name or with load_inplace=True"
            )
        linears = fitting(adapter, self._linears)
        self._check_range(adapter)
        for path, target in self._targets.items():
            self._store(wanted.slot, self._tables[path], target, linears)
        self._digests[wanted.slot] = wanted.digest

    def _check_range(self, adapter: Adapter) -> None:
        """Check that no number becomes infinite in the model's dtype."""
        largest = torch.finfo(self._dtype).max
        for module, (a, b, _) in adapter.linears.items():
            if max(float(a.abs().max()), float(b.abs().max())) > largest:
                raise CheckpointError(
                    f"adapter {adapter.path}: {module} has numbers above {largest:g}, the largest "
                    f"of {self._dtype}: use another dtype"
                )

    def _store(
        self, slot: int, table: AdapterTable, target: LoRATarget, linears: Mapping[str, Factors]
    ) -> None:
        """Write this rank's part of the factors of a layer's linears to its table."""
        first_row = 0
        column = 0
        ranks = []
        scales = []
        for part in target.slices:
            factors = linears.get(part.name)
            ranks.append(0 if factors is None else factors.rank)
            scales.append(0.0 if factors is None else factors.scale)
            if factors is not None:
                inputs = factors.a[:, target.input_start : target.input_start + target.inputs]
                table.a[slot, first_row : first_row + factors.rank] = inputs.to(table.a.device)
                columns = slice(column, column + part.size)
                rows = [factors.b[piece.start : piece.start + piece.size] for piece in part.pieces]
                table.b[slot, : factors.rank, columns] = torch.cat(rows).T.to(table.b.device)
            first_row += table.max_rank
            column += part.size
        table.ranks[slot] = torch.tensor(ranks, dtype=torch.int32)
        table.scales[slot] = torch.tensor(scales)


_LEAST_TOKENS = 64
"""A recorded step, and a padded one, may have so many tokens although a schedule has fewer."""


class RankAdapters(WorkerHook):
    """The slots of a runner's adapters, and who uses them.

    A sequence whose adapter cannot be loaded takes part in steps, without an adapter, until the
    scheduler learns that it ends.
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
