"""The scheduler against a fake worker that believes only what schedules tell it: whatever is
admitted, chunked, preempted, aborted or lost, each request gets the tokens that it gets alone.

Imports no torch.
"""

import copy
import gc
import random
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, count, islice, takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import (
    settings,
    strategies as st,
)
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import nanovllm
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler.block_manager import BlockManager
from nanovllm.scheduler.messages import Row, Schedule, StepResult
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.scheduler.sequence import Sequence

VOCAB_SIZE = 5
UNWRITTEN = -1


def fold(prefix_hash: int, token: int) -> int:
    """Hash of a prefix with one token more; it stands for the KV of that token."""
    return hash((prefix_hash, token))


def prefix_hashes(token_ids: list[int]) -> list[int]:
    """The hash of each non-empty prefix."""
    hashes, last = [], 0
    for token in token_ids:
        last = fold(last, token)
        hashes.append(last)
    return hashes


def next_token(prefix_hash: int) -> int:
    """The fake model: what it samples depends on every token before, and on nothing else."""
    return (prefix_hash >> 8) % VOCAB_SIZE


def continuation(token_ids: list[int]) -> Iterator[int]:
    """What the fake model says after `token_ids`, without end."""
    prefix_hash = prefix_hashes(token_ids)[-1]
    while True:
        token = next_token(prefix_hash)
        yield token
        prefix_hash = fold(prefix_hash, token)


def oracle(
    prompt: list[int], params: SamplingParams, max_model_len: int, eos_token_ids: frozenset[int]
) -> tuple[list[int], str]:
    """Return (output tokens, finish reason) of a request that runs alone."""
    output: list[int] = []
    for token in continuation(prompt):
        output.append(token)
        if token in eos_token_ids and not params.ignore_eos:
            return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, "length"
    raise AssertionError("unreachable")


Proposer = Callable[[list[int]], list[int]]
"""All tokens of a sequence -> guesses at the next ones."""


def random_guesses(seed: int) -> Proposer:
    """Return a proposer of 0 to 4 guesses, most of them right."""
    rng = random.Random(seed)

    def propose(token_ids: list[int]) -> list[int]:
        right = islice(continuation(token_ids), rng.randrange(5))
        return [t if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for t in right]

    return propose


class FakeWorker:
    """Device tables and a KV memory, like the real worker's. Stale contents stay in place.

    A failed step leaves garbage, and so does every step after it until the failure is noticed.
    """

    def __init__(
        self, num_table_rows: int, max_model_len: int, block_size: int, propose: Proposer | None
    ) -> None:
        self.block_size = block_size
        self.propose = propose
        width = -(-max_model_len // block_size)
        self.token_ids = [[UNWRITTEN] * max_model_len for _ in range(num_table_rows)]
        self.block_tables = [[UNWRITTEN] * width for _ in range(num_table_rows)]
        self.kv: dict[tuple[int, int], int] = {}  # (block, offset) -> hash of the prefix written
        self.is_broken = False

    def execute(self, schedule: Schedule) -> StepResult | None:
        """Run a step; None if it failed."""
        for new in schedule.admissions:
            self._store(self.token_ids[new.table_idx], 0, new.token_ids)
            self._store(self.block_tables[new.table_idx], 0, new.block_ids)
        for blocks in schedule.new_blocks:
            self._store(self.block_tables[blocks.table_idx], blocks.start, blocks.block_ids)
        result = StepResult(schedule.step_id, [], [])
        for row in schedule.rows:
            if self.is_broken:
                self._write_garbage(row)
            else:
                self._compute(row, result)
        return None if self.is_broken else result

    def location(self, row: Row, position: int) -> tuple[int, int]:
        """Return the (block, offset) of a position."""
        block_id = self.block_tables[row.table_idx][position // self.block_size]
        return block_id, position % self.block_size

    def _compute(self, row: Row, result: StepResult) -> None:
        end = row.num_computed_tokens + row.num_scheduled_tokens
        num_known = end - len(row.draft_token_ids)
        assert row.num_computed_tokens < num_known
        tokens = self.token_ids[row.table_idx]
        self._store(tokens, num_known, list(row.draft_token_ids))
        hashes = prefix_hashes(tokens[:end])
        for position in range(row.num_computed_tokens):
            written = self.kv.get(self.location(row, position))
            assert written == hashes[position], f"{row} reads what is not its own at {position}"
        for position in range(row.num_computed_tokens, end):
            self.kv[self.location(row, position)] = hashes[position]
        if not row.samples:
            assert not row.draft_token_ids
            return
        sampled = [next_token(hashes[num_known - 1])]
        for position, draft in enumerate(row.draft_token_ids, start=num_known):
            if sampled[-1] != draft:
                break
            sampled.append(next_token(hashes[position]))
        room = len(tokens) - num_known  # a full row samples one token that nothing ever reads
        self._store(tokens, num_known, sampled[:room])
        result.token_ids.append(sampled)
        if self.propose is not None:
            result.draft_token_ids.append(self.propose(tokens[:num_known] + sampled))

    def _write_garbage(self, row: Row) -> None:
        end = row.num_computed_tokens + row.num_scheduled_tokens
        for position in range(row.num_computed_tokens, end):
            self.kv[self.location(row, position)] = UNWRITTEN
        tokens = self.token_ids[row.table_idx]
        self._store(tokens, end, [UNWRITTEN][: len(tokens) - end])

    def _store(self, table: list[int], start: int, values: list[int]) -> None:
        assert start + len(values) <= len(table), "a table is overrun"
        table[start : start + len(values)] = values


class Engine:
    """The loop around a scheduler and a fake worker; it checks each schedule and each output."""

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
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
        )
        self.worker = FakeWorker(max_num_seqs, max_model_len, block_size, propose)
        self.max_num_seqs = max_num_seqs
        self.queue_depth = queue_depth
        self.in_flight: deque[tuple[Schedule, StepResult | None]] = deque()
        self.launched: list[tuple[Schedule, Schedule]] = []  # each with a copy as it was then
        self.sequences: list[Sequence] = []  # by id, which is also the order of arrival
        self.contexts: list[list[int]] = []  # by id: the right tokens up to max_model_len
        self.admitted: list[int] = []  # ids, in order of first admission
        self.preempted: list[int] = []  # ids, in order of preemption
        self.num_drafts_held = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        ignore_eos: bool = False,
        priority: int = 0,
    ) -> Sequence:
        max_model_len = self.scheduler.max_model_len
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        seq_id = len(self.sequences)
        seq = Sequence(seq_id, prompt, params, seed=100 + seq_id, priority=priority)
        self.sequences.append(seq)
        self.contexts.append(list(islice(chain(prompt, continuation(prompt)), max_model_len)))
        self.scheduler.add(seq)
        return seq

    def launch(self, *, fails_to_launch: bool = False) -> Schedule | None:
        """Schedule a step and execute it."""
        running = list(self.scheduler.running)
        held = {id(seq) for seq in running}
        waiting = [s.seq_id for s in self.sequences if not s.is_finished and id(s) not in held]
        waiting.sort(key=lambda seq_id: self.sequences[seq_id].order)
        schedule = self.scheduler.schedule()
        self._check_order(running, waiting, schedule)
        if schedule is None:
            assert self.in_flight or not self.scheduler.num_unfinished, "nothing will ever run"
            return None
        self._check_budgets(schedule)
        self.launched.append((schedule, copy.deepcopy(schedule)))
        if fails_to_launch:
            self.scheduler.abandon(schedule)
            return schedule
        result = self.worker.execute(schedule)
        if result is not None:
            for row in schedule.rows:
                self._check_row(row)
        self.in_flight.append((schedule, result))
        return schedule

    def retire(self) -> None:
        """Take the oldest step's result; after a failed one, take back all that are in flight."""
        schedule, result = self.in_flight.popleft()
        if result is None:
            self.scheduler.abandon(schedule)
            while self.in_flight:
                self.scheduler.abandon(self.in_flight.popleft()[0])
            self.worker.is_broken = False
            return
        unfinished = {seq.seq_id for seq in self.sequences if not seq.is_finished}
        rows = [row for row in schedule.rows if row.samples]
        self.num_drafts_held += sum(len(tokens) - 1 for tokens in result.token_ids)
        advanced = self.scheduler.update(schedule, result)
        ids = [seq.seq_id for seq in advanced]
        assert ids == [row.seq_id for row in rows if row.seq_id in unfinished]
        for seq in advanced:
            self._check_output(seq)

    def step(self, *, fails_to_launch: bool = False) -> bool:
        """Go once round the engine's loop; return whether anything was launched or retired."""
        while len(self.in_flight) > self.queue_depth:
            self.retire()
        schedule = self.launch(fails_to_launch=fails_to_launch)
        if self.in_flight and (schedule is None or len(self.in_flight) > self.queue_depth):
            self.retire()
            return True
        return schedule is not None

    def step_until(self, condition: Callable[[], object]) -> None:
        for _ in range(100):
            if condition():
                return
            self.step()
        raise AssertionError("it never happened")

    def abort(self, seq: Sequence) -> None:
        was_finished = seq.is_finished
        assert self.scheduler.abort(seq.seq_id) is (None if was_finished else seq)
        assert was_finished or seq.finish_reason == "abort"

    def run(self) -> None:
        """Step until nothing is left, and check that everything was right and given back."""
        unfinished = [seq for seq in self.sequences if not seq.is_finished]
        # A step computes a token of the first in order at least; a preemption undoes some of them.
        limit = 8 + len(self.in_flight) + 2 * sum(len(self.contexts[s.seq_id]) for s in unfinished)
        num_steps = sum(1 for _ in takewhile(lambda _: self.step(), range(limit + 1)))
        assert num_steps <= limit, "somebody starves"
        assert self.scheduler.num_unfinished == 0
        assert self.scheduler.num_waiting == 0
        assert self.scheduler.running == []
        self.scheduler.check()
        self.manager.check([])
        assert self.manager.num_free_blocks == len(self.manager.blocks)
        for schedule, as_launched in self.launched:
            assert schedule == as_launched, "a schedule changed after it was handed on"
        for seq in self.sequences:
            assert seq.is_finished
            self._check_output(seq)
        if len({seq.priority for seq in self.sequences}) == 1:
            assert self.admitted == sorted(self.admitted), "somebody was passed"

    def _check_output(self, seq: Sequence) -> None:
        context = self.contexts[seq.seq_id]
        scheduler = self.scheduler
        expected = oracle(
            context[: seq.num_prompt_tokens],
            seq.params,
            scheduler.max_model_len,
            scheduler.eos_token_ids,
        )
        got = seq.output_token_ids
        if seq.finish_reason in ("stop", "length"):
            assert (got, seq.finish_reason) == expected
            assert self._is_right_cache_count(seq.num_cached_tokens, seq.num_prompt_tokens)
        else:
            assert seq.finish_reason in (None, "abort")
            assert len(got) < len(expected[0])
            assert got == expected[0][: len(got)]

    def _is_right_cache_count(self, num_cached: int | None, num_prompt_tokens: int) -> bool:
        if not self.manager.enable_prefix_caching:
            return num_cached == 0
        return num_cached in range(0, num_prompt_tokens, self.manager.block_size)

    def _check_order(
        self, running: list[Sequence], waiting: list[int], schedule: Schedule | None
    ) -> None:
        victims = [seq for seq in running if seq.table_idx is None]
        kept = [seq for seq in running if seq.table_idx is not None]
        assert all(seq.order < victim.order for seq in kept for victim in victims)
        assert all(victim.num_computed_tokens == 0 for victim in victims)
        self.preempted += [seq.seq_id for seq in victims]
        if schedule is None:
            return
        kept_ids = [seq.seq_id for seq in kept]
        admitted = [r.seq_id for r in schedule.rows if r.seq_id not in kept_ids]
        assert not (victims and admitted), "what was taken from one is given to another"
        assert admitted == waiting[: len(admitted)], "somebody was passed"
        self.admitted += [seq_id for seq_id in admitted if seq_id not in self.admitted]
        rows = [row.seq_id for row in schedule.rows]
        assert rows == [seq_id for seq_id in kept_ids if seq_id in rows] + admitted
        table_indices = {row.seq_id: row.table_idx for row in schedule.rows}
        assert [(new.table_idx, new.seed) for new in schedule.admissions] == [
            (table_indices[seq_id], 100 + seq_id) for seq_id in admitted
        ]

    def _check_budgets(self, schedule: Schedule) -> None:
        budget = self.scheduler.max_num_batched_tokens
        assert 0 < schedule.num_tokens <= budget
        assert all(row.num_scheduled_tokens > 0 for row in schedule.rows)
        assert len({row.table_idx for row in schedule.rows}) == len(schedule.rows)
        assert len(self.scheduler.running) <= self.max_num_seqs
        if not all(row.samples for row in schedule.rows):  # only the last is cut, by the budget
            assert schedule.num_tokens == budget
            assert all(row.samples for row in schedule.rows[:-1])

    def _check_row(self, row: Row) -> None:
        seq = self.sequences[row.seq_id]
        end = row.num_computed_tokens + row.num_scheduled_tokens
        num_known = end - len(row.draft_token_ids)
        known = self.worker.token_ids[row.table_idx][:num_known]
        assert known == self.contexts[row.seq_id][:num_known], "the tables hold other tokens"
        for position in range(row.num_computed_tokens, end):
            block_id, _ = self.worker.location(row, position)
            assert block_id == seq.block_table[position // self.manager.block_size]
            block = self.manager.blocks[block_id]
            assert block.ref_count == 1, "a block is written that others read"
            assert block.uid is None, "a block is written that others may find"


PROMPT = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20)
INDEX = st.integers(0, 15)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, failures and steps on a pool that is often too small for them."""

    proposes = False

    @initialize(
        max_model_len=st.integers(2, 24),
        block_size=st.integers(1, 5),
        num_spare_blocks=st.integers(0, 6),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 30),
        eos_token_ids=st.sampled_from([(), (3,), (3, 4)]),
        prefix_caching=st.sampled_from([True, True, False]),
        queue_depth=st.sampled_from([0, 1, 1, 2, 4]),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        max_model_len: int,
        block_size: int,
        num_spare_blocks: int,
        eos_token_ids: tuple[int, ...],
        queue_depth: int,
        seed: int,
        **options: Any,
    ) -> None:
        self.engine = Engine(
            num_blocks=-(-max_model_len // block_size) + num_spare_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            eos_token_ids=frozenset(eos_token_ids),
            queue_depth=queue_depth,
            propose=random_guesses(seed) if self.proposes else None,
            **options,
        )

    def teardown(self) -> None:
        self.engine.run()

    @rule(
        prompt=PROMPT,
        max_tokens=st.integers(1, 24),
        ignore_eos=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
    )
    def add(self, prompt: list[int], max_tokens: int, ignore_eos: bool, priority: int) -> None:
        prompt = prompt[: self.engine.scheduler.max_model_len - 1]
        self.engine.add(prompt, max_tokens, ignore_eos=ignore_eos, priority=priority)

    @precondition(lambda self: self.engine.sequences)
    @rule(
        index=INDEX, num_kept=st.integers(1, 24), more=PROMPT, num_alike=st.sampled_from([1, 1, 2])
    )
    def add_with_a_known_prefix(
        self, index: int, num_kept: int, more: list[int], num_alike: int
    ) -> None:
        known = self.engine.sequences[index % len(self.engine.sequences)].token_ids
        for _ in range(num_alike):
            self.add(known[:num_kept] + more[:3], max_tokens=8, ignore_eos=False, priority=0)

    @precondition(lambda self: self.engine.scheduler.num_unfinished < 4)
    @rule(firsts=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=3))
    def add_some_that_grow(self, firsts: list[int]) -> None:
        for first in firsts:
            self.engine.add([first], max_tokens=24, ignore_eos=True)

    @precondition(lambda self: self.engine.sequences)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        self.engine.abort(self.engine.sequences[-1 - index % len(self.engine.sequences)])

    @precondition(lambda self: len(self.engine.in_flight) <= self.engine.queue_depth)
    @rule()
    def launch(self) -> None:
        self.engine.launch()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def retire(self) -> None:
        self.engine.retire()

    @rule(num_steps=st.integers(1, 6))
    def run_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()
            self.engine.scheduler.check()

    @rule()
    def fail_to_launch(self) -> None:
        self.engine.step(fails_to_launch=True)

    @precondition(lambda self: not self.engine.worker.is_broken)
    @rule()
    def fail(self) -> None:
        self.engine.worker.is_broken = True
        if not self.engine.step():  # there was nothing to fail
            self.engine.worker.is_broken = False

    @invariant()
    def check(self) -> None:
        self.engine.scheduler.check()


class SpeculationMachine(SchedulerMachine):
    """The same with a worker that guesses ahead, rightly and wrongly."""

    proposes = True


SchedulerMachine.TestCase.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None, derandomize=True
)
SpeculationMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True
)
TestScheduler = SchedulerMachine.TestCase
TestSpeculation = SpeculationMachine.TestCase


DEPTHS = pytest.mark.parametrize("queue_depth", [0, 1, 4])


def prompt_that_ends_with(eos: int, eos_token_ids: frozenset[int]) -> list[int]:
    """A prompt whose oracle stops at `eos` after some other tokens."""
    params = SamplingParams(max_tokens=8)
    for first in count():
        output, reason = oracle([first], params, 16, eos_token_ids)
        if reason == "stop" and output[-1] == eos and len(output) > 2:
            return [first]
    raise AssertionError("unreachable")


@pytest.mark.parametrize("module", ["nanovllm", "nanovllm.scheduler.scheduler"])
def test_import_needs_no_torch(module: str) -> None:
    """Symptom: `import nanovllm` takes seconds, and scheduling cannot be used without a model."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    root = Path(nanovllm.__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@DEPTHS
def test_identical_prompts_in_one_step_share_no_block(queue_depth: int) -> None:
    """Symptom: the second reads blocks that the first is still writing."""
    engine = Engine(queue_depth=queue_depth)
    prompt = [1, 2, 3, 4, 0, 1]
    twins = [engine.add(prompt), engine.add(prompt)]
    schedule = engine.launch()
    assert schedule is not None
    assert len(schedule.rows) == 2
    assert not set(twins[0].block_table) & set(twins[1].block_table)
    engine.run()
    third = engine.add(prompt)
    engine.run()
    assert [seq.num_cached_tokens for seq in [*twins, third]] == [0, 0, 4]


def test_no_hit_on_a_prefix_in_flight() -> None:
    """Symptom: a prompt that arrives one step after its twin hits KV that may yet fail."""
    engine = Engine(queue_depth=1)
    prompt = [1, 2, 3, 4, 0]
    engine.add(prompt)
    engine.launch()
    early = engine.add(prompt)
    engine.launch()
    engine.retire()
    late = engine.add(prompt)
    engine.run()
    assert (early.num_cached_tokens, late.num_cached_tokens) == (0, 4)


def test_result_publishes_its_own_step_only() -> None:
    """Symptom: the result of one chunk publishes the blocks of the next, which may yet fail."""
    engine = Engine(queue_depth=1, max_num_batched_tokens=4)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3]
    engine.add(prompt)
    engine.launch()
    engine.launch()
    engine.retire()
    twin = engine.add(prompt)
    engine.launch()
    assert twin.num_cached_tokens == 4
    engine.run()


def test_fully_cached_prompt_of_whole_blocks_computes_its_last_one() -> None:
    """Symptom: a row without tokens, and no hidden state to sample from."""
    engine = Engine(block_size=4)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3]
    engine.add(prompt)
    engine.run()
    again = engine.add(prompt)
    schedule = engine.launch()
    assert schedule is not None
    assert [(row.num_computed_tokens, row.num_scheduled_tokens) for row in schedule.rows] == [
        (4, 4)
    ]
    engine.retire()
    engine.run()
    assert again.num_cached_tokens == 4


@DEPTHS
def test_outgrowing_the_pool_preempts_the_last(queue_depth: int) -> None:
    """Symptom: one sequence that needs a block more than is free crashes the engine."""
    engine = Engine(num_blocks=4, block_size=2, max_model_len=8, queue_depth=queue_depth)
    first = engine.add([1, 2, 3], max_tokens=5)
    last = engine.add([2, 3, 4], max_tokens=5)
    engine.run()
    assert engine.preempted == [last.seq_id]
    assert first.num_output_tokens == last.num_output_tokens == 5


def test_first_sequence_is_never_preempted() -> None:
    """Symptom: the only sequence left gives its own blocks back, for ever."""
    engine = Engine(num_blocks=4, block_size=2, max_model_len=8)
    for first in range(3):
        engine.add([first], max_tokens=100)
    engine.run()
    assert 0 not in engine.preempted


def test_preempted_sequence_keeps_its_tokens() -> None:
    """Symptom: after a preemption the output starts again, or is admitted with the prompt only."""
    engine = Engine(num_blocks=4, block_size=2, max_model_len=8)
    engine.add([1, 2, 3], max_tokens=5)
    last = engine.add([2, 3, 4], max_tokens=5)
    engine.step_until(lambda: engine.preempted)
    before = last.output_token_ids
    assert before
    engine.step_until(lambda: last.table_idx is not None)
    schedule, _ = engine.launched[-1]
    assert [new.token_ids for new in schedule.admissions] == [[2, 3, 4, *before]]
    engine.run()


def test_preempted_sequence_waits_for_its_token_in_flight() -> None:
    """Symptom: a sequence is resumed before its last token is known, and the token is lost."""
    engine = Engine(num_blocks=4, block_size=2, max_model_len=8, queue_depth=1)
    first = engine.add([1, 2, 3], max_tokens=5)
    last = engine.add([2, 3, 4], max_tokens=5)
    engine.launch()
    engine.launch()
    engine.retire()
    engine.launch()
    assert engine.preempted == [last.seq_id]
    assert last.num_pending_tokens == 1
    engine.abort(first)  # there is space again
    assert engine.launch() is None
    engine.retire()
    assert last.num_pending_tokens == 0
    schedule = engine.launch()
    assert schedule is not None
    assert [new.token_ids for new in schedule.admissions] == [last.token_ids]
    engine.run()


@DEPTHS
@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 7])
def test_max_model_len_is_enforced(num_prompt_tokens: int, queue_depth: int) -> None:
    """Symptom: a sequence grows past the model's positions and the width of the block table."""
    engine = Engine(max_model_len=8, block_size=3, queue_depth=queue_depth)
    seq = engine.add([1] * num_prompt_tokens, max_tokens=100)
    engine.run()
    assert seq.finish_reason == "length"
    assert len(seq.token_ids) == 8


@DEPTHS
@pytest.mark.parametrize("eos", [3, 4])
def test_each_of_several_eos_ids_stops(eos: int, queue_depth: int) -> None:
    """Symptom: only the first EOS id of generation_config ends a sequence."""
    eos_token_ids = frozenset({3, 4})
    engine = Engine(eos_token_ids=eos_token_ids, queue_depth=queue_depth)
    seq = engine.add(prompt_that_ends_with(eos, eos_token_ids), max_tokens=8)
    engine.run()
    assert seq.finish_reason == "stop"
    assert seq.token_ids[-1] == eos


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    """Symptom: a benchmark's outputs end early."""
    eos_token_ids = frozenset({3})
    engine = Engine(eos_token_ids=eos_token_ids)
    seq = engine.add(prompt_that_ends_with(3, eos_token_ids), max_tokens=8, ignore_eos=True)
    engine.run()
    assert (seq.num_output_tokens, seq.finish_reason) == (8, "length")
    assert 3 in seq.output_token_ids[:-1]


def test_eos_as_the_last_allowed_token_is_a_stop() -> None:
    """Symptom: "length" is reported for a sequence that ended by itself."""
    eos_token_ids = frozenset({3})
    prompt = prompt_that_ends_with(3, eos_token_ids)
    output, _ = oracle(prompt, SamplingParams(max_tokens=8), 16, eos_token_ids)
    engine = Engine(eos_token_ids=eos_token_ids)
    seq = engine.add(prompt, max_tokens=len(output))
    engine.run()
    assert seq.finish_reason == "stop"


def test_max_num_seqs_counts_residents_in_chunked_prefill() -> None:
    """Symptom: sequences that hold blocks but had no row in a step let others in beyond the
    limit.
    """
    engine = Engine(max_num_seqs=2, max_num_batched_tokens=3)
    for first in range(4):
        engine.add([first, 1, 2, 3, 4], max_tokens=3)
    holders = []
    for _ in range(6):
        engine.step()
        holders.append([seq.seq_id for seq in engine.sequences if seq.block_table])
    # 3 tokens of the first; its last 2 and 1 of the next; and the third waits for one to end.
    assert holders == [[0], [0, 1], [0, 1], [1], [1, 2], [2]]
    engine.run()


def test_finished_chunk_is_cached_before_its_prompt_is_done() -> None:
    """Symptom: a long prompt's prefix cannot be shared until its last chunk is computed."""
    engine = Engine(max_num_batched_tokens=4)
    engine.add([1, 2, 3, 4, 0, 1])
    engine.step()
    twin = engine.add([1, 2, 3, 4, 0, 1])
    engine.step()
    assert twin.num_cached_tokens == 4
    engine.run()


def test_chunked_prefill_runs_beside_decodes() -> None:
    """Symptom: a long prompt stops those that decode, or takes more than the budget."""
    engine = Engine(max_num_batched_tokens=4)
    engine.add([1], max_tokens=8)
    engine.step()
    engine.add([1, 2, 3, 4, 0, 1, 2], max_tokens=2)
    schedules = [engine.launch()]
    engine.retire()
    schedules.append(engine.launch())
    engine.retire()
    schedules.append(engine.launch())
    engine.retire()
    assert [[row[2:5] for row in schedule.rows] for schedule in schedules if schedule] == [
        [(1, 1, True), (0, 3, False)],
        [(2, 1, True), (3, 3, False)],
        [(3, 1, True), (6, 1, True)],
    ]
    engine.run()


def test_nobody_passes_the_head_of_the_queue() -> None:
    """Symptom: small requests starve a large one."""
    engine = Engine(num_blocks=8, block_size=2)
    engine.add([1] * 8, max_tokens=4)
    engine.step()
    large = engine.add([2] * 14, max_tokens=2)
    small = engine.add([3], max_tokens=2)
    engine.step()
    assert (large.table_idx, small.table_idx) == (None, None)
    engine.run()
    assert engine.admitted == [0, 1, 2]


def test_lower_priority_value_is_admitted_first() -> None:
    """Symptom: the priority of a request is carried along and never looked at."""
    engine = Engine(max_num_seqs=1)
    for priority in (1, 0, 0, -1):
        engine.add([1, 2], priority=priority)
    engine.run()
    assert engine.admitted == [3, 1, 2, 0]


def test_preemption_takes_the_lowest_priority_not_the_latest() -> None:
    """Symptom: an urgent latecomer is thrown out for one that can wait."""
    engine = Engine(num_blocks=4, block_size=2, max_model_len=8)
    patient = engine.add([1, 2, 3], max_tokens=5, priority=1)
    engine.step()
    urgent = engine.add([2, 3, 4], max_tokens=5, priority=0)
    engine.run()
    assert engine.preempted == [patient.seq_id]
    assert urgent.num_output_tokens == patient.num_output_tokens == 5


def test_aborted_waiting_request_is_never_admitted() -> None:
    """Symptom: an aborted request is admitted all the same, or blocks those behind it."""
    engine = Engine(max_num_seqs=1)
    engine.add([1, 2])
    waiting = engine.add([2, 3])
    engine.add([3, 4])
    engine.step()
    engine.abort(waiting)
    assert engine.scheduler.num_unfinished == 2
    engine.run()
    assert engine.admitted == [0, 2]
    assert waiting.output_token_ids == []


def test_aborted_running_request_frees_its_blocks() -> None:
    """Symptom: an aborted request keeps its blocks, or its table row."""
    engine = Engine(max_num_seqs=2)
    running = engine.add([1, 2, 3])
    engine.add([2, 3])
    engine.step()
    engine.abort(running)
    assert running.table_idx is None
    assert running.block_table == []
    engine.scheduler.check()
    engine.run()
    assert running.num_output_tokens == 1


def test_result_of_an_aborted_request_is_dropped() -> None:
    """Symptom: a token arrives for a request that is gone, or its neighbour gets it."""
    engine = Engine(queue_depth=1, block_size=1)
    aborted = engine.add([1, 2, 3])
    other = engine.add([2, 3])
    engine.launch()
    engine.launch()
    engine.abort(aborted)
    engine.add([4, 4, 4])
    engine.launch()  # writes to the blocks of the aborted one, after the steps in flight
    for _ in range(3):
        engine.retire()
        engine.scheduler.check()
    assert other.num_output_tokens == 3
    assert aborted.output_token_ids == []
    engine.run()


def test_abort_of_a_finished_or_unknown_request_does_nothing() -> None:
    """Symptom: a client that hangs up after the last token crashes the engine."""
    engine = Engine()
    seq = engine.add([1, 2])
    engine.run()
    engine.abort(seq)
    assert seq.finish_reason == "length"
    assert engine.scheduler.abort(12345) is None


def test_aborted_waiting_requests_free_their_memory() -> None:
    """Symptom: clients that give up behind a blocked head fill the memory."""

    def num_sequences() -> int:
        gc.collect()
        return sum(isinstance(thing, Sequence) for thing in gc.get_objects())

    scheduler = Scheduler(
        BlockManager(4, 2), max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8
    )
    before = num_sequences()
    for seq_id in range(2):
        scheduler.add(Sequence(seq_id, [1, 2], SamplingParams()))
    assert scheduler.schedule() is not None
    for seq_id in range(2, 10_002):
        scheduler.add(Sequence(seq_id, [1, 2], SamplingParams()))
        assert scheduler.abort(seq_id) is not None
    assert scheduler.num_waiting == 1
    assert num_sequences() - before < 100
    scheduler.check()


def test_order_survives_many_aborts() -> None:
    """Symptom: after the finished ones are dropped from the queue it is no longer in order."""
    engine = Engine(max_num_seqs=1, num_blocks=8)
    engine.add([0], max_tokens=2)
    engine.step()
    priorities = list(range(80))
    random.Random(0).shuffle(priorities)
    waiting = [engine.add([1, 2], max_tokens=1, priority=priority) for priority in priorities]
    for seq in random.Random(1).sample(waiting, 60):
        engine.abort(seq)
        engine.scheduler.check()
    engine.run()
    admitted = [engine.sequences[seq_id].priority for seq_id in engine.admitted[1:]]
    assert len(admitted) == 20
    assert admitted == sorted(admitted)


@DEPTHS
def test_schedule_is_none_with_nothing_to_do(queue_depth: int) -> None:
    """Symptom: an empty step is launched, or the engine spins."""
    engine = Engine(queue_depth=queue_depth)
    assert engine.launch() is None
    engine.add([1, 2], max_tokens=1)
    assert engine.launch() is not None
    assert engine.launch() is None  # its only token is on its way
    engine.retire()
    assert engine.launch() is None
    engine.run()


def test_depth_one_runs_ahead_of_the_tokens() -> None:
    """Symptom: the next step waits for the last one's tokens, and the device idles between."""
    engine = Engine(queue_depth=1)
    seq = engine.add([1, 2], max_tokens=3)
    schedules = [engine.launch(), engine.launch(), engine.launch(), engine.launch()]
    assert seq.output_token_ids == []
    assert [row[2:5] for schedule in schedules[:3] if schedule for row in schedule.rows] == [
        (0, 2, True),
        (2, 1, True),
        (3, 1, True),
    ]
    assert schedules[3] is None
    engine.run()


def test_decode_step_carries_no_tables() -> None:
    """Symptom: each decode step sends token ids or block tables that the worker already has."""
    engine = Engine(block_size=4)
    engine.add([1, 2, 3])
    deltas = []
    for _ in range(4):
        schedule = engine.launch()
        assert schedule is not None
        deltas.append((len(schedule.admissions), [b.start for b in schedule.new_blocks]))
        engine.retire()
    assert deltas == [(1, []), (0, []), (0, [1]), (0, [])]
    engine.run()


def test_failed_step_costs_no_tokens() -> None:
    """Symptom: after an error the step's requests are lost, or go on from KV never written."""
    engine = Engine(queue_depth=1)
    seq = engine.add([1, 2, 3], max_tokens=6)
    other = engine.add([1, 2, 3], max_tokens=6)
    engine.step()
    engine.step()
    known = seq.output_token_ids
    assert known
    engine.worker.is_broken = True
    engine.launch()
    engine.retire()  # launched before the failure: right
    engine.retire()
    assert seq.output_token_ids[: len(known)] == known
    assert (seq.table_idx, other.table_idx) == (None, None)
    assert engine.manager.num_free_blocks == len(engine.manager.blocks)
    engine.run()


def test_failed_launch_leaves_the_step_before_it_alone() -> None:
    """Symptom: the tokens of the step in flight are dropped, or counted twice."""
    engine = Engine(queue_depth=1)
    seq = engine.add([1, 2, 3], max_tokens=6)
    engine.launch()
    engine.launch(fails_to_launch=True)
    assert seq.table_idx is None
    assert engine.launch() is None  # its token is still on its way
    engine.retire()
    assert seq.num_output_tokens == 1
    engine.run()


def three_right_guesses(token_ids: list[int]) -> list[int]:
    return list(islice(continuation(token_ids), 3))


def three_wrong_guesses(token_ids: list[int]) -> list[int]:
    return [VOCAB_SIZE] * 3  # a token that the fake model never samples


def test_right_drafts_save_steps() -> None:
    """Symptom: drafts are verified one step at a time, or accepted ones are computed again."""
    engine = Engine(propose=three_right_guesses)
    engine.add([1, 2, 3], max_tokens=9)
    engine.run()
    num_tokens = [schedule.num_tokens for schedule, _ in engine.launched]
    assert num_tokens == [3, 4, 4]  # 1 token out, then 4, then 4


def test_wrong_drafts_cost_only_their_rows() -> None:
    """Symptom: a rejected draft stays in the KV cache, the count or the output."""
    engine = Engine(propose=three_wrong_guesses)
    seq = engine.add([1, 2, 3], max_tokens=4)
    engine.run()
    num_tokens = [schedule.num_tokens for schedule, _ in engine.launched]
    assert num_tokens == [3, 3, 2, 1]  # no more drafts than could still be kept
    assert seq.num_output_tokens == 4


def test_drafts_are_cut_to_the_budget() -> None:
    """Symptom: a row of drafts takes more than the step's budget, or is split over two steps."""
    engine = Engine(propose=three_right_guesses, max_num_batched_tokens=2)
    engine.add([1, 2], max_tokens=9)
    engine.step()
    schedule = engine.launch()
    assert schedule is not None
    (row,) = schedule.rows
    assert (row.num_scheduled_tokens, len(row.draft_token_ids), row.samples) == (2, 1, True)
    engine.retire()
    engine.run()


def test_stop_token_among_held_drafts_ends_the_output() -> None:
    """Symptom: tokens after the EOS are returned because they came in the same step."""
    eos_token_ids = frozenset({3})
    engine = Engine(propose=three_right_guesses, eos_token_ids=eos_token_ids)
    seq = engine.add(prompt_that_ends_with(3, eos_token_ids), max_tokens=8)
    engine.run()
    assert seq.finish_reason == "stop"
    assert engine.num_drafts_held >= seq.num_output_tokens - 2


def num_lines_run(function: Callable[[], object]) -> int:
    """Count the lines of Python that `function` runs; each turn of a loop counts."""
    num_lines = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return num_lines


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(10, 8), (40, 4)])
def test_cost_does_not_depend_on_how_many_wait(num_blocks: int, max_num_seqs: int) -> None:
    """Symptom: with 100,000 requests in the queue each step, or each abort, walks over them."""

    def costs(num_waiting: int) -> tuple[int, int]:
        scheduler = Scheduler(
            BlockManager(num_blocks, 4),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            max_model_len=40,
        )
        params = SamplingParams(max_tokens=30)
        for seq_id in range(4):
            scheduler.add(Sequence(seq_id, [seq_id] * 5, params))
        for seq_id in range(4, 4 + num_waiting):
            scheduler.add(Sequence(seq_id, [seq_id] * 12, params))

        def step() -> None:
            schedule = scheduler.schedule()
            assert schedule is not None
            assert len(schedule.rows) == 4
            scheduler.update(schedule, StepResult(schedule.step_id, [[0]] * 4))

        step()
        assert scheduler.num_waiting == num_waiting
        return num_lines_run(step), num_lines_run(lambda: scheduler.abort(5))

    assert costs(num_waiting=2_000) == costs(num_waiting=2)
