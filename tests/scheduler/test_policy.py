"""Policies: another order of the waiting, another victim, another share. Imports no torch."""

from collections.abc import Sequence as Seq

import pytest

from examples.lab.fair_share import FairShare
from examples.lab.shortest_job_first import AGEING, ShortestFirst
from nanovllm.core.sequence import Sequence
from nanovllm.scheduler.fair_policy import FairPolicy
from nanovllm.scheduler.policy import Policy
from nanovllm.testing.fake_engine import FakeEngine
from nanovllm.testing.invariants import check_scheduler


def test_the_shortest_goes_first() -> None:
    engine = FakeEngine(
        max_num_seqs=1, max_model_len=200, num_blocks=200, make_policy=ShortestFirst
    )
    for max_tokens in (150, 100, 2):
        engine.add([1, 2], max_tokens=max_tokens, ignore_eos=True)
    engine.run()
    assert engine.admitted == [2, 1, 0]


def test_a_long_one_does_not_starve() -> None:
    """More short ones come than the engine can run, and each is shorter."""
    engine = FakeEngine(
        max_num_seqs=1, max_model_len=200, num_blocks=200, make_policy=ShortestFirst
    )
    engine.add([1], max_tokens=2, ignore_eos=True)
    long = engine.add([1, 2], max_tokens=100, ignore_eos=True)
    for _ in range(40):
        engine.add([1, 2], max_tokens=2, ignore_eos=True)
        engine.step()
    assert engine.admitted.index(long.seq_id) <= 100 // AGEING + 2
    engine.run()


def test_a_step_goes_in_the_order_of_the_policy() -> None:
    """Also when the sequence that decodes has an earlier arrival, and the pool preempts."""
    engine = FakeEngine(
        num_blocks=12, block_size=2, max_num_seqs=4, max_model_len=20, make_policy=ShortestFirst
    )
    for seed in range(12):
        engine.add([seed % 5, 1, 2], max_tokens=2 + 5 * seed % 16, ignore_eos=True)
        engine.step()
        check_scheduler(engine.scheduler)
    engine.run()
    assert engine.preempted


class LongestVictim(FairPolicy):
    """Preempts the sequence that holds the most KV."""

    def victim(self, candidates: Seq[Sequence]) -> Sequence:
        return max(candidates, key=lambda seq: len(seq.kv.block_table))


def test_the_policy_chooses_the_victim() -> None:
    victims = []
    for make in (FairPolicy, LongestVictim):
        engine = FakeEngine(
            num_blocks=9, block_size=2, max_num_seqs=3, max_model_len=18, make_policy=make
        )
        engine.add([1, 2], max_tokens=16, ignore_eos=True)
        engine.add([1, 2, 3, 4, 0, 1, 2, 3], max_tokens=10, ignore_eos=True)
        engine.add([2, 3], max_tokens=16, ignore_eos=True)
        engine.step_until(lambda engine=engine: engine.scheduler.stats.num_preemptions)
        (waiting,) = [s for s in engine.sequences if s.was_admitted and s.table_idx is None]
        victims.append(waiting.seq_id)
        while engine.step():
            check_scheduler(engine.scheduler)
    assert victims == [2, 1]


class SmallShares(FairPolicy):
    """Computes at most two tokens of a prompt in a step."""

    def share(self, seq: Sequence, num_missing: int, budget: int) -> int:
        return min(2, num_missing, budget)


@pytest.mark.parametrize("state_pages", [0, 2])
def test_the_policy_shares_a_step(state_pages: int) -> None:
    """What a prompt leaves goes to the next ones."""
    engine = FakeEngine(make_policy=SmallShares, state_pages=state_pages, max_num_batched_tokens=7)
    for _ in range(3):
        engine.add([1, 2, 3, 4, 0], max_tokens=1)
    engine.run()
    rows = [[row.num_scheduled_tokens for row in s.rows] for s, _ in engine.launched]
    assert rows == [[2, 2, 2], [2, 2, 2], [1, 1, 1]]


class NotesEnds(FairPolicy):
    def __init__(self) -> None:
        super().__init__()
        self.ended: list[int] = []

    def end(self, seq: Sequence) -> None:
        assert not seq.is_queued
        self.ended.append(seq.seq_id)


def test_the_policy_is_told_of_each_end_once() -> None:
    policy = NotesEnds()
    engine = FakeEngine(num_blocks=9, block_size=2, max_num_seqs=2, max_model_len=18,
                    make_policy=lambda: policy)  # fmt: skip
    sequences = [engine.add([n, 2], max_tokens=10, ignore_eos=True) for n in range(4)]
    engine.step()
    for aborted in (sequences[0], sequences[3]):  # one that runs, one that waits
        engine.abort(aborted)
    assert policy.ended == [0, 3]
    engine.run()
    assert sorted(policy.ended) == [0, 1, 2, 3]


@pytest.mark.parametrize(("make", "is_fair"), [(FairPolicy, False), (FairShare, True)])
def test_a_fair_share_is_of_the_tokens_used(make: type[Policy], is_fair: bool) -> None:
    """Both users' requests take 12 tokens; one may take 96 and ends early, as most texts do."""
    engine = FakeEngine(max_num_seqs=1, max_model_len=100, num_blocks=100, make_policy=make)
    for _ in range(60):
        engine.add([1] * 8, max_tokens=4, ignore_eos=True, user="exact")
        engine.add([1] * 8, max_tokens=88, ignore_eos=True, user="early")
    while len(engine.admitted) < 60:
        engine.step()
        for seq in list(engine.scheduler.running):
            if len(seq.token_ids) == 12:
                engine.abort(seq)
    early = sum(engine.sequences[seq_id].user == "early" for seq_id in engine.admitted)
    assert (early >= 25) == is_fair, early
