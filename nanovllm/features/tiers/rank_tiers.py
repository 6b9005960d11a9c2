"""The tiers below the KV pool of one rank: host memory, or a store of files, or both.

A part of the model runner. The scheduler says which pages move.
"""

import dataclasses
import time
import weakref
from collections.abc import Callable
from functools import partial

import torch

from nanovllm.core.messages import Row, Schedule
from nanovllm.core.worker_info import TierInfo, WorkerInfo
from nanovllm.errors import ConfigError, OutOfMemoryError
from nanovllm.features.tiers.directory import make_store
from nanovllm.features.tiers.host_pages import HostPages, PageCopies
from nanovllm.features.tiers.kv_namespace import kv_namespace
from nanovllm.features.tiers.page_transfers import PageTransfers
from nanovllm.features.tiers.weight_files import WeightSnapshot
from nanovllm.platform.cpu import available_memory
from nanovllm.utils.distributed import broadcast_from_first, smallest, tensor_parallel
from nanovllm.worker.hooks import WorkerHook
from nanovllm.worker.kv_pool import KVPool
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.step_output import PendingResult
from nanovllm.worker.timing import measure_seconds

_FIRST_TOKENS = 16
_MOST_TOKENS = 1024
_MEASURE_SECONDS = 0.15
"""How long measuring a prompt may take, if its first tokens do not take longer."""


class RankTiers(WorkerHook):
    """Moves pages as `Schedule.transfers` says, between `open` and `free`.

    Args:
        files: the network's, found before they were loaded.

    Raises:
        ConfigError: `kv_offload_gib` or `kv_cache_dir_gib` holds no page, or no `PageCopies` is
            for this device.
    """

    def __init__(self, runner: ModelRunner, files: WeightSnapshot) -> None:
        self._config = runner.config
        self._network = runner.network
        self._platform = runner.platform
        self._device = runner.device
        self._files = files
        if not self._platform.in_host_memory and self._device.type != "cuda":
            raise ConfigError("kv_offload_gib, kv_cache_dir and kv_store need a CPU or a CUDA GPU")
        self._num_slots = self._find_num_slots()
        self._copies: PageCopies | None = None
        self._transfers: PageTransfers | None = None
        self._close: Callable[[], object] | None = None

    def open(self, info: WorkerInfo, run: Callable[[list[Row]], object]) -> WorkerInfo:
        """Make host memory and threads for the pool; measure a few steps and copies.

        Raises:
            OutOfMemoryError: there is not enough memory.
        """
        pool = self._network.pool
        self._require_memory(pool)
        if self._platform.in_host_memory:
            self._copies = HostPages(pool, self._num_slots)
        else:
            from nanovllm.features.tiers.cuda_pages import CudaPages

            self._copies = CudaPages(pool, self._num_slots)
        namespace = ""
        if self._config.has_store:
            namespace = kv_namespace(self._network, self._files)
        store = make_store(self._config, namespace, tensor_parallel().rank)
        self._transfers = PageTransfers(self._copies, store)
        # The threads hold the pool, so they end with the runner. Python's exit does the same.
        self._close = weakref.finalize(self, self._transfers.close)
        seconds = self._token_seconds(info, run), self._page_seconds(self._copies)
        return dataclasses.replace(info, tiers=TierInfo(self._num_slots, namespace, *seconds))

    def free(self) -> None:
        """Write what is queued, and end the threads."""
        if self._close is not None:
            self._close()
        self._copies = None
        self._transfers = None
        self._close = None

    def give_back(self) -> None:
        """Give a CPU's host memory to the system. Nobody asks for a slot's old values any more."""
        if self._transfers is not None and isinstance(self._copies, HostPages):
            self._transfers.release(range(self._network.num_blocks))
            self._copies.give_back()

    def begin(self, schedule: Schedule) -> None:
        """Begin what the step moves."""
        moved = schedule.transfers
        if moved is None or self._transfers is None:
            return
        self._transfers.release(moved.released)
        self._transfers.save([part for part in moved.stores if part.slots])
        self._transfers.load(moved.loads)
        self._transfers.write([part for part in moved.stores if not part.slots])

    def end(self, schedule: Schedule, pending: PendingResult) -> None:
        """Add the loads that have ended to the result; wait for one if the step is for that."""
        if self._transfers is None:
            return
        if schedule.transfers is not None and schedule.transfers.awaited:
            self._transfers.wait()
        pending.loaded = self._transfers.take_ended(partial(smallest, device=self._device))

    def _find_num_slots(self) -> int:
        """Return the pages of this rank's host memory: as many on each rank."""
        config = self._config
        needed = self._network.block_bytes * tensor_parallel().size
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
        return smallest([host_bytes // needed], self._device)[0]

    def _require_memory(self, pool: KVPool) -> None:
        """Raise OutOfMemoryError if this machine's ranks cannot fill host memory besides a CPU's
        pool.
        """
        needed = self._num_slots * pool.page_bytes
        if self._platform.in_host_memory:
            needed += pool.num_blocks * pool.page_bytes
        if self._config.distributed_executor_backend != "ray":
            needed *= tensor_parallel().size
        available = available_memory()
        if self._num_slots and needed > available:
            raise OutOfMemoryError(
                f"kv_offload_gib {self._config.kv_offload_gib:g} is more host memory than is free: "
                f"with a CPU's KV pool, {needed / 2**30:.1f} GiB of {available / 2**30:.1f} GiB; "
                "lower it"
            )

    def _token_seconds(self, info: WorkerInfo, run: Callable[[list[Row]], object]) -> float:
        """Return how long a prompt's token takes: of a few, and of more if they are fast."""
        most = min(info.max_num_batched_tokens, info.max_model_len, _MOST_TOKENS)
        size = min(_FIRST_TOKENS, most)
        seconds = self._seconds_of(size, run)
        while size * 2 <= most and seconds < _MEASURE_SECONDS / 4:
            size *= 2
            seconds = self._seconds_of(size, run)
        self._network.pool.zero([0])
        return seconds / size

    @torch.inference_mode()
    def _seconds_of(self, num_tokens: int, run: Callable[[list[Row]], object]) -> float:
        """Return how long a step of a prompt takes: the first rank's time, on each rank."""
        start = time.perf_counter()
        run([Row(-1, 0, 0, num_tokens, samples=False)])
        self._platform.synchronize()
        seconds = time.perf_counter() - start
        found = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        return float(broadcast_from_first(found).item())

    @torch.inference_mode()
    def _page_seconds(self, copies: PageCopies) -> float:
        """Return how long a page takes from host memory. It is of zeros, and so is page 0."""
        if not self._num_slots:
            return 0.0
        copies.save([0], [0])
        restore = partial(copies.restore, [0], mark=copies.mark())
        return measure_seconds(lambda page: restore([page]), [0], self._platform)[0][1]
