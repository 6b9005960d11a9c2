"""What schedules hold of drafts: budgets, blocks, rejected tokens, rows behind drafts in flight.

Imports no torch.
"""

from itertools import islice
from typing import Any

import pytest

from nanovllm.features.speculation import drafting
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import DraftCounts
from nanovllm.testing.fake_engine import (
    VOCAB_SIZE,
    FakeEngine,
    continuation,
    draft_counts,
    fake_controller,
)
from nanovllm.testing.invariants import check_scheduler


def three_right_guesses(token_ids: list[int]) -> list[int]:
    return list(islice(continuation(token_ids), 3))


def three_wrong_guesses(token_ids: list[int]) -> list[int]:
    return [VOCAB_SIZE] * 3  # a token that the fake model never samples


def test_right_drafts_save_steps() -> None:
    """Symptom: drafts are verified one per step, or accepted drafts are computed again."""
    controller = fake_controller(lambda most: min(most, 3))
    engine = FakeEngine(propose=three_right_guesses, controller=controller)
    seq = engine.add([1, 2, 3], max_tokens=9)
    engine.run()
    num_tokens = [schedule.num_tokens for schedule, _ in engine.launched]
    assert num_tokens == [3, 4, 4]  # 1 token out, then 4, then 4
    assert engine.scheduler.stats.num_prefill_tokens == 2
    assert engine.scheduler.stats.num_decode_tokens == 9
    for counts in (draft_counts(seq), engine.drafting.counts):
        assert counts == DraftCounts(2, 6, 6, [2, 2, 2])
        assert counts.mean_acceptance_length == 4


def test_wrong_drafts_cost_only_their_rows() -> None:
    """Symptom: a rejected draft stays in the KV cache, the count or the output."""
    engine = FakeEngine(propose=three_wrong_guesses)
    seq = engine.add([1, 2, 3], max_tokens=4)
    engine.run()
    num_tokens = [schedule.num_tokens for schedule, _ in engine.launched]
    assert num_tokens == [3, 3, 2, 1]  # as many drafts as max_tokens still allows
    assert seq.num_output_tokens == 4
    assert draft_counts(seq) == DraftCounts(2, 3, 0, [0, 0])
    assert engine.scheduler.stats.num_prefill_tokens == 2


def unchanged(output: list[int], logits: Any) -> Any:
    return logits


def test_request_with_a_logits_processor_gets_no_drafts() -> None:
    """Symptom: a processor that counts its calls sees tokens that were guessed wrong."""
    engine = FakeEngine(propose=three_right_guesses)
    params = SamplingParams(max_tokens=9, logits_processors=[unchanged])
    seq = engine.add([1, 2], max_tokens=9)
    seq.params = params
    other = engine.add([2, 3], max_tokens=9)
    engine.run()
    assert draft_counts(seq) == DraftCounts()
    assert draft_counts(other).num_drafts > 0


def test_drafts_are_cut_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a row of drafts takes more than the step's budget, or is split over two steps; or
    logits of hundreds of drafts take more memory than was measured at start.
    """
    engine = FakeEngine(propose=three_right_guesses, max_num_batched_tokens=2)
    engine.add([1, 2], max_tokens=9)
    engine.step()
    schedule = engine.launch()
    assert schedule is not None
    (row,) = schedule.rows
    assert (row.num_scheduled_tokens, row.num_draft_tokens, row.samples) == (2, 1, True)
    engine.retire()
    engine.run()
    monkeypatch.setattr(drafting, "MAX_SAMPLES", 5)
    engine = FakeEngine(propose=three_right_guesses)
    for first in (1, 2, 3):
        engine.add([first], max_tokens=9)
    engine.step()
    schedule = engine.launch()
    assert schedule is not None
    assert sum(1 + row.num_draft_tokens for row in schedule.rows) == 5
    engine.retire()
    engine.run()


def test_prompts_come_before_drafts() -> None:
    """Symptom: drafts take the step's budget, and prompts wait for their first token."""
    engine = FakeEngine(propose=three_right_guesses, max_num_batched_tokens=5)
    engine.add([1], max_tokens=9)
    engine.step()
    engine.add([1, 2, 3, 4, 0, 1], max_tokens=2)
    found = []
    for _ in range(2):
        schedule = engine.launch()
        assert schedule is not None
        found.append([(row.num_scheduled_tokens, row.num_draft_tokens) for row in schedule.rows])
        engine.retire()
    assert found == [[(1, 0), (4, 0)], [(3, 2), (2, 0)]]  # a prompt's chunk gets no drafts
    engine.run()


def test_drafts_take_free_blocks_only() -> None:
    """Symptom: a sequence is preempted, so that another can guess."""
    engine = FakeEngine(num_blocks=4, block_size=2, max_model_len=8, propose=three_wrong_guesses)
    engine.add([1, 2], max_tokens=6)
    engine.add([2, 3], max_tokens=6)
    engine.step()
    schedule = engine.launch()
    assert schedule is not None
    assert engine.preempted == []
    # Each row needs one block; that leaves a place behind its token, and no block.
    assert [row.num_draft_tokens for row in schedule.rows] == [1, 1]
    engine.retire()
    engine.run()


def test_rejected_drafts_give_their_blocks_back() -> None:
    """Symptom: rejected drafts hold blocks for which others wait, or are preempted."""
    engine = FakeEngine(num_blocks=4, block_size=2, max_model_len=8, propose=three_wrong_guesses)
    guessing = engine.add([1, 2], max_tokens=6)
    engine.step()
    engine.launch()
    assert engine.manager.num_free_blocks == 0
    engine.retire()
    assert len(guessing.kv.block_table) == 2  # of 3 computed tokens
    check_scheduler(engine.scheduler)
    engine.add([2, 3, 4], max_tokens=1)
    schedule = engine.launch()
    assert schedule is not None
    assert len(schedule.admissions) == 1
    engine.retire()
    engine.run()
    assert engine.preempted == []


def test_blocks_that_drafts_may_not_reach_are_zeroed() -> None:
    """Symptom: fewer drafts come than scheduled, and a row reads another sequence's masked KV."""
    engine = FakeEngine(block_size=2, max_model_len=16, propose=three_wrong_guesses)
    seq = engine.add([1, 2, 3], max_tokens=12)
    engine.step()
    schedule = engine.launch()
    assert schedule is not None
    (row,) = schedule.rows
    assert (row.num_computed_tokens, row.sample_position, row.end) == (3, 4, 14)
    # The known token fills block 1, which an earlier step began.
    assert schedule.blocks_to_zero == seq.kv.block_table[2:7]
    engine.retire()
    engine.run()


def test_stop_token_among_accepted_drafts_ends_the_output() -> None:
    """Symptom: tokens after EOS are returned, or counted, because they came in the same step."""
    eos_token_ids = frozenset({3})
    engine = FakeEngine(propose=three_right_guesses, eos_token_ids=eos_token_ids, max_model_len=32)
    prompts = [[first, second] for first in range(VOCAB_SIZE) for second in range(VOCAB_SIZE)]
    seqs = [engine.add(prompt, max_tokens=9) for prompt in prompts]
    engine.run()
    # The first token comes of the prompt; then EOS is the 1st to 4th token of a step.
    ends = {(seq.num_output_tokens - 2) % 4 for seq in seqs if seq.output.finish_reason == "stop"}
    assert ends == {0, 1, 2, 3}
    accepted = sum(draft_counts(seq).num_accepted_tokens for seq in seqs)
    assert engine.num_drafts_accepted > accepted


@pytest.mark.parametrize("queue_depth", [0, 4])
def test_error_behind_accepted_drafts_keeps_them(queue_depth: int) -> None:
    """Symptom: a request that fails at its sixth token loses those that came in the same step."""
    engine = FakeEngine(propose=three_right_guesses, queue_depth=queue_depth)
    seq = engine.add([1, 2], max_tokens=9)
    engine.worker.fails_from[seq.seq_id] = 7
    engine.run()
    assert (seq.num_output_tokens, seq.output.finish_reason) == (5, "error")
    seq = engine.add([1, 2], max_tokens=9)
    engine.worker.fails_from[seq.seq_id] = 6
    engine.run()
    assert (seq.num_output_tokens, seq.output.finish_reason) == (4, "error")


def test_drafts_in_flight_survive_the_result_before_them() -> None:
    """Symptom: the result of a step forgets the drafts of the next, and its counts are wrong."""
    engine = FakeEngine(propose=three_right_guesses, queue_depth=1)
    seq = engine.add([1, 2, 3], max_tokens=9)
    engine.launch()
    schedule = engine.launch()  # behind a token that is pending
    assert schedule is not None
    assert schedule.rows[0].sample_position == 4
    assert engine.launch() is None  # where the next token goes is not known yet
    engine.retire()
    check_scheduler(engine.scheduler)
    assert seq.num_draft_tokens == schedule.rows[0].num_draft_tokens > 0
    engine.run()


def one_right_guess(token_ids: list[int]) -> list[int]:
    return [*islice(continuation(token_ids), 1), VOCAB_SIZE, VOCAB_SIZE]


def following_engine(**options: Any) -> FakeEngine:
    """Return an engine whose rows follow drafts in flight, 3 in each step."""
    controller = fake_controller(lambda most: min(most, 3))
    options = {"max_model_len": 32, **options}
    return FakeEngine(queue_depth=1, follows_drafts=True, controller=controller, **options)


def test_rows_follow_drafts_in_flight() -> None:
    """Symptom: a step waits for the host, or counts rejected drafts as computed."""
    engine = following_engine(propose=one_right_guess)
    seq = engine.add([1, 2, 3], max_tokens=20)
    engine.step()
    engine.step()  # known 4: three drafts in flight, of which one is right
    follower = engine.launch()
    assert follower is not None
    (row,) = follower.rows
    # As if all drafts were right. The step before them is in flight, too.
    assert (row.num_computed_tokens, row.sample_position, row.num_unverified_tokens) == (7, 8, 3)
    assert row.num_draft_tokens == 3
    assert engine.worker.rows[0].num_computed_tokens == 5
    engine.retire()
    assert (len(seq.token_ids), seq.num_computed_tokens, seq.num_draft_tokens) == (6, 9, 3)
    check_scheduler(engine.scheduler)
    engine.run()


def test_rows_that_follow_drafts_leave_room_for_all_of_them() -> None:
    """Symptom: more tokens than max_tokens are drawn, because all drafts in flight were right."""
    engine = following_engine(propose=three_right_guesses)
    engine.add([1, 2, 3], max_tokens=5)
    engine.step()
    schedule = engine.launch()
    assert schedule is not None
    assert schedule.rows[0].num_draft_tokens == 3
    assert engine.launch() is None  # the last token may be among those in flight
    engine.run()


def test_rows_that_follow_drafts_wait_beside_a_prompt() -> None:
    """Symptom: a row whose position only the device knows is in a step that no graph can run; or
    what it got for the step is lost.
    """
    engine = following_engine(propose=three_right_guesses)
    seq = engine.add([1, 2, 3], max_tokens=20)
    engine.step()
    engine.step()
    blocks = list(seq.kv.block_table)
    engine.add([2, 3, 4], max_tokens=20)
    schedule = engine.launch()
    assert schedule is not None
    assert [row.seq_id for row in schedule.rows] == [1]
    assert seq.kv.block_table == blocks
    check_scheduler(engine.scheduler)
    engine.run()
    rows = [row for schedule, _ in engine.launched for row in schedule.rows]
    assert any(row.num_unverified_tokens for row in rows), "no row is behind drafts in flight"


def test_rows_that_follow_drafts_preempt_nobody() -> None:
    """Symptom: drafts that are rejected cost another sequence its KV."""
    engine = following_engine(propose=three_wrong_guesses, num_blocks=6, max_model_len=12)
    engine.add([1, 2], max_tokens=10)
    last = engine.add([2, 3], max_tokens=10)
    engine.step()
    engine.step()
    assert engine.manager.num_free_blocks == 0
    assert engine.launch() is None  # both would need a block if their drafts were right
    engine.retire()
    assert engine.launch() is not None
    assert engine.preempted == []
    engine.abort(last)
    engine.run()


def test_preempted_sequence_forgets_its_drafts() -> None:
    """Symptom: drafts in flight count as tokens to compute when their sequence resumes."""
    engine = FakeEngine(
        num_blocks=5, block_size=2, max_model_len=10, queue_depth=1, propose=three_right_guesses
    )
    first = engine.add([1, 2, 3], max_tokens=7)
    last = engine.add([2, 3, 4], max_tokens=7)
    engine.run()
    assert engine.preempted
    assert set(engine.preempted) == {last.seq_id}
    assert first.num_output_tokens == last.num_output_tokens == 7
