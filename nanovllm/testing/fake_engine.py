"""The engine's loop with a fake worker, and an oracle that knows each request's tokens.

Each new token of the fake model depends on all tokens before it. So a request's tokens are right
only if the scheduler kept every block, position and table row right. What is wrong is an
AssertionError. Imports no torch.
"""

import math
import pickle
import random
from array import array
from collections.abc import Callable, Iterator, Sequence as Seq
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, Any

from nanovllm.core.messages import (
    MAX_SAMPLES,
    FinishInfo,
    PageCopy,
    Row,
    RowDetails,
    Schedule,
    StepResult,
)
from nanovllm.core.sequence import Sequence
from nanovllm.core.worker_info import WindowSpec, num_tables
from nanovllm.kv.block_manager import BlockManager
from nanovllm.kv.eviction import EvictionOrder
from nanovllm.kv.groups.group import KVCacheGroup
from nanovllm.kv.groups.state import ROOM_TO_GROW, StateGroup
from nanovllm.kv.groups.window import WindowGroup
from nanovllm.kv.trie import Node
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import DraftCounts
from nanovllm.scheduler.admission_hook import AdmissionHook
from nanovllm.scheduler.policy import Policy
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.scheduler.step_loop import StepLoop
from nanovllm.testing.invariants import check_blocks, check_scheduler

if TYPE_CHECKING:
    from nanovllm.features.speculation.draft_controller import Acceptance, DraftController
    from nanovllm.features.speculation.drafting import AdaptiveDrafting

VOCAB_SIZE = 5

UNWRITTEN = -1
ZERO = 0


def fold(prefix_hash: int, token: int) -> int:
    """Return the hash of a prefix and one more token. It stands for the KV of that token."""
    return hash((prefix_hash, token))


def prefix_hashes(token_ids: list[int], start: int = 0) -> list[int]:
    """Return the hash of each non-empty prefix, behind what `start` stands for."""
    hashes, last = [], start
    for token in token_ids:
        last = fold(last, token)
        hashes.append(last)
    return hashes


def next_token(prefix_hash: int) -> int:
    """Return the fake model's next token, a function of all tokens before it."""
    return (prefix_hash >> 8) % VOCAB_SIZE


def continuation(token_ids: list[int], start: int = 0) -> Iterator[int]:
    """Yield the tokens that the fake model generates after `token_ids`, without end."""
    prefix_hash = prefix_hashes(token_ids, start)[-1]
    while True:
        token = next_token(prefix_hash)
        yield token
        prefix_hash = fold(prefix_hash, token)


def oracle(
    prompt: list[int],
    params: SamplingParams,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    start: int = 0,
) -> tuple[list[int], str]:
    """Return (output tokens, finish reason) of a request: what a scheduler must produce."""
    output: list[int] = []
    for token in continuation(prompt, start):
        output.append(token)
        if token in eos_token_ids and not params.ignore_eos:
            return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, "length"
    raise AssertionError("unreachable")


def output_of(seq: Sequence) -> list[int]:
    """Return the tokens that were generated for a sequence."""
    return seq.token_ids[seq.num_prompt_tokens :]


Proposer = Callable[[list[int]], list[int]]
"""Takes all tokens of a sequence; returns draft tokens. The worker takes as many as it may."""


def random_guesses(seed: int) -> Proposer:
    """Return a proposer of 0 to 8 draft tokens, most of them right."""
    rng = random.Random(seed)

    def propose(token_ids: list[int]) -> list[int]:
        right = islice(continuation(token_ids), rng.randrange(9))
        return [t if rng.random() < 0.85 else rng.randrange(VOCAB_SIZE) for t in right]

    return propose


class FakeWorker:
    """Device tables and a KV cache, as the real worker has them. It knows only the schedules.

    A table row has the block tables of all groups, one after the other. Each token's KV is written
    to each of them; a window group's layers read only their window. Behind the block tables are the
    pages of the state. What stands for a state is in these pages and nowhere else.

    Old contents stay in place until something overwrites them. While `is_broken`, every step
    writes garbage and fails. A sequence in `fails_from` gets an error at that position and behind.
    One whose parameters force tokens gets 0 to 3 of them behind each sampled token.
    """

    def __init__(
        self,
        num_table_rows: int,
        max_model_len: int,
        block_size: int,
        propose: Proposer,
        windows: tuple[WindowSpec, ...] = (),
        state_pages: int = 0,
    ) -> None:
        self.block_size = block_size
        self.propose = propose
        self.width = -(-max_model_len // block_size)
        # By block table: how many tokens a token sees, itself included.
        self.windows = [max_model_len, *(w for w, pages in windows for _ in range(pages))]
        self.token_ids = [[UNWRITTEN] * (max_model_len + 1) for _ in range(num_table_rows)]
        self.block_tables = [
            [UNWRITTEN] * (self.width * len(self.windows) + state_pages)
            for _ in range(num_table_rows)
        ]
        self.states: dict[int, int] = {}  # page -> what `state_value` returned; ZERO if zeroed
        # How many tokens the states stand for; UNWRITTEN: those before the sequence's first row.
        self.state_positions = [0] * num_table_rows
        self.last_positions = [UNWRITTEN] * num_table_rows  # of the last step that sampled
        self.rows: list[Row] = []  # of the last step, at their true positions
        self.kv: dict[tuple[int, int], int] = {}  # (block, offset) -> what `value` returned
        self.writers: dict[tuple[int, int], int] = {}  # (block, offset) -> sequence; none if zero
        self.is_broken = False
        self.fails_from: dict[int, int] = {}
        self.forces = [False] * num_table_rows

    def execute(self, schedule: Schedule) -> StepResult | None:
        """Run a step. Return its result, or None if it failed."""
        for new in schedule.admissions:
            self._store(self.token_ids[new.table_idx], 0, new.token_ids)
            self._store(self.block_tables[new.table_idx], 0, new.block_ids)
            self.forces[new.table_idx] = new.params.can_jump_forward
            self.state_positions[new.table_idx] = UNWRITTEN
        for forced in schedule.new_tokens:
            self._store(self.token_ids[forced.table_idx], forced.start, forced.token_ids)
        for blocks in schedule.new_blocks:
            self._store(self.block_tables[blocks.table_idx], blocks.start, blocks.block_ids)
        for copy in schedule.copies:
            self._copy(copy)
        for block_id in schedule.blocks_to_zero:
            self.states[block_id] = ZERO
            for offset in range(self.block_size):
                self.kv.pop((block_id, offset), None)
                self.writers.pop((block_id, offset), None)
        result = StepResult(schedule.step_id, [], seconds=0.01, draft_seconds=0.001)
        self.rows = [self._placed(row) for row in schedule.rows]
        for row in map(self._with_drafts, self.rows):
            if self.is_broken:
                self._write_garbage(row)
            else:
                self._compute(row, result)
        return None if self.is_broken else result

    def start_of(self, table_idx: int) -> int:
        """Return what a table row's tokens come behind: see `prefix_hashes`."""
        return 0

    def location(self, row: Row, position: int, table: int = 0) -> tuple[int, int]:
        """Return the (block, offset) of a position in a block table."""
        index = table * self.width + position // self.block_size
        return self.block_tables[row.table_idx][index], position % self.block_size

    def value(self, prefix_hash: int, table: int) -> int:
        """Return what stands for the KV of a prefix's last token in the layers of a table."""
        return hash((prefix_hash, table))

    def state_pages(self, row: Row) -> list[int]:
        """Return the pages of a row's state."""
        return self.block_tables[row.table_idx][self.width * len(self.windows) :]

    def state_values(self, prefix_hash: int, num_pages: int) -> list[int]:
        """Return what stands for the state behind a prefix, for each page; 0: behind no token."""
        return [hash((prefix_hash, "state", i)) if prefix_hash else ZERO for i in range(num_pages)]

    def _copy(self, copy: PageCopy) -> None:
        """Copy whole pages. A broken step writes garbage instead."""
        assert not {*copy.sources} & {*copy.targets}
        for source, target in zip(copy.sources, copy.targets, strict=True):
            self._set_state(target, UNWRITTEN if self.is_broken else self.states[source])

    def _placed(self, row: Row) -> Row:
        """Move a row back by the drafts that were rejected since its step was scheduled."""
        if row.num_unverified_tokens == 0:
            return row
        start = self.last_positions[row.table_idx]
        moved = row.num_computed_tokens - start
        assert 0 <= moved <= row.num_unverified_tokens, (row, start)
        return row._replace(num_computed_tokens=start)

    def _with_drafts(self, row: Row) -> Row:
        """Write the drafts of `row`; return it with as many as there are."""
        if row.num_draft_tokens == 0:
            return row
        tokens = self.token_ids[row.table_idx]
        drafts = self.propose(tokens[: row.sample_position])[: row.num_draft_tokens]
        self._store(tokens, row.sample_position, drafts)
        return row._replace(num_scheduled_tokens=1 + len(drafts), num_draft_tokens=len(drafts))

    def _compute(self, row: Row, result: StepResult) -> None:
        num_known, end = row.sample_position, row.end
        assert row.num_computed_tokens < num_known
        tokens = self.token_ids[row.table_idx]
        start = self.start_of(row.table_idx)
        hashes = prefix_hashes(tokens[:end], start)
        for table, window in enumerate(self.windows):
            first = max(0, row.num_computed_tokens - window + 1)
            for position in range(first, row.num_computed_tokens):
                written = self.kv.get(self.location(row, position, table))
                right = self.value(hashes[position], table)
                assert written == right, f"{row} reads another prefix at {position}"
            for position in range(row.num_computed_tokens, end):
                self._set_kv(row, position, table, self.value(hashes[position], table))
            for position in range(end, -(-end // self.block_size) * self.block_size):
                writer = self.writers.get(self.location(row, position, table), row.seq_id)
                assert writer == row.seq_id, f"{row} reads masked KV of sequence {writer}"
        self._compute_state(row, [0, *hashes])
        accepted: list[int] = []
        if row.samples:
            drafts = tokens[num_known:end]
            sampled = [next_token(prefix_hash) for prefix_hash in hashes[num_known - 1 :]]
            self._store(tokens, num_known, sampled)  # also what follows a wrong draft
            accepted, finish_info = self._accepted(row, drafts, sampled)
            self.last_positions[row.table_idx] = num_known - 1 + max(1, len(accepted))
            forced: list[int] = []
            if accepted and self.forces[row.table_idx]:
                known = tokens[:num_known] + accepted
                count = (prefix_hashes(known)[-1] >> 4) % 4
                forced = list(islice(continuation(known, start), count))
            if drafts or finish_info or forced:
                result.details[row.seq_id] = RowDetails(len(drafts), finish_info, forced)
        result.token_ids.append(accepted)

    def _set_kv(self, row: Row, position: int, table: int, value: int) -> None:
        """Write what stands for a position's KV, over the state that may be in the page."""
        place = self.location(row, position, table)
        self.kv[place] = value
        self.writers[place] = row.seq_id
        self.states[place[0]] = UNWRITTEN

    def _compute_state(self, row: Row, hashes: list[int]) -> None:
        """Read the state, go on from it with all that is certain, and write it.

        Args:
            hashes: of the first 0, 1, 2, ... tokens.
        """
        pages, start = self.state_pages(row), self.state_positions[row.table_idx]
        start = row.num_computed_tokens if start == UNWRITTEN else start
        assert start <= row.num_computed_tokens, f"{row}: its state is ahead"
        found = [self.states.get(page, UNWRITTEN) for page in pages]
        assert found == self.state_values(hashes[start], len(pages)), f"{row} reads a wrong state"
        self._write_state(row, self.state_values(hashes[row.sample_position], len(pages)))

    def _write_state(self, row: Row, values: list[int]) -> None:
        self.state_positions[row.table_idx] = row.sample_position
        for page, value in zip(self.state_pages(row), values, strict=True):
            self._set_state(page, value)

    def _set_state(self, page: int, value: int) -> None:
        """Write what stands for a state to a page, over the KV that may be there."""
        self.states[page] = value
        for offset in range(self.block_size):
            self.kv[page, offset] = UNWRITTEN
            self.writers[page, offset] = UNWRITTEN

    def _accepted(
        self, row: Row, drafts: list[int], sampled: list[int]
    ) -> tuple[list[int], FinishInfo | None]:
        """Return the tokens of a row, up to the first that no draft equals, and why it has none."""
        num_right = sum(1 for _ in takewhile(lambda i: drafts[i] == sampled[i], range(len(drafts))))
        room = self.fails_from.get(row.seq_id, row.end + 1) - row.sample_position
        finish_info = FinishInfo("error", "no token", kv_invalid=True) if room <= 0 else None
        return sampled[: max(0, min(num_right + 1, room))], finish_info

    def _write_garbage(self, row: Row) -> None:
        for table in range(len(self.windows)):
            for position in range(row.num_computed_tokens, row.end):
                self._set_kv(row, position, table, UNWRITTEN)
        self._write_state(row, [UNWRITTEN] * len(self.state_pages(row)))
        self._store(self.token_ids[row.table_idx], row.end, [UNWRITTEN])
        self.last_positions[row.table_idx] = row.sample_position

    def _store(self, table: list[int], start: int, values: list[int]) -> None:
        assert start + len(values) <= len(table), "written past the end of a table"
        table[start : start + len(values)] = values


class FakeEngine:
    """The engine's loop with a fake worker. It checks each schedule and each output.

    Args:
        windows: of the model's window groups.
        state_pages: 0: a model without states.
        make_policy, make_order: None is the default.
    """

    steps_per_token = 2
    is_strict = True
    is_fifo = True
    """Whether alike sequences are admitted in the order of their arrival."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        block_size: int = 2,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 16,
        eos_token_ids: frozenset[int] = frozenset(),
        prefix_caching: bool = True,
        queue_depth: int = 0,
        propose: Proposer | None = None,
        controller: "DraftController | None" = None,
        follows_drafts: bool = False,
        windows: tuple[WindowSpec, ...] = (),
        state_pages: int = 0,
        snapshot_interval: int = 8,
        hooks: Seq[AdmissionHook] = (),
        make_policy: Callable[[], Policy] | None = None,
        make_order: Callable[[int], EvictionOrder] | None = None,
    ) -> None:
        self.windows = windows
        self.state_pages = state_pages
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.queue_depth = queue_depth
        self.manager = BlockManager(
            num_blocks,
            block_size,
            enable_prefix_caching=prefix_caching,
            groups=self._groups(snapshot_interval),
            order=None if make_order is None else make_order(num_blocks),
        )
        self.drafting: AdaptiveDrafting | None = None
        if propose is not None or controller is not None:
            self.drafting = self._drafting(controller, follows_drafts)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            drafting=self.drafting,
            policy=None if make_policy is None else make_policy(),
            hooks=hooks,
        )
        tables = max_num_seqs, max_model_len, block_size
        proposer = propose or (lambda token_ids: [])
        self.worker = self.make_worker(*tables, proposer, self.windows, state_pages)
        self._watch_policy()
        self.has_default_policy = make_policy is None
        self.is_fifo = self.is_fifo and self.has_default_policy
        self.loop = StepLoop(self.scheduler, self._execute, self.queue_depth)
        self.in_flight = self.loop.in_flight
        self.launched: list[tuple[Schedule, Schedule]] = []  # each with a copy made at launch
        self.sequences: list[Sequence] = []  # by id, so in order of arrival
        self.contexts: list[list[int]] = []  # by id: the expected tokens up to max_model_len
        self.admitted: list[int] = []  # ids, in order of first admission
        self.preempted: list[int] = []  # ids, in order of preemption
        self.num_drafts_accepted = 0

    def make_worker(self, *args: Any) -> FakeWorker:
        return FakeWorker(*args)

    def _groups(self, snapshot_interval: int) -> list[KVCacheGroup]:
        self.window_groups = [
            WindowGroup(window, number, self.max_num_batched_tokens)
            for number, window in enumerate(self.windows)
        ]
        self.states = None
        if self.state_pages:
            self.states = StateGroup(self.state_pages, snapshot_interval=snapshot_interval)
        return [*self.window_groups, *([self.states] if self.states else [])]

    def _drafting(
        self, controller: "DraftController | None", follows_drafts: bool
    ) -> "AdaptiveDrafting":
        from nanovllm.features.speculation import drafting

        return drafting.AdaptiveDrafting(
            controller or fake_controller(lambda most: most),
            self.manager,
            self.max_num_batched_tokens,
            follows_drafts=follows_drafts,
        )

    def _watch_policy(self) -> None:
        """Note the keys that the scheduler asks for, and whether the victims are the last."""
        policy = self.scheduler.policy
        self.keys: dict[Sequence, Any] = {}  # those that the last step went by
        self._order = policy.order
        policy.order = self._order_asked  # type: ignore[method-assign]
        self.chooses_victims = type(policy).victim is not Policy.victim

    def _order_asked(self, seq: Sequence) -> Any:
        """Return the policy's key, and note the first in each step: later ones may differ."""
        key = self._order(seq)
        self.keys.setdefault(seq, key)
        return key

    def start_of(self, root: str) -> int:
        """Return what the tokens of a prefix cache's root come behind: see `prefix_hashes`."""
        return 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        ignore_eos: bool = False,
        forces: bool = False,
        prompt_logprobs: int | None = None,
        prompt_logprob_start: int = 0,
        **options: Any,
    ) -> Sequence:
        """Queue a sequence with these `SamplingParams` and `options`, those of `Sequence`.

        Args:
            forces: whether a grammar forces tokens.
        """
        grammar = {"regex": "the fake worker does not read it"} if forces else None
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            structured_outputs=grammar,
            prompt_logprobs=prompt_logprobs,
            prompt_logprob_start=prompt_logprob_start,
        )
        seq_id = len(self.sequences)
        seq = Sequence(seq_id, prompt, params, seed=100 + seq_id, **options)
        self.sequences.append(seq)
        tokens = chain(prompt, continuation(prompt, self.start_of(seq.root_uid)))
        self.contexts.append(list(islice(tokens, self.scheduler.max_model_len)))
        self.scheduler.add(seq)
        return seq

    def launch(self, *, fails_to_launch: bool = False) -> Schedule | None:
        """Schedule a step and execute it."""
        running = list(self.scheduler.running)
        held = {id(seq) for seq in running}
        waiting = [s for s in self.sequences if not s.is_finished and id(s) not in held]
        self.keys = {seq: self._order(seq) for seq in running}
        schedule = self.scheduler.schedule()
        self._check_order(running, waiting, schedule)
        if schedule is None:
            assert self.in_flight or not self.scheduler.num_unfinished, "waiting requests never run"
            return None
        self._check_budgets(schedule)
        self.launched.append((schedule, pickle.loads(pickle.dumps(schedule))))
        if fails_to_launch:
            self.scheduler.abandon(schedule)
            return schedule
        self.loop.launch(schedule)
        return schedule

    def _execute(self, schedule: Schedule) -> StepResult | None:
        result = self.worker.execute(schedule)
        if result is not None:
            for row in self.worker.rows:
                self._check_row(row)
            if self.states is not None:
                self._check_snapshots(self.states)
        return result

    def retire(self) -> None:
        """Update with the oldest step's result. If it failed, abandon all steps in flight."""
        schedule, result = self.in_flight[0]
        unfinished = {seq.seq_id for seq in self.sequences if not seq.is_finished}
        advanced = self.loop.retire()
        if result is None:
            self.worker.is_broken = False
            return
        self.num_drafts_accepted += sum(len(tokens) - 1 for tokens in result.token_ids if tokens)
        rows = [row for row in schedule.rows if row.samples]
        ids = [seq.seq_id for seq in advanced]
        assert ids == [row.seq_id for row in rows if row.seq_id in unfinished]
        for seq in advanced:
            self._check_output(seq)

    def step(self, *, fails_to_launch: bool = False) -> bool:
        """Run the engine's loop once. Return whether a step was launched or retired."""
        while len(self.in_flight) > self.queue_depth:
            self.retire()
        schedule = self.launch(fails_to_launch=fails_to_launch)
        if self.loop.is_due(schedule):
            self.retire()
            return True
        return schedule is not None

    def step_until(self, condition: Callable[[], object]) -> None:
        for _ in range(100):
            if condition():
                return
            self.step()
        raise AssertionError("the condition was not met in 100 steps")

    def abort(self, seq: Sequence) -> None:
        if not seq.is_finished:
            self.scheduler.finish(seq, "abort")

    def run(self) -> None:
        """Step until nothing is left; check all outputs, and that all blocks are free."""
        unfinished = [seq for seq in self.sequences if not seq.is_finished]
        # Each step computes at least one token of the first sequence; preemption repeats some.
        limit = (
            8
            + len(self.in_flight)
            + self.steps_per_token * sum(len(self.contexts[s.seq_id]) for s in unfinished)
        )
        num_steps = sum(1 for _ in takewhile(lambda _: self.step(), range(limit + 1)))
        assert num_steps <= limit, "a sequence starves"
        assert self.scheduler.num_unfinished == 0
        assert self.scheduler.num_waiting == 0
        assert self.scheduler.running == []
        check_scheduler(self.scheduler)
        check_blocks(self.manager, [])
        assert self.manager.num_free_blocks == len(self.manager.blocks)
        for schedule, as_launched in self.launched:
            assert schedule == as_launched, "a schedule changed after its launch"
        for seq in self.sequences:
            assert seq.is_finished
            self._check_output(seq)
        self._check_stats()
        if self.is_fifo and len({(seq.priority, seq.user) for seq in self.sequences}) == 1:
            assert self.admitted == sorted(self.admitted), "a waiting sequence was passed over"

    def _check_output(self, seq: Sequence) -> None:
        context = self.contexts[seq.seq_id]
        scheduler = self.scheduler
        expected = oracle(
            context[: seq.num_prompt_tokens],
            seq.params,
            scheduler.max_model_len,
            scheduler.eos_token_ids,
            self.start_of(seq.root_uid),
        )
        got = output_of(seq)
        if seq.output.finish_reason in ("stop", "length"):
            assert (got, seq.output.finish_reason) == expected
            most = seq.num_prompt_tokens if self.manager.enable_prefix_caching else 1
            assert seq.num_cached_tokens in range(0, most, self.manager.block_size)
        else:
            assert seq.output.finish_reason in (None, "abort", "error")
            assert len(got) < len(expected[0])
            assert got == expected[0][: len(got)]
        if seq.output.finish_reason == "error":  # not before all tokens that come before it
            assert len(seq.token_ids) >= self.worker.fails_from[seq.seq_id]

    def _check_stats(self) -> None:
        stats = self.scheduler.stats
        assert stats.num_decode_tokens == sum(seq.num_output_tokens for seq in self.sequences)
        admitted = [seq for seq in self.sequences if seq.was_admitted]
        assert stats.num_prompt_tokens == sum(seq.num_prompt_tokens for seq in admitted)
        assert stats.num_cached_tokens == sum(seq.num_cached_tokens or 0 for seq in admitted)
        queried = admitted if self.manager.enable_prefix_caching else []
        assert stats.num_queried_tokens == sum(
            seq.num_prompt_tokens for seq in queried if self._may_hit(seq)
        )
        for seq in admitted:
            if seq.params.prompt_logprobs is not None:
                assert (seq.num_cached_tokens or 0) <= seq.params.prompt_logprob_start
        assert stats.num_preemptions == len(self.preempted)
        counts = [draft_counts(seq) for seq in self.sequences]
        drafts = DraftCounts() if self.drafting is None else self.drafting.counts
        assert drafts == sum(counts, DraftCounts())
        for found in (drafts, *counts):
            assert sum(found.num_accepted_tokens_per_pos) == found.num_accepted_tokens
            assert found.num_drafts <= found.num_draft_tokens
        assert drafts.num_accepted_tokens <= self.num_drafts_accepted

    @staticmethod
    def _may_hit(seq: Sequence) -> bool:
        """Whether some prompt token's hidden state is not needed."""
        if seq.params.prompt_logprobs is None:
            return seq.num_prompt_tokens > 1
        return seq.params.prompt_logprob_start > 0

    def _check_order(
        self,
        running: list[Sequence],
        waiting: list[Sequence],
        schedule: Schedule | None,
    ) -> None:
        """Check that rows, admissions and victims follow one order, and none is passed over."""
        keys = self.keys
        victims = [seq for seq in running if seq.table_idx is None]
        kept = [seq for seq in running if seq.table_idx is not None]
        if not self.chooses_victims:
            assert all(keys[seq] < keys[victim] for seq in kept for victim in victims)
        assert all(victim.num_computed_tokens == 0 for victim in victims)
        self.preempted += [seq.seq_id for seq in victims]
        if self.states is not None and self.is_strict:
            assert not (victims and self.states._held), "preempted for a snapshot"
        if schedule is None:
            return
        rows = [self.sequences[row.seq_id] for row in schedule.rows]
        assert rows == sorted(rows, key=keys.__getitem__), "rows are not in the policy's order"
        admitted = [self.sequences[new.seq_id] for new in schedule.admissions]
        assert all(seq in admitted for seq in rows if seq not in running)
        self._check_rows_of(admitted, rows)
        least = min((victim.priority for victim in victims), default=math.inf)
        if self.is_strict and self.has_default_policy:
            assert all(seq.priority < least for seq in admitted), "admission after a preemption"
        if self.has_default_policy:
            self._check_turns(admitted, waiting)
        head = self.scheduler.policy.first()
        head_key = None if head is None else self._order(head)
        if head is not None and any(head_key < keys[seq] for seq in rows) and not victims:
            is_free = len(self.scheduler.running) < self.max_num_seqs
            num_needed = self.num_pages_needed(head)
            fits = is_free and num_needed <= self.num_pages_unused()
            may_wait = head.num_in_flight_steps or not (self.is_strict or self.windows == ())
            assert not fits or may_wait, "a sequence was passed over"
        ids = [seq.seq_id for seq in admitted]
        self.admitted += [seq_id for seq_id in ids if seq_id not in self.admitted]
        assert [(new.table_idx, new.seed) for new in schedule.admissions] == [
            (seq.table_idx, 100 + seq.seq_id) for seq in admitted
        ]

    def _check_rows_of(self, admitted: list[Sequence], rows: list[Sequence]) -> None:
        assert all(seq in rows for seq in admitted), "an admitted sequence has no row"

    def num_pages_unused(self) -> int:
        """Return how many pages no running sequence needs."""
        if self.states is None:
            return self.manager.num_free_blocks
        tables = [seq.kv.block_table for seq in self.scheduler.running]
        needed = {page for table in tables for page in table}
        num_states = len(tables) * self.state_pages
        return len(self.manager.blocks) - len(needed) - num_states

    def num_pages_needed(self, head: Sequence) -> int:
        """Return the most pages that a sequence takes when it is admitted."""
        num_blocks = num_pages = self.manager.blocks_for(head.num_tokens)
        budget = self.scheduler.max_num_batched_tokens
        for window, pages in self.windows:
            held = self.manager.blocks_for(window + budget) + 1
            num_pages += pages * min(num_blocks, held)
        if self.states is not None:
            num_pages += ROOM_TO_GROW * len(self.scheduler.running)
        return num_pages + self.state_pages

    def _check_turns(self, admitted: list[Sequence], waiting: list[Sequence]) -> None:
        """Check that the admitted sequences are the first of their users, and go by priority."""
        waiting = sorted(waiting, key=lambda seq: (seq.priority, seq.seq_id))
        for seq in admitted:
            assert seq is next(other for other in waiting if other.user == seq.user)
            assert seq.priority == waiting[0].priority
            waiting.remove(seq)

    def _check_budgets(self, schedule: Schedule) -> None:
        budget, most = self.scheduler.max_num_batched_tokens, self.max_num_batched_tokens
        assert self._may_be_empty(schedule) or 0 < schedule.num_tokens <= most
        assert all(row.num_scheduled_tokens > 0 for row in schedule.rows)
        assert len({row.table_idx for row in schedule.rows}) == len(schedule.rows)
        assert len(self.scheduler.running) <= self.max_num_seqs
        drafting = [row for row in schedule.rows if row.num_draft_tokens]
        assert all(row.samples for row in drafting)
        assert all(row.sample_position == row.num_computed_tokens + 1 for row in drafting)
        num_samples = sum(row.samples + row.num_draft_tokens for row in schedule.rows)
        assert num_samples <= MAX_SAMPLES or not drafting
        followers = [row for row in schedule.rows if row.num_unverified_tokens]
        decodes = all(
            row.samples and row.num_scheduled_tokens == 1 + row.num_draft_tokens
            for row in schedule.rows
        )
        params = [self.sequences[row.seq_id].params for row in schedule.rows]
        assert not followers or (decodes and all(p.is_plain for p in params))
        size = self.manager.block_size
        whole = [
            row.samples or (self.state_pages > 0 and row.end % size == 0) for row in schedule.rows
        ]
        if not all(whole) and self.has_default_policy:  # the budget may cut only the last row
            # Rows behind drafts in flight, of one token each, may have been taken back.
            waiting = sum(seq.num_draft_tokens > 0 for seq in self.scheduler.running)
            assert budget - waiting <= schedule.num_tokens <= most
            assert all(whole[:-1])

    def _may_be_empty(self, schedule: Schedule) -> bool:
        return False

    def _check_row(self, row: Row) -> None:
        seq = self.sequences[row.seq_id]
        known = self.worker.token_ids[row.table_idx][: row.sample_position]
        expected = self.contexts[row.seq_id][: row.sample_position]
        assert known == expected, "the table row holds other tokens"
        written = self.worker.state_pages(row)
        if self.states is not None:
            assert written == self.states._states[seq].pages
        tables = range(num_tables(self.windows))
        for position in range(row.num_computed_tokens, row.end):
            pages = [self.worker.location(row, position, table)[0] for table in tables]
            assert pages[0] == seq.kv.block_table[position // self.manager.block_size]
            written += pages
        for block in map(self.manager.blocks.__getitem__, written):
            assert block.ref_count == 1, "a page is written that is free or shared"
            assert block.entry is None, "a published block is written"

    def _check_snapshots(self, group: StateGroup) -> None:
        """Check that each cached snapshot that has its copy holds the state after its prefix."""
        nodes = {node.uid: node for node in self.manager.trie.nodes.values()}
        for uid, snapshot in group._snapshots.items():
            tokens: list[int] = []
            parent: int | str = uid
            while parent in nodes:
                node: Node = nodes[parent]
                tokens[:0] = array("I", node.tokens)
                parent = node.key[0]
            if len(tokens) == snapshot.position and snapshot.pages:  # no block before it is evicted
                assert isinstance(parent, str)
                behind = prefix_hashes(tokens, self.start_of(parent))[-1]
                right = self.worker.state_values(behind, len(snapshot.pages))
                assert [self.worker.states[page] for page in snapshot.pages] == right


def draft_counts(seq: Sequence) -> DraftCounts:
    """Return how the drafts of a sequence fared; all 0 if it had none."""
    return DraftCounts() + (seq.output.draft_counts or DraftCounts())


def fake_controller(allow: Callable[[int], int]) -> "DraftController":
    """Return a controller that allows each row what `allow` returns for the most it could take."""
    from nanovllm.features.speculation.draft_controller import DraftController

    def choose(candidates: "Seq[tuple[Acceptance, int]]", num_tokens: int) -> list[int]:
        return [allow(most) for _, most in candidates]

    controller = DraftController(0, (), ())
    controller.choose = choose  # type: ignore[method-assign]
    controller.skips_step = lambda: False  # type: ignore[method-assign]
    return controller


def random_limits(seed: int) -> "DraftController":
    """Return a controller of random limits, often the highest and often 0."""
    rng = random.Random(seed)
    return fake_controller(lambda most: rng.choice([0, most, rng.randint(0, most)]))
