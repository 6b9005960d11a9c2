"""Lesson 7: a long prompt is computed in chunks, so that others go on beside it."""

from nanovllm import SamplingParams
from nanovllm.core.messages import StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.scheduler.scheduler import Scheduler

PROMPTS = {"A": (3, 8), "B": (20, 3)}
"""Tokens of each prompt, and tokens to generate."""
ARRIVALS = {0: "A", 2: "B"}
"""Who comes before which step."""


def run(max_num_batched_tokens: int) -> list[dict[str, tuple[int, int, bool]]]:
    """Return for each step, by name, (first position, number of tokens, draws a token?)."""
    scheduler = Scheduler(
        BlockManager(num_blocks=16, block_size=4),
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=64,
    )
    names = list(PROMPTS)
    steps: list[dict[str, tuple[int, int, bool]]] = []
    while len(steps) <= max(ARRIVALS) or scheduler.num_unfinished:
        if name := ARRIVALS.get(len(steps)):
            num_prompt, num_output = PROMPTS[name]
            number = names.index(name)
            token_ids = [100 * number + i for i in range(num_prompt)]
            scheduler.add(Sequence(number, token_ids, SamplingParams(max_tokens=num_output)))
        schedule = scheduler.schedule()
        assert schedule is not None
        steps.append(
            {
                names[row.seq_id]: (row.num_computed_tokens, row.num_scheduled_tokens, row.samples)
                for row in schedule.rows
            }
        )
        tokens = [[99] if row.samples else [] for row in schedule.rows]
        scheduler.update(schedule, StepResult(schedule.step_id, tokens))
    return steps


def describe(name: str, row: tuple[int, int, bool]) -> str:
    """Return what a row computes: its positions, and a star if it draws a token."""
    start, count, draws = row
    positions = f"{start}" if count == 1 else f"{start}-{start + count - 1}"
    return f"{name} {positions}{'*' * draws}"


def main() -> None:
    for limit in (64, 8):
        print(f"at most {limit} tokens in a step:")
        for number, rows in enumerate(run(limit)):
            total = sum(count for _, count, _ in rows.values())
            words = ", ".join(describe(name, row) for name, row in rows.items())
            print(f"  step {number}: {total:2} tokens   {words}")


if __name__ == "__main__":
    main()
