"""Runs the model on one rank: build, measure, allocate, then execute schedules.

Knows no queue and no text, and no other rank except through the layers' collectives.
"""

import dataclasses
import logging
import time
from pathlib import Path

import torch

from nanovllm.attention.backend import AttentionSpec, Backend
from nanovllm.attention.selector import select_backend
from nanovllm.config import Config
from nanovllm.kernels.cpu.library import torch_on_one_thread
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import QKVParallelLinear
from nanovllm.layers.quantization import FP8
from nanovllm.models.config import ModelConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler.messages import MAX_SAMPLES, CacheInfo, Row, Schedule
from nanovllm.utils.distributed import broadcast_from_first, tensor_parallel
from nanovllm.utils.memory import keep_freed
from nanovllm.worker.cpu_graph import RecordedModel, record
from nanovllm.worker.cuda_graph import GraphRunner, can_capture, graph_sizes, make_capture
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.kv_cache import graph_bytes, num_blocks_that_fit, zeros
from nanovllm.worker.model_loader import build_model, load_model
from nanovllm.worker.proposers.costs import DRAFT_SIZES, STEP_SIZES, measure_seconds
from nanovllm.worker.proposers.proposer import Proposer
from nanovllm.worker.proposers.registry import make_proposer
from nanovllm.worker.sampling import SampledLogprobs, SamplingRows, gather_logprobs
from nanovllm.worker.step_output import PendingResult, PromptLogprobs, Step, StepOutput

logger = logging.getLogger(__name__)

_LOGPROB_ROWS = 256
"""Prompt positions whose logits are in memory at the same time."""


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
        # Larger steps take more memory; on a CPU they do not make a token cheaper.
        default_num_tokens = 2048 if device.type == "cpu" else 16384
        self._max_num_batched_tokens = config.max_num_batched_tokens or default_num_tokens
        self.model = build_model(config, model_config, files, self.max_model_len, device)
        kv_dtypes = {"fp8": FP8, "int8": torch.int8}
        self._kv_dtype = kv_dtypes.get(config.kv_cache_dtype, model_config.dtype)
        self._backend = self._select_backend()
        load_model(self.model, config, model_config, files)
        if device.type == "cpu":
            keep_freed()  # each step reuses the memory that the last one freed
        self._attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        self._pool: torch.Tensor | None = None
        self._tables: DeviceTables | None = None
        self._uses_graphs = (
            self._backend.supports_graph and not config.enforce_eager and can_capture(device)
        )
        self._graphs: GraphRunner | None = None
        self._recorded: RecordedModel | None = None
        spec = config.speculative_config
        assert not isinstance(spec, dict)
        self._proposer: Proposer | None = None if spec is None else make_proposer(spec)

    @torch.inference_mode()
    def measure(self) -> CacheInfo:
        """Return what this rank can hold. Allocates nothing that stays."""
        block_size = self._backend.block_size
        blocks_per_sequence = -(-self.max_model_len // block_size)
        block_bytes = torch.Size(self._pool_shape(1)).numel() * self._kv_dtype.itemsize
        if self._proposer is not None:
            block_bytes += self._proposer.block_bytes
        num_blocks = num_blocks_that_fit(
            self.config,
            self.device,
            block_bytes=block_bytes,
            max_blocks=blocks_per_sequence * self.config.max_num_seqs,
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
    def allocate(self, info: CacheInfo) -> CacheInfo:
        """Allocate the KV pool and the tables, then capture or record the model.

        Returns `info`; with speculation, with the measured costs of steps.
        """
        self._pool, tables = self._make_pool_and_tables(info)
        self._tables = tables
        if self._uses_graphs:
            self._graphs = self._make_graph_runner(tables)
            self._graphs.capture(graph_sizes(self._max_rows), progress=tensor_parallel().rank == 0)
        elif self._backend.supports_recording and not self.config.enforce_eager:
            self._recorded = record(self.model, tables)
        if self._proposer is None:
            return info
        self._proposer.allocate(tables, info.num_blocks)
        return self._with_costs(info, tables, self._proposer)

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> PendingResult:
        """Launch a step. Steps run in the order in which they are launched."""
        assert self._pool is not None, "allocate() comes first"
        assert self._tables is not None
        self._tables.apply(schedule)
        self._zero_blocks(self._pool, schedule.blocks_to_zero)
        if self._proposer is None:
            output = self._run_rows(self._tables, schedule.rows)
            return PendingResult(Step(schedule.step_id, schedule.rows), output)
        start = time.perf_counter()
        self._proposer.admit(schedule)
        rows = self._propose(self._proposer, schedule.rows)
        proposed = time.perf_counter()
        output = self._run_rows(self._tables, rows)
        num_draft_tokens = [row.num_draft_tokens for row in rows if row.samples]
        seconds = time.perf_counter() - proposed
        step = Step(schedule.step_id, rows, num_draft_tokens, seconds, proposed - start)
        return PendingResult(step, output)

    def _propose(self, proposer: Proposer, rows: list[Row]) -> list[Row]:
        """Let `proposer` write drafts; return `rows` with as many as there are."""
        drafting = [row for row in rows if row.num_draft_tokens]
        if not drafting:
            return rows
        counts = iter(proposer.propose(drafting))
        return [
            row._replace(num_scheduled_tokens=1 + count, num_draft_tokens=count)
            if row.num_draft_tokens and (count := next(counts)) < row.num_draft_tokens
            else row
            for row in rows
        ]

    def _with_costs(self, info: CacheInfo, tables: DeviceTables, proposer: Proposer) -> CacheInfo:
        """Return `info` with the measured costs of steps and of proposing.

        The steps write to blocks and table rows that nobody owns yet.
        """

        def step(num_tokens: int) -> None:
            self._run_rows(tables, [Row(0, 0, 0, num_tokens, True, num_tokens - 1)])

        def draft(num_rows: int) -> None:
            proposer.propose([Row(i, i, 1, 2, True, 1) for i in range(num_rows)])

        most = min(info.max_num_batched_tokens, info.max_model_len)
        step_sizes = [size for size in STEP_SIZES if size <= most]
        draft_sizes = [size for size in DRAFT_SIZES if size <= self.config.max_num_seqs]
        return dataclasses.replace(
            info,
            step_seconds=measure_seconds(step, step_sizes, self.device),
            draft_seconds=measure_seconds(draft, draft_sizes, self.device),
        )

    def _run_rows(self, tables: DeviceTables, rows: list[Row]) -> StepOutput:
        """Compute `rows` and choose a token for each row that samples."""
        if self._graphs is not None and self._graphs.fits(rows):
            tokens, graph_logits = self._graphs.run(rows)
            if all(tables.plain[row.table_idx] for row in rows):
                return StepOutput(tokens, None, [])
            sampling = SamplingRows(tables, rows)
            return StepOutput(*self._sample(sampling, graph_logits), [], sampling.errors)
        sampling = SamplingRows(tables, rows)
        hidden = self._forward(tables, rows, sampling)
        prompt_logprobs = self._prompt_logprobs(tables, rows, hidden)
        logits = None
        if len(sampling):
            # As many hidden states as samples: then these are the rows' last tokens.
            last = hidden if len(hidden) == len(sampling) else hidden[sampling.last_tokens]
            logits = self.model.compute_logits(last)  # type: ignore[operator]
        tokens, logprobs = self._sample(sampling, logits)
        return StepOutput(tokens, logprobs, prompt_logprobs, sampling.errors, sampling.draft_ids)

    def _forward(
        self, tables: DeviceTables, rows: list[Row], sampling: SamplingRows
    ) -> torch.Tensor:
        """Return hidden states [T, hidden_size] of all tokens of `rows`.

        If no row has prompt_logprobs, it may return fewer: those of `sampling.last_tokens`, or one
        of any token if no row samples.
        """
        if self._recorded is not None and self._recorded.fits(rows):
            return self._recorded.run(rows)
        batch, output_indices = tables.batch(rows), None
        if len(sampling) < len(batch.input_ids) and all(
            tables.params[row.table_idx].prompt_logprobs is None for row in rows
        ):
            # A chunk in mid-prompt needs no output; keep one token, because kernels must not see
            # an empty batch.
            output_indices = sampling.last_tokens if len(sampling) else batch.cu_seqlens_q[:1]
        metadata = self._backend.plan(batch)
        hidden: torch.Tensor = self.model(
            dataclasses.replace(batch, output_indices=output_indices, metadata=metadata)
        )
        return hidden

    def _sample(
        self, sampling: SamplingRows, logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, SampledLogprobs | None]:
        """Choose and store the rows' tokens; return them and the requested log-probabilities."""
        logprobs = None
        if logits is None:  # no row samples, or this is not rank 0
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
        """Return log-probabilities of prompt tokens, for the rows whose request wants them.

        The hidden state of one token gives the log-probabilities of the next. A row with
        prompt_logprobs needs `hidden` of all tokens of the batch.
        """
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

    @property
    def _max_rows(self) -> int:
        return min(self.config.max_num_seqs, self._max_num_batched_tokens)

    def _pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (len(self._attentions), *self._backend.kv_cache_shape(num_blocks))

    def _make_pool_and_tables(self, info: CacheInfo) -> tuple[torch.Tensor, DeviceTables]:
        """Bind a new KV pool to the attention layers; return it, and new tables.

        With graphs the pool has one more block, for the rows that pad a batch: they write and see
        its first slot only. The pool is zeroed: masked keys must be finite, as in
        `Schedule.blocks_to_zero`.
        """
        shape = self._pool_shape(info.num_blocks + self._uses_graphs)
        pool = zeros(shape, self._kv_dtype, self.device)
        for attention, kv_cache in zip(self._attentions, pool, strict=True):
            attention.bind(self._backend, kv_cache)
        native = self.config.native_kernels
        return pool, DeviceTables(info, self.config.max_num_seqs, self.device, native=native)

    def _zero_blocks(self, pool: torch.Tensor, blocks: list[int]) -> None:
        if blocks and pool.is_cuda:  # one kernel; torch has none for FP8, so fill bytes
            assert self._tables is not None
            pool.view(torch.uint8).index_fill_(2, self._tables.upload(blocks), 0)
        elif blocks:
            with torch_on_one_thread():
                for block in blocks:
                    pool[:, :, block].zero_()

    def _make_graph_runner(self, tables: DeviceTables) -> GraphRunner:
        capture = make_capture(self.device)
        return GraphRunner(self.model, self._backend, tables, self._max_rows, capture)

    def _warm_up(self) -> int:
        """Reach the peak of memory: run the longest prefill and the most samples on a small pool.

        Returns the bytes that CUDA graphs will take in addition.
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
        _, tables = self._make_pool_and_tables(info)
        tables.block_tables[:num_seqs, :num_blocks] = torch.arange(num_blocks, device=self.device)
        tables.params = [SamplingParams(temperature=1.0)] * num_seqs
        self._run_rows(tables, [Row(i, i, 0, length, samples=True) for i in range(count)])
        drafts = 0
        if self._proposer is not None:
            drafts = min(MAX_SAMPLES, max_tokens, length * num_seqs) // num_seqs
            drafts = max(0, drafts - 1)
        rows = [Row(i, i, 0, 1 + drafts, True, drafts) for i in range(num_seqs)]
        self._run_rows(tables, rows)
        num_bytes = 0
        if self._uses_graphs:
            graphs = self._make_graph_runner(tables)
            num_bytes = graph_bytes(
                graph_sizes(self._max_rows), lambda size: graphs.capture([size]), self.device
            )
        for attention in self._attentions:
            del attention.kv_cache
        return num_bytes
