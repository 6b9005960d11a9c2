"""Runs the model on one rank: builds it, allocates the KV pool and executes schedules.

Ranks meet only in the layers' collectives.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence as Seq
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from nanovllm.core.messages import Row, Schedule
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.errors import ConfigError, OutOfMemoryError, refuses_memory
from nanovllm.options.plugins import in_worker
from nanovllm.platform import Platform
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.hooks import (
    LAPS,
    RowNeeds,
    SamplingWatch,
    StepRunner,
    StepTensors,
    WorkerHook,
)
from nanovllm.worker.model_loader import NetworkSpec, num_positions
from nanovllm.worker.network import Network
from nanovllm.worker.step_output import PendingResult, StepOutput
from nanovllm.worker.step_sampler import StepSampler

if TYPE_CHECKING:
    from nanovllm.features.graphs.step_runners import StepRunners
    from nanovllm.features.speculation.proposers.proposer import Proposer
    from nanovllm.features.structured.grammar_masks import GrammarMasks
    from nanovllm.features.training.rank_weights import RankWeights
    from nanovllm.layers.logits_rules import LogitsRule


class ModelRunner:
    """The model, its KV cache and the device tables of one rank.

    Args:
        make_steps, make_drafter: called with the network and the most tokens of a step. Without
            them, all steps run layer by layer, and none has drafts.
        make_parts: called with the network when an admission first has extras of that name. What
            they return joins `parts`.

    Attributes:
        parts: what features add, such as adapters and tiers.
        masks: of the requests' grammars; None before the first one.
        weights: what sleeps, wakes up and changes; None before it is first asked for.
        watch: is told what sampling does to logits; None: nobody is.

    Raises:
        ConfigError: the options name a GPU, and its kernels do not run.
    """

    tables: DeviceTables  # between `allocate` and `free`

    def __init__(
        self,
        target: NetworkSpec,
        platform: Platform,
        *,
        make_steps: "Callable[[Network, int], StepRunners] | None" = None,
        make_drafter: "Callable[[Network, int], Proposer] | None" = None,
        make_parts: Mapping[str, Callable[[Network], WorkerHook]] = MappingProxyType({}),
    ) -> None:
        config = self.config = target.config
        self.platform = platform
        self.device = platform.device
        self.max_model_len = num_positions(target)
        network = self.network = Network(target, self.max_model_len, platform)
        if not network.attention.causal and (config.has_tiers or config.speculation):
            raise ConfigError(
                "this model computes each prompt whole and generates nothing, so it has no use for "
                "drafts and tiers: leave out speculative_config, kv_offload_gib, kv_cache_dir and "
                "kv_store"
            )
        budget = config.max_num_batched_tokens or platform.default_num_batched_tokens
        self.max_num_batched_tokens = budget + network.attention.max_extra_tokens
        self.steps = make_steps and make_steps(network, self.max_num_batched_tokens)
        self.uses_graphs = self.steps is not None and self.steps.uses_graphs
        self.num_padding_blocks = int(self.uses_graphs)  # for the tokens that pad a graph's step
        self.drafter = make_drafter and make_drafter(network, self.max_num_batched_tokens)
        self.parts: list[WorkerHook] = []
        self.masks: GrammarMasks | None = None
        self._user_rules: dict[str, type[LogitsRule]] = {}
        if config.logits_rules:
            from nanovllm.layers.logits_rules import load_rules

            self._user_rules = load_rules(config.logits_rules)
        self._make_parts = dict(make_parts)
        self.weights: RankWeights | None = None
        self.watch: SamplingWatch | None = None
        self.step_runners: list[StepRunner] = []
        self._launched: deque[PendingResult] = deque()  # the last LAPS steps at most

    def allocate(self, info: WorkerInfo) -> DeviceTables:
        """Make the KV pool and new tables, in place of any others; return the tables."""
        self.network.make_pool(info.num_blocks + self.num_padding_blocks)
        self.tables = DeviceTables(
            info, self.config.max_num_seqs, self.platform, self.network.kernels, self._user_rules
        )
        return self.tables

    def free(self) -> None:
        """Free the KV pool and the tables."""
        for part in self.parts:
            part.free()
        self.network.free_pool()
        del self.tables

    def give_back(self) -> None:
        """Give the memory of the parts to the system; later requests fill it again."""
        for part in self.parts:
            part.give_back()

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> PendingResult:
        """Launch a step. Steps run in the order in which they are launched.

        Raises:
            OutOfMemoryError: the system refuses memory that the step needs. Later steps work.
            PluginError: a class of the user's fails.
        """
        if len(self._launched) == LAPS:
            # A step runner may write this step's tokens over those of the step LAPS steps ago.
            self._launched.popleft().keep()
        try:
            for new in schedule.admissions:
                for name in self._make_parts.keys() & (new.extras or {}).keys():
                    self.parts.append(self._make_parts.pop(name)(self.network))
            for part in self.parts:
                part.begin(schedule)
            if self.network.user_parts is None:
                pending = self._execute(schedule)
            else:
                pending = in_worker(self.network.user_parts, "a step", self._execute, schedule)
            for part in self.parts:
                part.end(schedule, pending)
        except (MemoryError, OSError, RuntimeError) as error:
            if isinstance(error, OutOfMemoryError) or not refuses_memory(error):
                raise
            raise OutOfMemoryError(
                f"the system refuses memory that a step needs ({error}): free memory, or lower "
                "max_num_batched_tokens"
            ) from error
        self._launched.append(pending)
        return pending

    def _execute(self, schedule: Schedule) -> PendingResult:
        self.tables.apply(schedule)
        if self.masks is not None:
            self.masks.admit(schedule.admissions)
        pool = self.network.pool
        for copy in schedule.copies:
            pool.copy(*copy)
        # Most backends mask loads, and never read what a row has not written.
        if schedule.blocks_to_zero and (self.drafter or self.network.attention.reads_past_rows):
            pool.zero(schedule.blocks_to_zero)
        added = [new.block_ids for new in schedule.admissions]
        added += [new.block_ids for new in schedule.new_blocks]
        if added:
            pool.populate_beyond(max(chain.from_iterable(added)))
        if self.drafter is not None:
            self.drafter.admit(schedule)
        if self.drafter is None or not schedule.may_draft:
            output = self.run_rows(schedule.rows)
            return PendingResult(schedule.step_id, schedule.rows, output, self.platform)
        from nanovllm.worker.timing import StepTimer

        timer = StepTimer(self.platform)
        rows = self.drafter.draft(schedule.rows)
        timer.mark()
        output = self.run_rows(rows)
        timer.mark()
        return PendingResult(schedule.step_id, rows, output, self.platform, timer)

    def run_rows(self, rows: list[Row]) -> StepOutput:
        """Compute `rows` and choose a token for each row that samples.

        Without step runners, masks and drafts: `network.forward` gives hidden states,
        `network.logits` the logits, `StepSampler.finish` the tokens, which rank 0 sends to the
        others and each writes to its tables, where the next step finds its input.
        """
        if not rows:  # such a step only moves pages
            return StepOutput(torch.empty(0, dtype=torch.int64))
        needs = [need for part in self.parts if (need := part.begin_rows(rows)) is not None]
        masks = None if self.masks is None else self.masks.begin(self.tables, rows)
        by_layer = any(need.by_layer or need.embeds or need.rope for need in needs)
        tensors = StepTensors() if by_layer else self._run_fast(rows)
        tokens, draft_ids = tensors.tokens, tensors.draft_ids
        plain = self.tables.plain
        if tokens is not None and self.watch is None and all(plain[row.table_idx] for row in rows):
            on_host = tokens.device != self.device
            return StepOutput(tokens, draft_ids=draft_ids, on_host=on_host)
        sampling = StepSampler(
            self.tables, rows, masks=masks, draft_ids=draft_ids, watch=self.watch
        )
        if tokens is None:
            tensors = self.compute(rows, sampling, needs, tensors.hidden)
        return sampling.finish(
            tensors,
            rows,
            self.network.model,
            mode=self.config.logprobs_mode,
            accepts=self.follows_drafts,
        )

    def compute(
        self,
        rows: list[Row],
        sampling: StepSampler,
        needs: Seq[RowNeeds] = (),
        hidden: torch.Tensor | None = None,
    ) -> StepTensors:
        """Compute the T tokens of `rows`, and let the parts read what they need of it. Return the
        logits of the samples, and the hidden states of all T tokens or only theirs.

        Args:
            hidden: [T, hidden_size], if a step runner has computed them; None: none has.
        """
        assert not (self.follows_drafts and any(row.num_unverified_tokens for row in rows))
        lists = [need.indices for need in needs]
        wanted: Seq[int] = sampling.indices
        if hidden is not None or None in lists or self.tables.want_prompt_logprobs(rows):
            wanted = range(sum(row.num_scheduled_tokens for row in rows))
        elif needs:
            wanted = sorted({*wanted, *chain.from_iterable(filter(None, lists))})
        if hidden is None:
            indices = None
            if not isinstance(wanted, range):
                indices = self.platform.upload(wanted) if needs else sampling.output_indices
            embeds = tuple(need.embeds for need in needs if need.embeds is not None)
            rope = tuple(need.rope for need in needs if need.rope is not None)
            ends = tuple(need.ends for need in needs if need.ends is not None)
            hidden = self.network.forward(self.tables, rows, indices, embeds, rope, ends)
        place = {index: i for i, index in enumerate(wanted)} if needs else {}
        for need in needs:
            if need.read is not None:
                need.read(self._states_of(need.indices, hidden, place))
        if needs and not isinstance(wanted, range):
            hidden = self._states_of(sampling.indices, hidden, place)
        logits = self.network.logits(hidden, sampling.output_indices) if len(sampling) else None
        return StepTensors(hidden, logits=logits)

    def _states_of(
        self, indices: Seq[int] | None, hidden: torch.Tensor, place: Mapping[int, int]
    ) -> torch.Tensor:
        """Return the hidden states of the tokens at `indices`, None: all. `place` is their place in
        `hidden`, by index.
        """
        if indices is None or len(indices) == len(place):
            return hidden
        return hidden[self.platform.upload([place[index] for index in indices])]

    def _run_fast(self, rows: list[Row]) -> StepTensors:
        """Return what the first step runner that fits computes: nothing without one."""
        for runner in self.step_runners:
            if not runner.follows_drafts and any(row.num_unverified_tokens for row in rows):
                continue
            if runner.fits(rows):
                return runner.run(rows)
        return StepTensors()

    @property
    def follows_drafts(self) -> bool:
        """Whether the device counts accepted drafts, so that rows may follow drafts in flight."""
        drafter = self.drafter
        return drafter is not None and drafter.follows_drafts and self.uses_graphs
