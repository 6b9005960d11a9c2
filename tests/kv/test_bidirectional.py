"""Layers whose tokens see those after them: a prompt's, whole and uncached, or a picture's."""

from hypothesis import given, settings, strategies as st

from nanovllm.core.messages import InputSpan, StepResult
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


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), max_size=3),
        min_size=1,
        max_size=6,
    ),
    budget=st.integers(1, 20),
    num_blocks=st.integers(16, 40),
    block_size=st.integers(1, 5),
)
def test_a_row_holds_the_rest_of_a_picture(
    prompts: list[list[tuple[int, int]]], budget: int, num_blocks: int, block_size: int
) -> None:
    """Also after prefix hits inside one, and after preemptions."""
    group = BidirectionalGroup(8, of_prompts=False)
    num_blocks += 60 // block_size
    manager = BlockManager(num_blocks, block_size, groups=[group])
    scheduler = Scheduler(
        manager, max_num_seqs=4, max_num_batched_tokens=budget + 7, max_model_len=60
    )
    inside: list[list[tuple[int, int]]] = []
    for number, pictures in enumerate(prompts):
        spans: list[InputSpan] = []
        length = 0
        for text, tokens in pictures:
            spans.append(InputSpan(length + text, tokens, bytes([tokens] * 32)))
            length += text + tokens
        seq = Sequence(number, [1] * (length + 1), SamplingParams(max_tokens=3))
        seq.inputs = tuple(spans)
        inside.append([(span.start, span.start + span.length) for span in spans])
        scheduler.add(seq)
    while scheduler.num_unfinished:
        schedule = scheduler.schedule()
        assert schedule is not None
        assert sum(row.num_scheduled_tokens for row in schedule.rows) <= budget + 7
        for row in schedule.rows:
            assert not any(start < row.end < stop for start, stop in inside[row.seq_id])
        tokens = [[5] if row.samples else [] for row in schedule.rows]
        scheduler.update(schedule, StepResult(schedule.step_id, tokens))
        check_scheduler(scheduler)
