"""The order of admission: priorities, then users in turns, then arrival. Nobody starves.

Imports no torch.
"""

from collections import Counter
from itertools import count

import pytest
from hypothesis import (
    given,
    settings,
    strategies as st,
)
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler.sequence import Sequence
from nanovllm.scheduler.waiting_queue import WaitingQueue
from tests.scheduler.fake_engine import Engine
from tests.scheduler.test_scheduler import num_lines_run

INDEX = st.integers(0, 31)
COST = st.integers(1, 40)


def make_seq(seq_id: int, cost: int, user: str = "", priority: int = 0) -> Sequence:
    seq = Sequence(seq_id, [0], SamplingParams(), user=user, priority=priority)
    seq.max_num_tokens = cost
    return seq


def pop(queue: WaitingQueue) -> Sequence:
    """Admit the first sequence, as the scheduler does."""
    first = queue.first()
    seq = queue.pop()
    assert seq is first
    seq.num_cached_tokens = seq.num_cached_tokens or 0
    return seq


class Rounds:
    """Deficit round robin of one priority as in the paper: round by round, a token for each."""

    def __init__(self) -> None:
        self.saved: dict[str, int] = {}  # by user, in the order in which they began to wait
        self.waiting: dict[str, list[Sequence]] = {}

    def push(self, seq: Sequence) -> None:
        self.saved.setdefault(seq.user, 0)
        sequences = self.waiting.setdefault(seq.user, [])
        sequences.append(seq)
        sequences.sort(key=lambda s: s.seq_id)

    def remove(self, seq: Sequence) -> None:
        self.waiting[seq.user].remove(seq)
        if not self.waiting[seq.user]:
            del self.waiting[seq.user], self.saved[seq.user]

    def first(self) -> Sequence:
        firsts = [sequences[0] for sequences in self.waiting.values()]
        preempted = [seq for seq in firsts if seq.was_admitted]
        if preempted:
            return min(preempted, key=lambda seq: (seq.turn, seq.seq_id))
        saved = dict(self.saved)
        while True:
            left = {user: saved[user] - self.waiting[user][0].max_num_tokens for user in saved}
            user = max(left, key=lambda user: left[user])  # the first of those with the most
            if left[user] >= 0:
                return self.waiting[user][0]
            saved = {user: tokens + 1 for user, tokens in saved.items()}

    def pop(self) -> Sequence:
        seq = self.first()
        if not seq.was_admitted:
            while self.saved[seq.user] < seq.max_num_tokens:
                self.saved = {user: tokens + 1 for user, tokens in self.saved.items()}
            self.saved[seq.user] -= seq.max_num_tokens
        self.remove(seq)
        return seq


class QueueMachine(RuleBasedStateMachine):
    """Random arrivals, admissions, preemptions and aborts, beside `Rounds`."""

    users = ("", "ann", "bob", "eve")

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.rounds: dict[int, Rounds] = {}  # by priority
        self.seq_ids = count(0, 10)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.paid: Counter[tuple[int, str]] = Counter()  # tokens admitted, by priority and user
        self.largest: Counter[tuple[int, str]] = Counter()
        self.paid_at_arrival: dict[Sequence, Counter[tuple[int, str]]] = {}

    def push(self, seq: Sequence) -> None:
        self.queue.push(seq)
        self.rounds.setdefault(seq.priority, Rounds()).push(seq)
        self.waiting.append(seq)

    @rule(index=INDEX, cost=COST, priority=st.sampled_from([0, 0, 0, -1, 2]))
    def arrive(self, index: int, cost: int, priority: int) -> None:
        seq = make_seq(next(self.seq_ids), cost, self.users[index % len(self.users)], priority)
        self.new(seq)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, cost=COST)
    def arrive_as_a_late_continuation(self, index: int, cost: int) -> None:
        """The second sequence of a request with n > 1: queued late, with an early id."""
        first = self.running[index % len(self.running)]
        if first.seq_id % 10 == 0:
            self.running.remove(first)
            self.new(make_seq(first.seq_id + 1, cost, first.user, first.priority))

    def new(self, seq: Sequence) -> None:
        key = (seq.priority, seq.user)
        self.largest[key] = max(self.largest[key], seq.max_num_tokens)
        self.paid_at_arrival[seq] = self.paid.copy()
        self.push(seq)

    @precondition(lambda self: self.waiting)
    @rule(num=st.integers(1, 3))
    def admit(self, num: int) -> None:
        for _ in range(min(num, len(self.waiting))):
            priority = min(seq.priority for seq in self.waiting)
            expected = self.rounds[priority].first()
            is_new = not expected.was_admitted
            assert self.rounds[priority].pop() is expected
            assert pop(self.queue) is expected
            self.waiting.remove(expected)
            self.running.append(expected)
            if is_new:
                self.check_bound(expected)

    def check_bound(self, seq: Sequence) -> None:
        """Check for how many tokens of others a sequence waited: the bound in `WaitingQueue`."""
        key, before = (seq.priority, seq.user), self.paid_at_arrival[seq]
        self.paid[key] += seq.max_num_tokens
        own = self.paid[key] - before[key]
        for other, largest in self.largest.items():
            if other[0] == seq.priority and other != key:
                assert self.paid[other] - before[other] <= own + largest

    @precondition(lambda self: self.running)
    @rule(index=INDEX)
    def preempt(self, index: int) -> None:
        self.push(self.running.pop(index % len(self.running)))

    @precondition(lambda self: self.running)
    @rule(index=INDEX)
    def finish(self, index: int) -> None:
        self.running.pop(index % len(self.running))

    @precondition(lambda self: self.waiting)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        seq = self.waiting.pop(index % len(self.waiting))
        self.queue.remove(seq)
        self.rounds[seq.priority].remove(seq)

    @invariant()
    def holds_who_waits(self) -> None:
        assert sorted(seq.seq_id for seq in self.queue) == sorted(s.seq_id for s in self.waiting)
        if not self.waiting:
            assert self.queue.first() is None

    def teardown(self) -> None:
        while self.waiting:
            self.admit(1)
        assert self.queue.first() is None


class OneUserMachine(QueueMachine):
    """With one user the order is (priority, arrival), whatever the costs."""

    users = ("ann",)

    @invariant()
    def goes_by_priority_and_arrival(self) -> None:
        expected = min(self.waiting, key=lambda seq: (seq.priority, seq.seq_id), default=None)
        assert self.queue.first() is expected
        assert all(seq.turn == 0 for seq in self.running)


QueueMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
OneUserMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, derandomize=True
)

TestQueue = QueueMachine.TestCase

TestOneUser = OneUserMachine.TestCase


@settings(deadline=None, derandomize=True)
@given(cost=COST, others=st.lists(COST, min_size=1, max_size=4), num_before=st.integers(0, 30))
def test_new_user_waits_for_its_cost_and_one_sequence_of_each_other(
    cost: int, others: list[int], num_before: int
) -> None:
    queue = WaitingQueue()
    for seq_id in range(40 * len(others)):
        user = seq_id % len(others)
        queue.push(make_seq(seq_id, others[user], f"other {user}"))
    for _ in range(num_before):
        pop(queue)
    new = make_seq(100_000, cost, "new")
    queue.push(new)
    paid: Counter[str] = Counter()
    while (seq := pop(queue)) is not new:
        paid[seq.user] += seq.max_num_tokens
    assert all(paid[f"other {i}"] <= cost + largest for i, largest in enumerate(others))


def test_users_share_tokens_and_not_requests() -> None:
    queue = WaitingQueue()
    for seq_id in range(400):
        queue.push(make_seq(seq_id, *((10, "small") if seq_id % 2 else (50, "large"))))
    paid = Counter[str]()
    for _ in range(120):
        seq = pop(queue)
        paid[seq.user] += seq.max_num_tokens
        assert abs(paid["small"] - paid["large"]) <= 50
    assert paid["small"] == paid["large"] == 1000


def test_one_request_is_not_behind_a_thousand_of_another_user() -> None:
    """Symptom: one user with 1,000 requests starves another with one."""
    engine = Engine(max_num_seqs=2)
    for _ in range(1000):
        engine.add([1, 2], max_tokens=2, user="many")
    for _ in range(3):
        engine.step()
    one = engine.add([2, 3], max_tokens=2, user="one")
    engine.step_until(lambda: one.was_admitted)
    assert len(engine.admitted) < 10
    engine.step_until(lambda: one.is_finished)


def test_late_user_is_not_preempted_for_what_others_sent_before() -> None:
    """Symptom: with victims by arrival, a late user loses its KV again and again to older ones."""
    engine = Engine(num_blocks=10, block_size=2, max_num_seqs=8, max_model_len=16)
    for _ in range(40):
        engine.add([1], max_tokens=12, user="many")
    for _ in range(2):
        engine.step()
    late = engine.add([2], max_tokens=12, user="late")
    engine.step_until(lambda: late.is_finished)
    before = [seq for seq in engine.sequences if seq.turn == 0 and seq.was_admitted]
    assert engine.preempted.count(late.seq_id) <= len(before)
    assert sum(seq.is_finished for seq in engine.sequences) <= len(before) + 4
    engine.run()


@pytest.mark.parametrize("num_users", [1, 100])
def test_cost_of_each_operation_does_not_grow_with_the_queue(num_users: int) -> None:
    """Symptom: a step iterates over all who wait, or over all users."""

    def costs(num_waiting: int) -> list[int]:
        queue = WaitingQueue()
        for seq_id in range(num_waiting):
            queue.push(make_seq(seq_id, 10, str(seq_id % num_users)))
        other = make_seq(num_waiting, 10, "0")
        last = make_seq(num_waiting + 1, 10, "0")
        queue.push(last)
        return [
            num_lines_run(operation)
            for operation in (
                queue.first,
                queue.pop,
                queue.first,
                lambda: queue.push(other),
                lambda: queue.remove(last),
            )
        ]

    assert costs(num_waiting=5_000) == costs(num_waiting=200)


def test_many_aborts_leave_no_memory() -> None:
    queue = WaitingQueue()
    queue.push(make_seq(0, 10, "patient"))
    for seq_id in range(1, 3_000):
        seq = make_seq(seq_id, 10, f"user {seq_id}", priority=seq_id % 7)
        queue.push(seq)
        queue.remove(seq)
    (level,) = queue._levels.values()
    assert len(level._turns._entries) < 50
    assert len(queue._priorities._entries) < 50
    assert [seq.seq_id for seq in queue] == [0]
