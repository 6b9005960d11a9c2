"""The order of admission: priorities, then users in turns, then arrival. Nobody starves.

Imports no torch.
"""

from collections import Counter
from itertools import count
from typing import Any

import pytest
from hypothesis import (
    given,
    settings,
    strategies as st,
)
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanovllm.core.sequence import Sequence
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.scheduler.fair_policy import FairPolicy
from nanovllm.testing.fake_engine import FakeEngine
from nanovllm.testing.invariants import sequences_of
from tests.every_case import examples
from tests.scheduler.test_scheduler import num_lines_run

INDEX = st.integers(0, 31)
COST = st.integers(1, 40)


def make_seq(seq_id: int, cost: int, user: str = "", priority: int = 0) -> Sequence:
    seq = Sequence(seq_id, [0], SamplingParams(), user=user, priority=priority)
    seq.max_num_tokens = cost
    return seq


def pop(queue: FairPolicy) -> Sequence:
    """Admit the first sequence and compute its prompt, as the scheduler does."""
    seq = queue.first()
    assert seq is not None
    queue.advance(seq, 0)
    queue.remove(seq)
    return seq


class Rounds:
    """The prompts of one priority, without heaps: a list, and the rounds that users have used."""

    def __init__(self) -> None:
        self.now = 0
        self.used: dict[str, int] = {}  # rounds by user, of those with prompts
        self.prompts: list[Sequence] = []
        self.turns: dict[Sequence, int] = {}  # of those that were admitted

    def push(self, seq: Sequence) -> None:
        self.used.setdefault(seq.user, self.now)
        if seq not in self.prompts:
            self.prompts.append(seq)

    def remove(self, seq: Sequence) -> None:
        self.prompts.remove(seq)
        if all(other.user != seq.user for other in self.prompts):
            del self.used[seq.user]

    def first(self) -> Sequence:
        users = {seq.user: seq for seq in sorted(self.prompts, key=lambda s: -s.seq_id)}
        return min(users.values(), key=lambda seq: (self.turn(seq), seq.seq_id))

    def turn(self, seq: Sequence) -> int:
        return self.turns.get(seq, self.used.get(seq.user, 0) + seq.max_num_tokens)

    def advance(self, seq: Sequence, num_left: int) -> None:
        self.turns[seq] = self.turn(seq)
        self.used[seq.user] = max(self.used[seq.user], self.turns[seq])
        self.now = max(self.now, self.turns[seq] - num_left)
        if num_left == 0:
            self.remove(seq)


class QueueMachine(RuleBasedStateMachine):
    """Random arrivals, chunks of prompts, preemptions and aborts, beside `Rounds`."""

    users = ("", "ann", "bob", "eve")

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairPolicy()
        self.rounds: dict[int, Rounds] = {}  # by priority
        self.seq_ids = count(0, 10)
        self.queued: list[Sequence] = []
        self.running: list[Sequence] = []  # some of them queued, as their prompt is not computed
        self.served: dict[Sequence, int] = {}  # tokens whose rounds have passed
        self.paid: Counter[tuple[int, str]] = Counter()  # tokens admitted, by priority and user
        self.largest: Counter[tuple[int, str]] = Counter()
        self.before: dict[Sequence, tuple[Counter[tuple[int, str]], int]] = {}

    def push(self, seq: Sequence) -> None:
        # The rounds of a priority begin again where those of all before have ended.
        begin = max([0, *(rounds.now for rounds in self.rounds.values())])
        rounds = self.rounds.setdefault(seq.priority, Rounds())
        if not rounds.prompts:
            rounds.now = begin
        rounds.push(seq)
        self.queue.push(seq)
        seq.is_queued = True
        if seq not in self.queued:
            self.queued.append(seq)

    @rule(index=INDEX, cost=COST, priority=st.sampled_from([0, 0, 0, -1, 2]))
    def arrive(self, index: int, cost: int, priority: int) -> None:
        seq = make_seq(next(self.seq_ids), cost, self.users[index % len(self.users)], priority)
        self.new(seq)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, cost=COST)
    def arrive_as_a_late_continuation(self, index: int, cost: int) -> None:
        """The second sequence of a request with n > 1: queued late, with an early id."""
        first = self.running[index % len(self.running)]
        if first.seq_id % 10 == 0 and not first.is_queued:
            self.running.remove(first)
            self.new(make_seq(first.seq_id + 1, cost, first.user, first.priority))

    def new(self, seq: Sequence) -> None:
        key = (seq.priority, seq.user)
        self.largest[key] = max(self.largest[key], seq.max_num_tokens)
        self.before[seq] = (self.tokens_served(), self.paid[key])
        self.push(seq)

    def tokens_served(self) -> Counter[tuple[int, str]]:
        found: Counter[tuple[int, str]] = Counter()
        for seq, num_tokens in self.served.items():
            found[seq.priority, seq.user] += num_tokens
        return found

    @precondition(lambda self: self.queued)
    @rule(num=st.integers(1, 3), num_left=st.sampled_from([0, 0, 0, 3, 20]))
    def compute(self, num: int, num_left: int) -> None:
        for _ in range(min(num, len(self.queued))):
            priority = min(seq.priority for seq in self.queued)
            seq = self.rounds[priority].first()
            assert self.queue.first() is seq
            is_new = not seq.has_turn
            num_left = min(num_left, seq.max_num_tokens - 1)
            for queue in (self.queue, self.rounds[priority]):
                queue.advance(seq, num_left)
            assert seq.has_turn
            self.served[seq] = max(self.served.get(seq, 0), seq.max_num_tokens - num_left)
            if seq not in self.running:
                self.running.append(seq)
            if num_left == 0:
                self.queue.remove(seq)
                seq.is_queued = False
                self.queued.remove(seq)
            if is_new:
                self.check_bound(seq)

    def check_bound(self, seq: Sequence) -> None:
        """Check for how many tokens of others a sequence waited: the bound in `FairPolicy`."""
        key = (seq.priority, seq.user)
        served_before, paid_before = self.before[seq]
        self.paid[key] += seq.max_num_tokens
        own, served = self.paid[key] - paid_before, self.tokens_served()
        for other, largest in self.largest.items():
            if other[0] == seq.priority and other != key:
                assert served[other] - served_before[other] <= own + largest

    @precondition(lambda self: self.running)
    @rule(index=INDEX)
    def preempt(self, index: int) -> None:
        self.push(self.running.pop(index % len(self.running)))

    @precondition(lambda self: self.running)
    @rule(index=INDEX)
    def finish(self, index: int) -> None:
        seq = self.running[index % len(self.running)]
        if seq.is_queued:
            self.abort(self.queued.index(seq))
        else:
            self.running.remove(seq)

    @precondition(lambda self: self.queued)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        seq = self.queued.pop(index % len(self.queued))
        if seq in self.running:
            self.running.remove(seq)
        self.queue.remove(seq)
        self.rounds[seq.priority].remove(seq)

    @invariant()
    def holds_who_is_queued(self) -> None:
        found = sorted(seq.seq_id for seq in sequences_of(self.queue))
        assert found == sorted(seq.seq_id for seq in self.queued)
        if not self.queued:
            assert self.queue.first() is None

    def teardown(self) -> None:
        while self.queued:
            self.compute(1, 0)
        assert self.queue.first() is None


QueueMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None, derandomize=True
)

TestQueue = QueueMachine.TestCase


def test_late_user_is_not_preempted_for_what_others_sent_before() -> None:
    """Symptom: with victims by arrival, a late user loses its KV again and again to older ones."""
    engine = FakeEngine(num_blocks=10, block_size=2, max_num_seqs=8, max_model_len=16)
    for _ in range(40):
        engine.add([1], max_tokens=12, user="many")
    for _ in range(2):
        engine.step()
    late = engine.add([2], max_tokens=12, user="late")
    engine.step_until(lambda: late.is_finished)
    before = [seq for seq in engine.sequences if seq.was_admitted and seq.turn < late.turn]
    assert engine.preempted.count(late.seq_id) <= len(before)
    assert sum(seq.is_finished for seq in engine.sequences) <= len(before) + 4
    engine.run()


@pytest.mark.parametrize("other", [{"priority": -1}, {"user": "other"}])
def test_first_token_does_not_wait_for_a_running_prompt(other: dict[str, Any]) -> None:
    """Symptom: an urgent request, or another user's, waits for a whole prompt of 50 tokens."""
    engine = FakeEngine(num_blocks=64, max_model_len=64, max_num_batched_tokens=4)
    long = engine.add([1] * 50, max_tokens=2)
    engine.step()
    urgent = engine.add([2, 3], max_tokens=2, **other)
    engine.step()
    assert urgent.num_output_tokens == 1
    assert long.num_computed_tokens == 6  # what was left of the step
    engine.run()


PROMPTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(-1, 1), st.sampled_from(["", "ann", "bob"])),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, derandomize=True, max_examples=15)
@given(before=PROMPTS, num_steps=st.integers(0, 12), new=PROMPTS, queue_depth=st.integers(0, 1))
def test_waiting_sequence_before_a_running_prompt_is_in_the_next_step(
    before: list[tuple[int, int, str]],
    num_steps: int,
    new: list[tuple[int, int, str]],
    queue_depth: int,
) -> None:
    engine = FakeEngine(
        num_blocks=600,
        max_model_len=50,
        max_num_batched_tokens=5,
        max_num_seqs=16,
        queue_depth=queue_depth,
    )
    for length, priority, user in before:
        engine.add([1] * length, max_tokens=4, priority=priority, user=user)
    for _ in range(num_steps):
        engine.step()
    for length, priority, user in new:
        engine.add([2] * length, max_tokens=4, priority=priority, user=user)
    while engine.step():
        first, order = engine.scheduler.policy.first(), engine.scheduler.policy.order
        seqs = [engine.sequences[row.seq_id] for row in engine.launched[-1][0].rows]
        prompts = [seq for seq in seqs if seq.is_queued]  # at most the last one
        assert first is None or all(seq is first or order(seq) < order(first) for seq in prompts)
    engine.run()


@settings(deadline=None, derandomize=True, max_examples=6)
@given(
    length=st.integers(1, 200),
    budget=st.integers(2, 16),
    others=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 6)), min_size=1, max_size=3),
)
def test_no_prompt_starves(length: int, budget: int, others: list[tuple[int, int]]) -> None:
    """Other users send a new request as soon as they wait for none; each takes its share at most.

    Args:
        others: lengths of each user's prompts and outputs.
    """
    engine = FakeEngine(
        num_blocks=5000, max_model_len=256, max_num_batched_tokens=budget, max_num_seqs=64
    )

    def send() -> None:
        for user, (num_prompt_tokens, max_tokens) in enumerate(others):
            if not any(s.user == f"{user}" and s.is_queued for s in engine.sequences):
                engine.add([2] * num_prompt_tokens, max_tokens, user=f"{user}")

    for _ in range(5):
        send()
        engine.step()
    long = engine.add([1] * length, max_tokens=1)
    most = length + 1 + sum(length + 1 + 2 * sum(other) for other in others)
    for _ in range(-(-most // budget) + 1):
        send()
        engine.step()
    assert not long.is_queued
    engine.run()


@pytest.mark.parametrize("num_users", [1, 100])
def test_cost_of_each_operation_does_not_grow_with_the_queue(num_users: int) -> None:
    """Symptom: a step iterates over all who wait, or over all users."""

    def costs(num_waiting: int) -> list[int]:
        queue = FairPolicy()
        for seq_id in range(num_waiting):
            queue.push(make_seq(seq_id, 10, str(seq_id % num_users)))
        other = make_seq(num_waiting, 10, "0")
        last = make_seq(num_waiting + 1, 10, "0")
        queue.push(last)
        return [
            num_lines_run(operation)
            for operation in (
                queue.first,
                lambda: pop(queue),
                queue.first,
                lambda: queue.push(other),
                lambda: queue.remove(last),
            )
        ]

    assert costs(num_waiting=5_000) == costs(num_waiting=200)
