"""Lesson 6: one step computes a token of many sequences, and each step chooses them anew."""

from nanovllm import SamplingParams
from nanovllm.core.messages import StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.scheduler.scheduler import Scheduler

LENGTHS = {"A": 2, "B": 7, "C": 3, "D": 4}
"""How many tokens each sequence generates."""


def run(lengths: dict[str, int], max_num_seqs: int) -> list[str]:
    """Return for each step the names of the sequences in it."""
    scheduler = Scheduler(
        BlockManager(num_blocks=64, block_size=4),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=64,
    )
    for number, length in enumerate(lengths.values()):
        params = SamplingParams(max_tokens=length)
        scheduler.add(Sequence(number, [10 * number, 10 * number + 1], params))
    names = list(lengths)
    steps = []
    while (schedule := scheduler.schedule()) is not None:
        steps.append("".join(sorted(names[row.seq_id] for row in schedule.rows)))
        tokens = [[99] for _ in schedule.rows]  # stands for what a model draws
        scheduler.update(schedule, StepResult(schedule.step_id, tokens))
    return steps


def run_in_groups(lengths: dict[str, int], max_num_seqs: int) -> list[str]:
    """Return the same if a group of sequences runs until all of it have ended."""
    names = list(lengths)
    steps = []
    for start in range(0, len(names), max_num_seqs):
        group = {name: lengths[name] for name in names[start : start + max_num_seqs]}
        steps += run(group, max_num_seqs)
    return steps


def main() -> None:
    for title, steps in (
        ("in groups", run_in_groups(LENGTHS, max_num_seqs=2)),
        ("continuous", run(LENGTHS, max_num_seqs=2)),
    ):
        print(f"{title}: {len(steps)} steps for {sum(map(len, steps))} tokens")
        for name in LENGTHS:
            print(f"  {name}", *("#" if name in step else "." for step in steps))


if __name__ == "__main__":
    main()
