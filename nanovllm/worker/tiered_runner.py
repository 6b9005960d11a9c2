"""A `ModelRunner` whose KV pool has tiers below it: host memory, or a store of files, or both.

Chosen by the options. Knows no sequence: the scheduler says which pages move.
"""

import dataclasses
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nanovllm.errors import ConfigError, OutOfMemoryError
from nanovllm.scheduler.messages import Row, Schedule, StepResult
from nanovllm.scheduler.transfers import Loaded
from nanovllm.scheduler.worker_info import WorkerInfo
from nanovllm.tiers.directory import DirectoryStore
from nanovllm.tiers.weight_files import WeightFiles
from nanovllm.utils.distributed import broadcast_from_first, smallest, tensor_parallel
from nanovllm.worker.host_pages import HostPages, PageCopies
from nanovllm.worker.kv_cache import available_memory
from nanovllm.worker.kv_namespace import kv_namespace
from nanovllm.worker.kv_pool import KVPool
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.step_output import PendingResult, StepOutput
from nanovllm.worker.timing import measure_seconds
from nanovllm.worker.transfers import PageTransfers

_FIRST_TOKENS, _MOST_TOKENS = 16, 1024
_MEASURE_SECONDS = 0.15
"""How long measuring a prompt may take, if its first tokens do not take longer."""


class TieredPending(PendingResult):
    """The result of a step, with the loads that had ended when it was launched."""

    def __init__(self, step: PendingResult, loaded: list[Loaded]) -> None:
        self._step = step
        self._loaded = loaded

    def result(self) -> StepResult:
        return dataclasses.replace(self._step.result(), loaded=self._loaded)

    def keep(self) -> None:
        self._step.keep()


class TieredRunner(ModelRunner):
    """A runner that moves pages as `Schedule.transfers` says.

    Raises:
        ConfigError: `kv_offload_gib` or `kv_cache_dir_gib` holds no page.
        OutOfMemoryError: there is not so much memory.
    """

    def __init__(self, target: NetworkSpec, device: torch.device, **options: Any) -> None:
        files = target.files
        if target.config.lora is not None:
            from nanovllm.lora.peft_files import adapter_files

            files = [*files, *adapter_files(target.config.lora)]
        self._weights = WeightFiles(files)  # before they are loaded
        super().__init__(target, device, **options)
        self._num_slots = self._find_num_slots()
        self._copies: PageCopies | None = None
        self._transfers: PageTransfers | None = None
        self._close: Callable[[], object] | None = None

    def open_tiers(self, info: WorkerInfo) -> WorkerInfo:
        """Make host memory and threads for the pool; return `info` with what the scheduler needs.

        Called once, behind `allocate`. A few steps and copies are run, to measure them.
        """
        pool = self.network.pool
        self._require_memory(pool)
        if self.device.type == "cuda":
            from nanovllm.worker.cuda_pages import CudaPages

            self._copies = CudaPages(pool, self._num_slots)
        else:
            self._copies = HostPages(pool, self._num_slots)
        namespace, store = "", None
        if self.config.kv_cache_dir is not None:
            namespace = kv_namespace(self.network, self._weights)
            limit, rank = int(self.config.kv_cache_dir_gib * 2**30), tensor_parallel().rank
            store = DirectoryStore(self.config.kv_cache_dir, limit, namespace, rank)
        self._transfers = PageTransfers(self._copies, store)
        # The threads hold the pool, so they end with the runner. Python's exit does the same.
        self._close = weakref.finalize(self, self._transfers.close)
        return dataclasses.replace(
            info,
            num_host_slots=self._num_slots,
            kv_namespace=namespace,
            token_seconds=self._token_seconds(info),
            page_seconds=self._page_seconds(),
        )

    def free(self) -> None:
        """Write what is queued, end the threads, and free the pool and the tables."""
        if self._close is not None:
            self._close()
        self._copies = self._transfers = self._close = None
        super().free()

    def give_back(self) -> None:
        """Give a CPU's host memory of the tier to the system, while no step runs.

        Nothing is on its way between pool and tiers then. The caller asks for no slot's old values.
        """
        super().give_back()
        if self._transfers is not None and isinstance(self._copies, HostPages):
            self._transfers.release(range(self.network.pool.num_blocks))
            self._copies.give_back()

    def _execute(self, schedule: Schedule) -> PendingResult:
        transfers = self._transfers
        if transfers is None:
            return super()._execute(schedule)
        awaited = False
        moved = schedule.transfers
        if moved is not None:
            transfers.release(moved.released)
            transfers.save([part for part in moved.stores if part.slots])
            transfers.load(moved.loads)
            transfers.write([part for part in moved.stores if not part.slots])
            awaited = moved.awaited
        pending = super()._execute(schedule)
        if awaited:
            transfers.wait()
        agree = partial(smallest, device=self.device)
        return TieredPending(pending, transfers.take_ended(agree))

    def run_rows(self, rows: list[Row]) -> StepOutput:
        """See `ModelRunner`. A step may have no rows: it moves pages, or waits for some."""
        if not rows:
            return StepOutput(torch.empty(0, dtype=torch.int64))
        return super().run_rows(rows)

    def _find_num_slots(self) -> int:
        """Return the pages of this rank's host memory: as many on each rank."""
        config = self.config
        needed = self.network.block_bytes * tensor_parallel().size
        limits = {"kv_offload_gib": config.kv_offload_gib}
        if config.kv_cache_dir is not None:
            limits["kv_cache_dir_gib"] = config.kv_cache_dir_gib
        for name, limit in limits.items():
            if limit is not None and limit * 2**30 < needed:
                raise ConfigError(
                    f"{name} {limit:g} holds no page of {needed} bytes: give at least "
                    f"{needed / 2**30:.3g}"
                )
        host_bytes = int((config.kv_offload_gib or 0) * 2**30)
        return smallest([host_bytes // needed], self.device)[0]

    def _require_memory(self, pool: KVPool) -> None:
        """Check that host memory can be filled beside a CPU's pool, on all ranks of this machine.

        Raises:
            OutOfMemoryError: it cannot.
        """
        needed = self._num_slots * pool.page_bytes
        if self.device.type == "cpu":
            needed += pool.num_blocks * pool.page_bytes
        if self.config.distributed_executor_backend != "ray":
            needed *= tensor_parallel().size
        available = available_memory()
        if self._num_slots and needed > available:
            raise OutOfMemoryError(
                f"kv_offload_gib {self.config.kv_offload_gib:g} is more host memory than is free: "
                f"with a CPU's KV pool, {needed / 2**30:.1f} GiB of {available / 2**30:.1f} GiB; "
                "lower it"
            )

    def _token_seconds(self, info: WorkerInfo) -> float:
        """Return how long a prompt's token takes: of a few, and of more if they are fast.

        They are written to page 0, which is zeroed again.
        """
        most = min(info.max_num_batched_tokens, info.max_model_len, _MOST_TOKENS)
        size = min(_FIRST_TOKENS, most)
        seconds = self._seconds_of(size)
        while size * 2 <= most and seconds < _MEASURE_SECONDS / 4:
            size *= 2
            seconds = self._seconds_of(size)
        self.network.pool.zero([0])
        return seconds / size

    @torch.inference_mode()
    def _seconds_of(self, num_tokens: int) -> float:
        """Return how long a step of a prompt takes: the first rank's time, on each rank."""
        start = time.perf_counter()
        self.run_rows([Row(-1, 0, 0, num_tokens, samples=False)])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - start
        found = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        return float(broadcast_from_first(found).item())

    @torch.inference_mode()
    def _page_seconds(self) -> float:
        """Return how long a page takes from host memory. It is of zeros, and so is page 0."""
        assert self._copies is not None
        if not self._num_slots:
            return 0.0
        self._copies.save([0], [0])
        restore = partial(self._copies.restore, [0], mark=self._copies.mark())
        return measure_seconds(lambda page: restore([page]), [0], self.device)[0][1]
