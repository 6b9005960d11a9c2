"""Exercise 8: a decode step when blocks are short."""

import random
from collections.abc import Callable
from typing import NamedTuple

from nanovllm import SamplingParams
from nanovllm.core.messages import StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.scheduler.scheduler import Scheduler


class Running(NamedTuple):
    """A sequence that is decoding."""

    name: str
    num_tokens: int
    """The step computes the last of them, so it needs blocks for all."""
    num_blocks: int
    """Those that it has."""


def make_step(
    running: list[Running], num_free: int, block_size: int
) -> tuple[list[str], list[str]]:
    """Return the names of the sequences that the step computes, and of those that it preempts.

    Go through the sequences in order. If one needs another block (never more than one), take a free
    block. If none is free, preempt the last sequence that is neither computed nor preempted: its
    blocks are free then. That may be the very sequence that needs the block, if nobody is left
    behind it; then the step is complete. Else the sequence takes the block and is computed.

    Both lists are in the order in which it happens.
    """
    raise NotImplementedError("write make_step")


def check(make_step: Callable[..., tuple[list[str], list[str]]]) -> None:
    """Raise AssertionError if `make_step` does not do what its docstring says."""
    a, b, c = Running("A", 8, 2), Running("B", 5, 1), Running("C", 9, 2)
    for running, num_free, wanted in (
        ([a], 0, (["A"], [])),
        ([a, b, c], 2, (["A", "B", "C"], [])),
        ([a, b, c], 1, (["A", "B"], ["C"])),
        ([a, b, c], 0, (["A", "B"], ["C"])),
        ([b, a], 0, (["B"], ["A"])),
        ([a, c], 0, (["A"], ["C"])),
    ):
        found = make_step(list(running), num_free, 4)
        assert found == wanted, f"{running}, {num_free} free: {found}, not {wanted}"

    chance = random.Random(0)
    for _ in range(40):
        pool = BlockManager(16, 4, enable_prefix_caching=False)
        scheduler = Scheduler(pool, max_num_seqs=9, max_num_batched_tokens=64, max_model_len=64)
        sequences = []
        for number in range(chance.randrange(2, 8)):
            params = SamplingParams(max_tokens=60)
            sequences.append(Sequence(number, [0] * chance.randrange(1, 9), params))
            scheduler.add(sequences[-1])
        for _ in range(12):
            running = [
                Running(str(seq.seq_id), seq.num_tokens, len(seq.kv.block_table))
                for seq in scheduler.running
            ]
            decoding = [seq for seq in scheduler.running if seq.num_computed_tokens]
            num_free = pool.num_free_blocks
            schedule = scheduler.schedule()
            assert schedule is not None
            if not schedule.admissions and len(decoding) == len(running):
                rows = [str(row.seq_id) for row in schedule.rows]
                gone = [seq for seq in reversed(decoding) if seq.table_idx is None]
                wanted = (rows, [str(seq.seq_id) for seq in gone])
                found = make_step(list(running), num_free, 4)
                assert found == wanted, f"{running}, {num_free} free: {found}, engine {wanted}"
            tokens = [[99] for _ in schedule.rows]
            scheduler.update(schedule, StepResult(schedule.step_id, tokens))


if __name__ == "__main__":
    check(make_step)
    print("solved")
