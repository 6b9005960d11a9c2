"""Runs the model on one rank: tables, batch, forward, sample, and the result on its way back to
the host.

Obeys the schedule; knows no queue, no text and no other rank but through the layers' collectives.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from nanovllm.attention.backend import AttentionSpec, Backend, select_backend
from nanovllm.config import Config
from nanovllm.engine.batch import SlotTables
from nanovllm.engine.kv_cache import num_blocks_that_fit, zeros
from nanovllm.engine.schedule import CacheInfo, Row, Schedule, StepResult
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import QKVParallelLinear
from nanovllm.layers.sampler import sample
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import model_class
from nanovllm.utils.distributed import broadcast_from_first, tensor_parallel
from nanovllm.utils.loader import init_dummy_weights, load_weights

logger = logging.getLogger(__name__)


class PendingResult:
    """A launched step's tokens, perhaps still being computed."""

    def __init__(self, step_id: int, token_ids: torch.Tensor) -> None:
        self._step_id = step_id
        self._token_ids = token_ids.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def result(self) -> StepResult:
        """Wait for the step and return its tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        return StepResult(self._step_id, [[token] for token in self._token_ids.tolist()])


class ModelRunner:
    """The model, its KV cache and the slot tables of one rank."""

    def __init__(
        self, config: Config, model_config: ModelConfig, files: list[Path], device: torch.device
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.device = device
        self.max_model_len = min(config.max_model_len, model_config.max_position)
        if self.max_model_len < config.max_model_len and tensor_parallel().rank == 0:
            logger.warning(
                "max_model_len cut from %d to %d, the positions that the model was made for",
                config.max_model_len,
                self.max_model_len,
            )
        with _defaults(model_config.dtype, device):
            self.model = model_class(model_config)(model_config, self.max_model_len)
        self.model.eval().requires_grad_(False)
        if config.load_format == "dummy":
            init_dummy_weights(self.model, config.seed)
        else:
            progress = tensor_parallel().rank == 0
            ignored = self.model.ignored_weights
            load_weights(self.model, files, ignored=ignored, progress=progress)  # type: ignore[arg-type]
        self._attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        self._backend = self._select_backend()
        self._tables: SlotTables | None = None

    @torch.inference_mode()
    def measure(self) -> CacheInfo:
        """Return what this rank can hold; nothing is allocated yet."""
        block_size = self._backend.block_size
        per_sequence = -(-self.max_model_len // block_size)
        num_blocks = num_blocks_that_fit(
            self.config,
            self.device,
            block_bytes=self._cache_elements(1) * self.model_config.dtype.itemsize,
            max_blocks=per_sequence * self.config.max_num_seqs,
            warm_up=self._warm_up,
        )
        return CacheInfo(num_blocks, block_size, self.max_model_len, self.model_config.vocab_size)

    @torch.inference_mode()
    def allocate(self, info: CacheInfo) -> None:
        """Make the KV pool and the tables.

        The pool is zeroed: a masked key's value is multiplied by 0, so it must be finite.
        """
        shape = (len(self._attentions), *self._backend.kv_cache_shape(info.num_blocks))
        pool = zeros(shape, self.model_config.dtype, self.device)
        for attention, kv_cache in zip(self._attentions, pool, strict=True):
            attention.bind(self._backend, kv_cache)
        self._tables = SlotTables(info, self.config.max_num_seqs, self.device)

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> PendingResult:
        """Launch a step. Steps run in the order in which they are launched."""
        assert self._tables is not None, "allocate() comes first"
        self._tables.apply(schedule)
        token_ids = self._step(self._tables, schedule.rows)
        return PendingResult(schedule.step_id, token_ids)

    def _step(self, tables: SlotTables, rows: list[Row]) -> torch.Tensor:
        batch = tables.batch(rows)
        object.__setattr__(batch, "metadata", self._backend.plan(batch))
        hidden = self.model(batch)
        sampling = tables.sampling(rows)
        if not len(sampling.last_tokens):
            return sampling.last_tokens
        logits = self.model.compute_logits(hidden[sampling.last_tokens])  # type: ignore[operator]
        if logits is None:
            token_ids = torch.empty_like(sampling.last_tokens)
        else:
            token_ids = sample(logits, sampling.temperatures, sampling.seeds, sampling.positions)
        broadcast_from_first(token_ids)
        sampling.store(token_ids)
        return token_ids

    def _select_backend(self) -> Backend:
        qkv = next(m for m in self.model.modules() if isinstance(m, QKVParallelLinear))
        return select_backend(
            AttentionSpec(
                num_heads=qkv.num_heads,
                num_kv_heads=qkv.num_kv_heads,
                head_dim=self.model_config.head_dim,
                dtype=self.model_config.dtype,
                device=self.device,
                block_size=self.config.kvcache_block_size,
            )
        )

    def _cache_elements(self, num_blocks: int) -> int:
        shape = self._backend.kv_cache_shape(num_blocks)
        return len(self._attentions) * torch.Size(shape).numel()

    def _warm_up(self) -> None:
        """Run the largest step once, on a pool just large enough for it, so that the peak is
        known.
        """
        length = min(self.max_model_len, self.config.max_num_batched_tokens)
        count = max(1, min(self.config.max_num_batched_tokens // length, self.config.max_num_seqs))
        block_size = self._backend.block_size
        num_blocks = -(-length // block_size)
        info = CacheInfo(num_blocks, block_size, self.max_model_len, self.model_config.vocab_size)
        self.allocate(info)
        assert self._tables is not None
        self._tables.block_tables[:, :num_blocks] = torch.arange(num_blocks, device=self.device)
        self._step(self._tables, [Row(i, i, 0, length, samples=True) for i in range(count)])
        for attention in self._attentions:
            del attention.kv_cache
        self._tables = None


@contextlib.contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Make parameters of `dtype` on `device` inside, and leave torch's defaults as they were."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
