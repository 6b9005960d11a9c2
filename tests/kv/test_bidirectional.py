"""Layers whose tokens see those after them: each prompt is a row of its own, and nothing stays."""

from hypothesis import given, settings, strategies as st

from nanovllm.core.messages import StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.kv.groups.group import BidirectionalGroup
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.scheduler.scheduler import Scheduler
from nanovllm.testing.invariants import check_scheduler


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    more_tokens=st.integers(0, 20),
    num_spare_blocks=st.integers(0, 6),
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(1, 6),
    num_in_flight=st.integers(0, 2),
    fails=st.sets(st.integers(0, 8)),
)
def test_prompts_are_whole(
    lengths: list[int],
    more_tokens: int,
    num_spare_blocks: int,
    block_size: int,
    max_num_seqs: int,
    num_in_flight: int,
    fails: set[int],
) -> None:
    """Also after steps that failed. The budget of a step is kept."""
    budget = 12 + more_tokens
    num_blocks = -(-12 // block_size) + num_spare_blocks
    manager = BlockManager(
        num_blocks, block_size, enable_prefix_caching=False, groups=[BidirectionalGroup(12)]
    )
    scheduler = Scheduler(
        manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=12
    )
    sequences = [
        Sequence(number, [1] * length, SamplingParams(max_tokens=1), generates=False)
        for number, length in enumerate(lengths)
    ]
    for seq in sequences:
        scheduler.add(seq)
    in_flight = []
    while scheduler.num_unfinished:
        schedule = scheduler.schedule()
        if schedule is not None:
            for row in schedule.rows:
                assert (row.num_computed_tokens, row.end) == (0, lengths[row.seq_id])
                assert not row.samples
            assert sum(row.num_scheduled_tokens for row in schedule.rows) <= budget
            in_flight.append(schedule)
        if len(in_flight) > num_in_flight or schedule is None:
            oldest = in_flight.pop(0)
            if oldest.step_id in fails:
                for launched in (oldest, *in_flight):
                    scheduler.abandon(launched)
                in_flight.clear()
                continue
            tokens: list[list[int]] = [[] for _ in oldest.rows]
            scheduler.update(oldest, StepResult(oldest.step_id, tokens))
        check_scheduler(scheduler)
    assert [seq.output.finish_reason for seq in sequences] == ["stop"] * len(lengths)
    assert manager.num_free_blocks == num_blocks
