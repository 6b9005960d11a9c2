"""Runs the model on one rank: build, measure, allocate, then execute schedules.

Knows no queue and no text, and no other rank except through the layers' collectives.
"""

import dataclasses
import logging
from collections import deque
from functools import partial
from itertools import chain

import torch

from nanovllm.kernels.selector import require_triton
from nanovllm.layers.logits_rules import LogitsRules
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.scheduler.messages import MAX_SAMPLES, Row, Schedule, WorkerInfo
from nanovllm.speculation.proposers.proposer import Proposer
from nanovllm.speculation.proposers.registry import make_proposer
from nanovllm.steps.cuda_graph import LAPS, GraphRunner, graph_sizes
from nanovllm.steps.piecewise_graphs import piece_sizes
from nanovllm.utils.distributed import broadcast_from_first, tensor_parallel
from nanovllm.utils.memory import keep_freed
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.extensions import LogitMasks
from nanovllm.worker.kv_cache import graph_bytes, num_blocks_that_fit
from nanovllm.worker.network import Network, NetworkSpec
from nanovllm.worker.sampling_rows import SampledLogprobs, SamplingRows, gather_logprobs
from nanovllm.worker.step_output import PendingResult, PromptLogprobs, Step, StepOutput, StepTimer
from nanovllm.worker.timing import DRAFT_SIZES, STEP_SIZES, measure_seconds
from nanovllm.worker.warm_up import emptying_step, warm_up_steps

logger = logging.getLogger(__name__)

_PASSES = 4
"""Drafts that are proposed to measure what a further one costs."""
_LOGPROB_ROWS = 256
"""Prompt positions whose logits are in memory at the same time."""


class ModelRunner:
    """The model, its KV cache and the device tables of one rank.

    Args:
        draft: the draft network, if speculation has one.

    Raises:
        ConfigError: the options name a GPU, and its kernels need a tool that is not installed.
    """

    def __init__(
        self, target: NetworkSpec, device: torch.device, draft: NetworkSpec | None = None
    ) -> None:
        config = self.config = target.config
        self.device = device
        if config.native_kernels and device.type == "cuda" and config.device != "auto":
            require_triton(config.device)
        max_position = target.model_config.max_position
        self.max_model_len = min(config.max_model_len, max_position)
        if self.max_model_len < config.max_model_len and tensor_parallel().rank == 0:
            logger.warning(
                "max_model_len cut from %d to %d, the positions that the model was made for",
                config.max_model_len,
                self.max_model_len,
            )
        # Larger steps take more memory; on a CPU they do not make a token cheaper.
        default_num_tokens = 1024 if device.type == "cpu" else 16384
        self._max_num_batched_tokens = config.max_num_batched_tokens or default_num_tokens
        self.network = Network(target, self.max_model_len, device)
        self._proposer: Proposer | None = None
        spec = config.speculation
        if spec is not None:
            self._proposer = make_proposer(spec, self.network, draft, self._max_num_batched_tokens)
        if device.type == "cpu":
            keep_freed()  # each step reuses the memory that the last one freed
        self.masks: LogitMasks | None = None
        self._tables: DeviceTables | None = None
        self._graphs: GraphRunner | None = None
        self._launched: deque[PendingResult] = deque()  # the last LAPS steps at most

    @torch.inference_mode()
    def measure(self) -> WorkerInfo:
        """Return what this rank can hold. Allocates nothing that stays."""
        block_size = self.network.backend.block_size
        blocks_per_sequence = -(-self.max_model_len // block_size)
        block_bytes = self.network.block_bytes
        if self._proposer is not None:
            block_bytes += self._proposer.block_bytes
        num_blocks = num_blocks_that_fit(
            self.config,
            self.device,
            block_bytes=block_bytes,
            max_blocks=blocks_per_sequence * self.config.max_num_seqs,
            num_reserved=int(self.network.uses_graphs),
            warm_up=self._warm_up,
        )
        return WorkerInfo(
            num_blocks,
            block_size,
            self.max_model_len,
            self.network.model_config.vocab_size,
            self._max_num_batched_tokens,
            runs_ahead=self.device.type == "cuda",
        )

    @torch.inference_mode()
    def allocate(self, info: WorkerInfo) -> WorkerInfo:
        """Allocate the KV pool and the tables, then capture or record the model.

        Returns `info`; with speculation, with the measured costs of steps.
        """
        tables = self._tables = self._make_pool_and_tables(info)
        if self._proposer is not None:
            self._proposer.allocate(tables, info.num_blocks)
        if self.device.type == "cuda":
            self.warm_up_kernels(info, tables)
        if self.network.uses_graphs:
            graphs = self._graphs = self._make_graphs(tables)
            progress = tensor_parallel().rank == 0
            graphs.capture(graph_sizes(graphs.max_tokens), progress=progress)
            self.network.capture_pieces(tables, self._max_num_batched_tokens, progress=progress)
        else:
            self.network.record(tables)
        if self._proposer is None:
            return info
        info = dataclasses.replace(info, follows_drafts=self._follows_drafts)
        return self._with_costs(info, tables, self._proposer)

    def warm_up_kernels(self, info: WorkerInfo, tables: DeviceTables) -> None:
        """Run steps like those of requests, for which kernels compile; leave nothing of them."""
        spec = self.config.speculation
        for schedule in warm_up_steps(info, 0 if spec is None else spec.max_draft_tokens):
            self.execute(schedule).result()
        tables.apply(emptying_step(info))
        self.network.zero_blocks([0], tables)

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> PendingResult:
        """Launch a step. Steps run in the order in which they are launched."""
        if len(self._launched) == LAPS:  # this step may write to where its tokens are
            self._launched.popleft().keep()
        pending = self._execute(schedule)
        self._launched.append(pending)
        return pending

    def _execute(self, schedule: Schedule) -> PendingResult:
        assert self._tables is not None, "allocate() comes first"
        self._tables.apply(schedule)
        if self.masks is not None:
            self.masks.admit(schedule.admissions)
        self.network.zero_blocks(schedule.blocks_to_zero, self._tables)
        added = [new.block_ids for new in schedule.admissions]
        added += [new.block_ids for new in schedule.new_blocks]
        if added:
            self.network.populate_beyond(max(chain.from_iterable(added)))
        if self._proposer is not None:
            self._proposer.admit(schedule)
        if self._proposer is None or not schedule.may_draft:
            output = self._run_rows(self._tables, schedule.rows)
            return PendingResult(Step(schedule.step_id, schedule.rows), output)
        timer = StepTimer(self.device)
        rows = self._propose(self._proposer, schedule.rows)
        timer.mark()
        output = self._run_rows(self._tables, rows)
        timer.mark()
        return PendingResult(Step(schedule.step_id, rows, timer), output)

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

    def _with_costs(self, info: WorkerInfo, tables: DeviceTables, proposer: Proposer) -> WorkerInfo:
        """Return `info` with the measured costs of steps and of proposing.

        The steps write to blocks and table rows that nobody owns yet. They are greedy: what
        sampling adds is learned from the steps of requests.
        """
        tables.params[0] = SamplingParams(temperature=0.0)  # until a request owns the table row

        def step(num_tokens: int) -> None:
            self._run_rows(tables, [Row(0, 0, 0, num_tokens, True, num_tokens - 1)])

        def draft(num_rows: int, num_drafts: int = 1) -> None:
            rows = [Row(i, i, 1, 1 + num_drafts, True, num_drafts) for i in range(num_rows)]
            proposer.propose(rows)

        most = min(info.max_num_batched_tokens, info.max_model_len)
        step_sizes = [size for size in STEP_SIZES if size <= most]
        draft_sizes = [size for size in DRAFT_SIZES if size <= self.config.max_num_seqs]
        draft_seconds: tuple[tuple[int, float, float], ...] = ()
        if proposer.block_bytes and most > _PASSES:  # a network; other proposers cost nothing
            once = measure_seconds(draft, draft_sizes, self.device)
            often = measure_seconds(partial(draft, num_drafts=_PASSES), draft_sizes, self.device)
            draft_seconds = tuple(
                (size, first, max(total - first, 0.0) / (_PASSES - 1))
                for (size, first), (_, total) in zip(once, often, strict=True)
            )
        step_seconds = measure_seconds(step, step_sizes, self.device)
        return dataclasses.replace(info, step_seconds=step_seconds, draft_seconds=draft_seconds)

    def _run_rows(self, tables: DeviceTables, rows: list[Row]) -> StepOutput:
        """Compute `rows` and choose a token for each row that samples."""
        masks = None if self.masks is None else self.masks.begin(tables, rows)
        forcing = {} if masks is None else masks.forcing
        if self._graphs is not None and self._graphs.fits(rows):
            tokens, graph_logits, draft_ids = self._graphs.run(rows)
            if all(tables.plain[row.table_idx] for row in rows):
                on_host = tokens.device.type != self.device.type
                return StepOutput(tokens, None, [], draft_ids=draft_ids, on_host=on_host)
            sampling = SamplingRows(tables, rows, masks=masks, draft_ids=draft_ids)
            sampled = self._sample(sampling, graph_logits)
            return StepOutput(*sampled, [], sampling.errors, draft_ids, forcing)
        assert not (self._follows_drafts and any(row.num_unverified_tokens for row in rows))
        sampling = SamplingRows(tables, rows, masks=masks)
        needs_all = any(tables.params[r.table_idx].prompt_logprobs is not None for r in rows)
        hidden = self.network.forward(tables, rows, None if needs_all else sampling.last_tokens)
        prompt_logprobs = self._prompt_logprobs(tables, rows, hidden)
        logits = None
        if len(sampling):
            logits = self.network.logits(hidden, sampling.last_tokens)
        tokens, logprobs = self._sample(sampling, logits)
        return StepOutput(
            tokens, logprobs, prompt_logprobs, sampling.errors, sampling.draft_ids, forcing
        )

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
            if self._follows_drafts:
                sampling.accept(token_ids)
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
                    logits = self.network.model.compute_logits(states)  # type: ignore[operator]
                    if logits is not None:
                        tokens = tables.token_ids[row.table_idx, start:end].long()
                        gathered = gather_logprobs(logits, tokens, count)
                        found.append(PromptLogprobs(row.seq_id, start, count, gathered))
            offset += row.num_scheduled_tokens
        return found

    @property
    def _follows_drafts(self) -> bool:
        """Whether the device counts accepted drafts, so that rows may follow drafts in flight."""
        proposer = self._proposer
        return proposer is not None and proposer.follows_drafts and self.network.uses_graphs

    def _make_graphs(self, tables: DeviceTables) -> GraphRunner:
        accepts = self._follows_drafts
        return self.network.make_graphs(tables, self._max_graph_tokens, accepts=accepts)

    @property
    def _max_graph_tokens(self) -> int:
        """The most tokens of a step that decodes, and verifies drafts with speculation."""
        num_tokens, spec = self.config.max_num_seqs, self.config.speculation
        if spec is not None:
            verified = num_tokens * (1 + spec.max_draft_tokens)
            num_tokens = max(num_tokens, min(verified, MAX_SAMPLES))
        return min(num_tokens, self._max_num_batched_tokens)

    def _make_pool_and_tables(self, info: WorkerInfo) -> DeviceTables:
        """Make the KV pool; return new tables."""
        self.network.make_pool(info.num_blocks)
        native = self.config.native_kernels
        return DeviceTables(info, self.config.max_num_seqs, self.device, native=native)

    def _warm_up(self) -> int:
        """Reach the peak of memory: run the longest prefill and the most samples on a small pool.

        Returns the bytes that CUDA graphs will take in addition.
        """
        max_tokens = self._max_num_batched_tokens
        length = min(self.max_model_len, max_tokens)
        count = max(1, min(max_tokens // length, self.config.max_num_seqs))
        block_size = self.network.backend.block_size
        num_blocks = -(-length // block_size)
        info = WorkerInfo(
            num_blocks,
            block_size,
            self.max_model_len,
            self.network.model_config.vocab_size,
            max_tokens,
        )
        num_seqs = self.config.max_num_seqs
        tables = self._make_pool_and_tables(info)
        tables.block_tables[:num_seqs, :num_blocks] = torch.arange(num_blocks, device=self.device)
        ruled = SamplingParams(temperature=1.0, logit_bias=((0, 1.0),))
        tables.params = [ruled] * num_seqs
        # With rules in one row, all rows' logits are copied to float32.
        tables.rules[0] = LogitsRules(ruled, 0, (), frozenset(), self.device)
        prompts = [Row(i, i, 0, length, samples=True) for i in range(count)]
        self._run_rows(tables, prompts)
        drafts = 0
        if self._proposer is not None:
            drafts = min(MAX_SAMPLES, max_tokens, length * num_seqs) // num_seqs
            drafts = max(0, drafts - 1)
        rows = [Row(i, i, 0, 1 + drafts, True, drafts) for i in range(num_seqs)]
        self._run_rows(tables, rows)
        num_bytes = self._graph_bytes(tables) if self.network.uses_graphs else 0
        self.network.free_pool()
        if self._proposer is not None:
            num_bytes += self._proposer.warm_up(tables, num_blocks, prompts)
        return num_bytes

    def _graph_bytes(self, tables: DeviceTables) -> int:
        graphs = self._make_graphs(tables)
        sizes = graph_sizes(graphs.max_tokens)
        num_bytes = graph_bytes(sizes, lambda size: graphs.capture([size]), self.device)
        pieces, sizes = self.network.make_pieces(), piece_sizes(self._max_num_batched_tokens)
        return num_bytes + graph_bytes(sizes, lambda size: pieces.capture([size]), self.device)
