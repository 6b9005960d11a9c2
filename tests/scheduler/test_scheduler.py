"""What each schedule holds: admissions, budgets, preemption, aborts and failures.

Imports no torch.
"""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import nanovllm
from nanovllm.core.messages import StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.testing.fake_engine import (
    FakeEngine,
)
from nanovllm.testing.invariants import check_scheduler

DEPTHS = pytest.mark.parametrize("queue_depth", [0, 1, 4])


@pytest.mark.parametrize("module", ["nanovllm", "nanovllm.scheduler.scheduler"])
def test_import_needs_no_torch(module: str) -> None:
    """Symptom: `import nanovllm` takes seconds, and the scheduler's tests need torch."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    root = Path(nanovllm.__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@DEPTHS
def test_identical_prompts_in_one_step_share_no_block(queue_depth: int) -> None:
    """Symptom: the second prompt reads blocks that the first is still writing."""
    engine = FakeEngine(queue_depth=queue_depth)
    prompt = [1, 2, 3, 4, 0, 1]
    twins = [engine.add(prompt), engine.add(prompt)]
    schedule = engine.launch()
    assert schedule is not None
    assert len(schedule.rows) == 2
    assert not set(twins[0].kv.block_table) & set(twins[1].kv.block_table)
    engine.run()
    third = engine.add(prompt)
    engine.run()
    assert [seq.num_cached_tokens for seq in [*twins, third]] == [0, 0, 4]


def test_fully_cached_prompt_of_whole_blocks_computes_its_last_one() -> None:
    """Symptom: the row has no tokens to compute, so no hidden state to sample from."""
    engine = FakeEngine(block_size=4)
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
    """Symptom: the engine crashes when a running sequence needs a block and none is free."""
    engine = FakeEngine(num_blocks=4, block_size=2, max_model_len=8, queue_depth=queue_depth)
    first = engine.add([1, 2, 3], max_tokens=5)
    last = engine.add([2, 3, 4], max_tokens=5)
    engine.run()
    assert engine.preempted == [last.seq_id]
    assert first.num_output_tokens == last.num_output_tokens == 5


def test_preempted_sequence_waits_for_its_token_in_flight() -> None:
    """Symptom: a sequence resumes before its last token is known, and loses that token."""
    engine = FakeEngine(num_blocks=4, block_size=2, max_model_len=8, queue_depth=1)
    first = engine.add([1, 2, 3], max_tokens=5)
    last = engine.add([2, 3, 4], max_tokens=5)
    engine.launch()
    engine.launch()
    engine.retire()
    engine.launch()
    assert engine.preempted == [last.seq_id]
    assert last.num_pending_tokens == 1
    engine.abort(first)  # so blocks are free again
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
    engine = FakeEngine(max_model_len=8, block_size=3, queue_depth=queue_depth)
    seq = engine.add([1] * num_prompt_tokens, max_tokens=100)
    engine.run()
    assert seq.output.finish_reason == "length"
    assert len(seq.token_ids) == 8


def test_max_num_seqs_counts_residents_in_chunked_prefill() -> None:
    """Symptom: sequences without a row in the step are not counted, and too many hold blocks."""
    engine = FakeEngine(max_num_seqs=2, max_num_batched_tokens=3)
    for first in range(4):
        engine.add([first, 1, 2, 3, 4], max_tokens=3)
    holders = []
    for _ in range(6):
        engine.step()
        holders.append([seq.seq_id for seq in engine.sequences if seq.kv.block_table])
    # Step 1: 3 tokens of sequence 0. Step 2: its last 2, and 1 of sequence 1. Sequence 2 waits
    # until one of them ends.
    assert holders == [[0], [0, 1], [0, 1], [1], [1, 2], [2]]
    engine.run()


def test_finished_chunk_is_cached_before_its_prompt_is_done() -> None:
    """Symptom: a long prompt's prefix cannot be shared until its last chunk is computed."""
    engine = FakeEngine(max_num_batched_tokens=4)
    engine.add([1, 2, 3, 4, 0, 1])
    engine.step()
    twin = engine.add([1, 2, 3, 4, 0, 1])
    engine.step()
    assert twin.num_cached_tokens == 4
    engine.run()


def test_chunked_prefill_runs_beside_decodes() -> None:
    """Symptom: a long prompt stops the decoding sequences, or exceeds the budget."""
    engine = FakeEngine(max_num_batched_tokens=4)
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


def test_small_requests_do_not_pass_the_head_of_the_queue() -> None:
    """Symptom: small requests starve a large one."""
    engine = FakeEngine(num_blocks=8, block_size=2)
    engine.add([1] * 8, max_tokens=4)
    engine.step()
    large = engine.add([2] * 14, max_tokens=2)
    small = engine.add([3], max_tokens=2)
    engine.step()
    assert (large.table_idx, small.table_idx) == (None, None)
    engine.run()
    assert engine.admitted == [0, 1, 2]


def test_a_finished_sequence_may_get_another_reason() -> None:
    """Symptom: a stop string in the last allowed token is told as "length", or frees twice."""
    engine = FakeEngine()
    seq = engine.add([1, 2])
    engine.run()
    assert seq.output.finish_reason == "length"
    engine.scheduler.finish(seq, "stop", "a stop string")
    assert (seq.output.finish_reason, seq.output.stop_reason) == ("stop", "a stop string")
    check_scheduler(engine.scheduler)


def test_aborted_waiting_requests_free_their_memory() -> None:
    """Symptom: aborted requests behind a blocked one keep their memory."""

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
        waiting = Sequence(seq_id, [1, 2], SamplingParams())
        scheduler.add(waiting)
        scheduler.finish(waiting, "abort")
    assert scheduler.num_waiting == 1
    assert num_sequences() - before < 100
    check_scheduler(scheduler)


def test_decode_step_carries_no_tables() -> None:
    """Symptom: each decode step sends token ids or block tables that the worker already has."""
    engine = FakeEngine(block_size=4)
    engine.add([1, 2, 3])
    deltas = []
    for _ in range(4):
        schedule = engine.launch()
        assert schedule is not None
        deltas.append((len(schedule.admissions), [b.start for b in schedule.new_blocks]))
        engine.retire()
    assert deltas == [(1, []), (0, []), (0, [1]), (0, [])]
    engine.run()


@DEPTHS
def test_blocks_of_a_failed_sequence_leave_the_prefix_cache(queue_depth: int) -> None:
    """Symptom: KV that is NaN is served from the cache for ever. Running sequences keep hits."""
    engine = FakeEngine(queue_depth=queue_depth, max_num_batched_tokens=6)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 4]
    sharer = engine.add(prompt[:5], max_tokens=30)
    engine.step_until(lambda: sharer.num_output_tokens)
    broken = engine.add(prompt)
    engine.worker.fails_from[broken.seq_id] = 0
    engine.step_until(lambda: broken.is_finished)
    assert broken.num_cached_tokens == 4
    again = engine.add(prompt)
    engine.run()
    assert (broken.output.finish_reason, again.num_cached_tokens) == ("error", 4)  # not 8
    broken = engine.add(prompt)
    engine.worker.fails_from[broken.seq_id] = 0
    engine.run()
    again = engine.add(prompt)
    engine.run()
    assert (broken.num_cached_tokens, again.num_cached_tokens) == (8, 0)


def test_blocks_that_a_row_begins_and_does_not_fill_are_zeroed() -> None:
    """A decode step carries a block in one step of `block_size`, a chunk only its last block."""
    engine = FakeEngine(block_size=4, max_num_batched_tokens=10, max_model_len=32)
    long = engine.add([1] * 13, max_tokens=8, ignore_eos=True)
    zeroed = []
    while (schedule := engine.launch()) is not None:
        zeroed.append([long.kv.block_table.index(block) for block in schedule.blocks_to_zero])
        engine.retire()
    # 10 tokens; 3 more, to the 13th; then one a step, in blocks of 4
    assert zeroed == [[2], [3], [], [], [], [4], [], [], []]
    engine.run()


def num_lines_run(function: Callable[[], object]) -> int:
    """Count the lines of Python that `function` executes; repeated lines count each time."""
    num_lines = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # hypothesis runs code of its own at each collection
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return num_lines


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(10, 8), (40, 4)])
def test_cost_does_not_depend_on_how_many_wait(num_blocks: int, max_num_seqs: int) -> None:
    """Symptom: each step or abort iterates over all waiting requests, perhaps 100,000."""

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
        waiting = [Sequence(4 + index, [4 + index] * 12, params) for index in range(num_waiting)]
        for seq in waiting:
            scheduler.add(seq)

        def step() -> None:
            schedule = scheduler.schedule()
            assert schedule is not None
            assert len(schedule.rows) == 4
            scheduler.update(schedule, StepResult(schedule.step_id, [[0]] * 4))

        step()
        assert scheduler.num_waiting == num_waiting
        return num_lines_run(step), num_lines_run(lambda: scheduler.finish(waiting[1], "abort"))

    assert costs(num_waiting=2_000) == costs(num_waiting=2)


@pytest.mark.parametrize("queue_depth", [0, 1])
def test_forced_tokens_are_computed_as_one_chunk(queue_depth: int) -> None:
    """Symptom: a token that a grammar forces takes a step of its own, or is sampled twice."""
    engine = FakeEngine(queue_depth=queue_depth, block_size=4)
    seq = engine.add([1, 2, 3], max_tokens=12, ignore_eos=True, forces=True)
    engine.run()
    rows = [row for schedule, _ in engine.launched for row in schedule.rows]
    assert len(rows) < seq.num_output_tokens
    assert all(row.samples for row in rows)
    sent = {
        new.start: len(new.token_ids)
        for schedule, _ in engine.launched
        for new in schedule.new_tokens
    }
    chunks = {row.num_computed_tokens + 1: row.num_scheduled_tokens - 1 for row in rows[1:]}
    assert sent == {start: count for start, count in chunks.items() if count}
    assert max(sent.values()) > 1


def test_sequence_waits_for_the_token_that_others_may_follow() -> None:
    """Symptom: a step is launched at a position that forced tokens take."""
    engine = FakeEngine(queue_depth=1)
    seq = engine.add([1, 2], max_tokens=9, forces=True)
    other = engine.add([2, 3], max_tokens=9)
    engine.launch()
    schedule = engine.launch()
    assert schedule is not None
    assert [row.seq_id for row in schedule.rows] == [other.seq_id]
    assert seq.num_pending_tokens == 1
    engine.run()
