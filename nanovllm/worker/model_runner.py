"""Runs the model on one rank: tables, batch, forward, sample, and the result on its way back to
the host.

Obeys the schedule; knows no queue, no text and no other rank but through the layers' collectives.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from nanovllm.attention.backend import AttentionSpec, Backend
from nanovllm.attention.cpu import CPUBackend
from nanovllm.attention.selector import select_backend
from nanovllm.config import Config
from nanovllm.kernels.selector import kernels_for
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase, Matrix, QKVParallelLinear
from nanovllm.layers.quantization import FP8, make_quant_method
from nanovllm.models.config import ModelConfig
from nanovllm.models.registry import model_class
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler.messages import CacheInfo, Row, Schedule
from nanovllm.utils.distributed import broadcast_from_first, tensor_parallel
from nanovllm.utils.loader import init_dummy_weights, load_weights
from nanovllm.utils.memory import keep_freed, return_freed
from nanovllm.worker.cpu_graph import RecordedModel, record
from nanovllm.worker.cuda_graph import GraphRunner, can_capture, graph_sizes, make_capture
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.kv_cache import graph_bytes, num_blocks_that_fit, zeros
from nanovllm.worker.sampling import GatheredLogprobs, SamplingRows, gather_logprobs
from nanovllm.worker.step_output import PendingResult, PromptLogprobs, StepOutput

logger = logging.getLogger(__name__)

_DEFAULTS = threading.Lock()
"""Held while torch's default dtype, which belongs to the process, is not the user's."""
_LOGPROB_ROWS = 256
"""Prompt positions whose logits exist at once."""


class ModelRunner:
    """The model, its KV cache and the device tables of one rank."""

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
        # More tokens in a step take memory, and on a CPU no less time for each.
        suitable = 2048 if device.type == "cpu" else 16384
        self._max_num_batched_tokens = config.max_num_batched_tokens or suitable
        # What comes in FP8 never takes a GPU's memory in a wider form.
        start = device if model_config.fp8 is None else torch.device("cpu")
        with _defaults(model_config.dtype, start):
            self.model = model_class(model_config)(model_config, self.max_model_len)
        if model_config.fp8 is not None:
            for prefix, module in self.model.named_modules():
                if isinstance(module, LinearBase):
                    module.expect_fp8(prefix, model_config.fp8)
            self.model.to(device)
        self.model.eval().requires_grad_(False)
        narrow = {"fp8": FP8, "int8": torch.int8}
        self._kv_dtype = narrow.get(config.kv_cache_dtype, model_config.dtype)
        self._backend = self._select_backend()
        self._load(files)
        self._attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        self._tables: DeviceTables | None = None
        self._uses_graphs = self._backend.supports_graph and not config.enforce_eager
        self._uses_graphs = self._uses_graphs and can_capture(device)
        self._graphs: GraphRunner | None = None
        self._recorded: RecordedModel | None = None

    @torch.inference_mode()
    def measure(self) -> CacheInfo:
        """Return what this rank can hold; nothing is allocated yet."""
        block_size = self._backend.block_size
        per_sequence = -(-self.max_model_len // block_size)
        num_blocks = num_blocks_that_fit(
            self.config,
            self.device,
            block_bytes=self._cache_elements(1) * self._kv_dtype.itemsize,
            max_blocks=per_sequence * self.config.max_num_seqs,
            num_reserved=int(self._uses_graphs),
            warm_up=self._warm_up,
        )
        return CacheInfo(
            num_blocks,
            block_size,
            self.max_model_len,
            self.model_config.vocab_size,
            self._max_num_batched_tokens,
            runs_ahead=self.device.type == "cuda",
        )

    @torch.inference_mode()
    def allocate(self, info: CacheInfo) -> None:
        """Make the KV pool, the tables and the graphs."""
        tables = self._allocate(info)
        if self._uses_graphs:
            self._graphs = self._graph_runner(tables)
            self._graphs.capture(graph_sizes(self._max_rows), progress=tensor_parallel().rank == 0)
        elif isinstance(self._backend, CPUBackend) and not self.config.enforce_eager:
            self._recorded = record(self.model, tables)

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> PendingResult:
        """Launch a step. Steps run in the order in which they are launched."""
        assert self._tables is not None, "allocate() comes first"
        self._tables.apply(schedule)
        return PendingResult(schedule.step_id, self._step(self._tables, schedule.rows))

    def _allocate(self, info: CacheInfo) -> DeviceTables:
        """Make the KV pool and the tables; with graphs, one block more, for rows that pad a batch.

        The pool is zeroed: a masked key's value is multiplied by 0, so it must be finite.
        """
        num_blocks = info.num_blocks + self._uses_graphs
        shape = (len(self._attentions), *self._backend.kv_cache_shape(num_blocks))
        pool = zeros(shape, self._kv_dtype, self.device)
        for attention, kv_cache in zip(self._attentions, pool, strict=True):
            attention.bind(self._backend, kv_cache)
        self._tables = DeviceTables(
            info, self.config.max_num_seqs, self.device, native=self.config.native_kernels
        )
        return self._tables

    @property
    def _max_rows(self) -> int:
        return min(self.config.max_num_seqs, self._max_num_batched_tokens)

    def _graph_runner(self, tables: DeviceTables) -> GraphRunner:
        capture = make_capture(self.device)
        return GraphRunner(self.model, self._backend, tables, self._max_rows, capture)

    def _step(self, tables: DeviceTables, rows: list[Row]) -> StepOutput:
        if self._graphs is not None and self._graphs.fits(rows):
            tokens, graph_logits = self._graphs.run(rows)
            if all(tables.plain[row.table_idx] for row in rows):
                return StepOutput(tokens, None, [])
            return StepOutput(*self._sample(SamplingRows(tables, rows), graph_logits), [])
        sampling, logits = SamplingRows(tables, rows), None
        if self._recorded is not None and self._recorded.fits(rows):
            hidden = self._recorded.run(rows)
        else:
            batch, output_indices = tables.batch(rows), None
            if len(sampling) < len(batch.input_ids) and all(
                tables.params[row.table_idx].prompt_logprobs is None for row in rows
            ):
                # Of a chunk inside a prompt nothing is, but kernels need not serve no tokens.
                output_indices = sampling.last_tokens if len(sampling) else batch.cu_seqlens_q[:1]
            metadata = self._backend.plan(batch)
            hidden = self.model(
                dataclasses.replace(batch, output_indices=output_indices, metadata=metadata)
            )
        prompt_logprobs = self._prompt_logprobs(tables, rows, hidden)
        if len(sampling):
            # Where every token is a row's last one there is nothing to choose.
            last = hidden if len(sampling) == len(hidden) else hidden[sampling.last_tokens]
            logits = self.model.compute_logits(last)  # type: ignore[operator]
        return StepOutput(*self._sample(sampling, logits), prompt_logprobs)

    def _sample(
        self, sampling: SamplingRows, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[list[int], list[int], GatheredLogprobs] | None]:
        """Choose and store the rows' tokens; return them, and the log-probabilities asked for."""
        logprobs = None
        if logits is None:  # another rank has them
            token_ids = torch.empty_like(sampling.last_tokens)
        else:
            token_ids = sampling.sample(logits)
            logprobs = sampling.logprobs(logits, token_ids)
        if len(sampling):
            broadcast_from_first(token_ids)
            sampling.store(token_ids)
        return token_ids, logprobs

    def _prompt_logprobs(
        self, tables: DeviceTables, rows: list[Row], hidden: torch.Tensor
    ) -> list[PromptLogprobs]:
        """Log-probabilities of the prompt tokens that follow those of `rows`, where asked for."""
        found = []
        offset = 0
        for row in rows:
            count = tables.params[row.table_idx].prompt_logprobs
            if count is not None:
                first, last = row.num_computed_tokens + 1, tables.num_prompt_tokens[row.table_idx]
                stop = min(first + row.num_scheduled_tokens, last)
                for start in range(first, stop, _LOGPROB_ROWS):
                    end = min(start + _LOGPROB_ROWS, stop)
                    states = hidden[offset + start - first : offset + end - first]
                    logits = self.model.compute_logits(states)  # type: ignore[operator]
                    if logits is not None:
                        tokens = tables.token_ids[row.table_idx, start:end].long()
                        gathered = gather_logprobs(logits, tokens, count)
                        found.append(PromptLogprobs(row.seq_id, start, count, gathered))
            offset += row.num_scheduled_tokens
        return found

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
                kv_dtype=self._kv_dtype,
            ),
            native=self.config.native_kernels,
        )

    def _load(self, files: list[Path]) -> None:
        """Load the weights, and give each its final form before the next is read."""
        kernels = None
        if self.config.native_kernels:
            kernels = kernels_for(self.device, self.model_config.dtype)
        matrices: dict[nn.Parameter, list[Matrix]] = {}  # by weight, which several may share
        for module in self.model.modules():
            if isinstance(module, Matrix) and module.weight is not None:
                matrices.setdefault(module.weight, []).append(module)
            elif isinstance(module, RMSNorm | SiluAndMul):
                module.kernels = kernels

        dtype, native = self.model_config.dtype, self.config.native_kernels
        quantization = self.config.quantization if self.model_config.fp8 is None else None

        def finish(module: nn.Module) -> None:
            weight = module.weight if isinstance(module, Matrix) else None
            if weight is None or weight not in matrices:
                return
            sharing, method = matrices.pop(weight), None
            if isinstance(module, LinearBase):
                method = module.make_fp8_method(dtype, native=native)
            if method is None:
                fp8 = quantization == "fp8" and not isinstance(module, LinearBase)
                method = make_quant_method(
                    weight,
                    None if fp8 else quantization,
                    native=native,
                    is_embedding=any(type(matrix) is VocabParallelEmbedding for matrix in sharing),
                )
            if method is not None:
                for matrix in sharing:
                    matrix.replace_weight(method)

        if self.config.load_format == "dummy":
            init_dummy_weights(self.model, self.config.seed)
            for module in self.model.modules():
                finish(module)
        else:
            ignored: frozenset[str] = self.model.ignored_weights  # type: ignore[assignment]
            progress = tensor_parallel().rank == 0
            load_weights(self.model, files, ignored=ignored, progress=progress, on_loaded=finish)
        return_freed()
        if self.device.type == "cpu":
            keep_freed()

    def _cache_elements(self, num_blocks: int) -> int:
        shape = self._backend.kv_cache_shape(num_blocks)
        return len(self._attentions) * torch.Size(shape).numel()

    def _warm_up(self) -> int:
        """Run the largest prefill and the most samples, on a small pool: the peak of memory.

        Returns the bytes that graphs will take beside it.
        """
        max_tokens = self._max_num_batched_tokens
        length = min(self.max_model_len, max_tokens)
        count = max(1, min(max_tokens // length, self.config.max_num_seqs))
        block_size = self._backend.block_size
        num_blocks = -(-length // block_size)
        info = CacheInfo(
            num_blocks, block_size, self.max_model_len, self.model_config.vocab_size, max_tokens
        )
        num_seqs = self.config.max_num_seqs
        tables = self._allocate(info)
        tables.block_tables[:num_seqs, :num_blocks] = torch.arange(num_blocks, device=self.device)
        tables.params = [SamplingParams(temperature=1.0)] * num_seqs
        self._step(tables, [Row(i, i, 0, length, samples=True) for i in range(count)])
        self._step(tables, [Row(i, i, 0, 1, samples=True) for i in range(num_seqs)])
        num_bytes = 0
        if self._uses_graphs:
            graphs = self._graph_runner(tables)
            num_bytes = graph_bytes(
                graph_sizes(self._max_rows), lambda size: graphs.capture([size]), self.device
            )
        for attention in self._attentions:
            del attention.kv_cache
        self._tables = None
        return num_bytes


@contextlib.contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Make parameters of `dtype` on `device` inside, and leave torch's defaults as they were."""
    with _DEFAULTS:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                yield
        finally:
            torch.set_default_dtype(before)
