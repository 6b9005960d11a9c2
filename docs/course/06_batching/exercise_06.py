"""Exercise 6: continuous batching."""

import random
from collections.abc import Callable

from nanovllm import SamplingParams
from nanovllm.core.messages import StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.scheduler.scheduler import Scheduler


def batch(arrivals: list[int], lengths: list[int], max_num_seqs: int) -> list[list[int]]:
    """Return for each step the numbers of the sequences that get a token in it, in ascending order.

    Sequence i arrives before step `arrivals[i]` and gets `lengths[i]` tokens, one in each step from
    its first one on, without a pause. A step has at most `max_num_seqs` sequences. When there is
    room, those that wait join, the first to arrive first; of several that arrive together, the one
    with the smaller number. Its place is free again in the step after its last token.

    The steps are numbered from 0. A step in which nobody runs is an empty list. The last list is
    the one in which the last sequence ends.

    Args:
        arrivals: in ascending order, at least one.
    """
    raise NotImplementedError("write batch")


def check(batch: Callable[..., list[list[int]]]) -> None:
    """Raise AssertionError if `batch` does not do what its docstring says."""
    for arrivals, lengths, most, wanted in (
        ([0], [3], 1, [[0], [0], [0]]),
        ([0, 0], [2, 1], 2, [[0, 1], [0]]),
        ([0, 0], [2, 1], 1, [[0], [0], [1]]),
        ([0, 0, 0], [1, 3, 2], 2, [[0, 1], [1, 2], [1, 2]]),
        ([0, 2], [1, 1], 2, [[0], [], [1]]),
    ):
        found = batch(list(arrivals), list(lengths), most)
        case = f"arrivals {arrivals}, lengths {lengths}, at most {most}"
        assert found == wanted, f"{case}: {found}, not {wanted}"

    chance = random.Random(0)
    for _ in range(20):
        count = chance.randrange(1, 12)
        arrivals = sorted(chance.randrange(12) for _ in range(count))
        lengths = [chance.randrange(1, 9) for _ in range(count)]
        most = chance.randrange(1, 5)
        wanted = engine(arrivals, lengths, most)
        found = batch(list(arrivals), list(lengths), most)
        case = f"arrivals {arrivals}, lengths {lengths}, at most {most}"
        assert found == wanted, f"{case}: {found}, the engine {wanted}"


def engine(arrivals: list[int], lengths: list[int], max_num_seqs: int) -> list[list[int]]:
    """Return what the engine's scheduler does."""
    scheduler = Scheduler(
        BlockManager(num_blocks=256, block_size=4),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=64,
    )
    steps: list[list[int]] = []
    while len(steps) <= arrivals[-1] or scheduler.num_unfinished:
        for number, (arrival, length) in enumerate(zip(arrivals, lengths, strict=True)):
            if arrival == len(steps):
                scheduler.add(Sequence(number, [number], SamplingParams(max_tokens=length)))
        schedule = scheduler.schedule()
        steps.append([])
        if schedule is not None:
            steps[-1] = sorted(row.seq_id for row in schedule.rows)
            result = StepResult(schedule.step_id, [[99] for _ in schedule.rows])  # a token each
            scheduler.update(schedule, result)
    return steps


if __name__ == "__main__":
    check(batch)
    print("solved")
