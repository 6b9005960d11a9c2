"""Exercise 7: divide the tokens of a step among the sequences."""

import random
from collections.abc import Callable
from typing import NamedTuple

from nanovllm import SamplingParams
from nanovllm.core.messages import StepResult
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.scheduler.scheduler import Scheduler


class Counts(NamedTuple):
    """What a step needs to know of a sequence."""

    num_prompt_tokens: int
    num_tokens: int
    """The prompt's, and those that were drawn."""
    num_computed_tokens: int
    """Less than `num_tokens`: the rest is to be computed."""


def share(sequences: list[Counts], budget: int) -> list[int]:
    """Return how many tokens the next step computes of each sequence, in the order given.

    The step computes at most `budget` tokens. First come the sequences whose prompt is computed:
    each gets what it lacks, which is one token, the last one drawn. Then come the others, in the
    order given: each gets as much as it lacks of its prompt, or as much as is left of the budget.
    Who comes too late gets 0.
    """
    raise NotImplementedError("write share")


def check(share: Callable[..., list[int]]) -> None:
    """Raise AssertionError if `share` does not do what its docstring says."""
    decoding, prompt = Counts(3, 5, 4), Counts(20, 20, 0)
    for sequences, budget, wanted in (
        ([prompt], 8, [8]),
        ([Counts(20, 20, 16)], 8, [4]),
        ([decoding, prompt], 8, [1, 7]),
        ([prompt, decoding], 8, [7, 1]),
        ([Counts(5, 5, 0), prompt, decoding], 8, [5, 2, 1]),
        ([prompt, prompt], 8, [8, 0]),
        ([decoding, decoding], 1, [1, 0]),
    ):
        found = share(list(sequences), budget)
        assert found == wanted, f"{sequences}, budget {budget}: {found}, not {wanted}"

    chance = random.Random(0)
    scheduler = Scheduler(  # the engine's own
        BlockManager(num_blocks=4096, block_size=4, enable_prefix_caching=False),
        max_num_seqs=64,
        max_num_batched_tokens=12,
        max_model_len=64,
    )
    sequences_of_engine: list[Sequence] = []
    for number in range(150):
        if chance.random() < 0.3:
            params = SamplingParams(max_tokens=chance.randrange(1, 20))
            sequences_of_engine.append(Sequence(number, [0] * chance.randrange(1, 40), params))
            scheduler.add(sequences_of_engine[-1])
        unfinished = [seq for seq in sequences_of_engine if not seq.is_finished]
        counts = [
            Counts(seq.num_prompt_tokens, seq.num_tokens, seq.num_computed_tokens)
            for seq in unfinished
        ]
        schedule = scheduler.schedule()
        if schedule is None:
            continue
        rows = {row.seq_id: row.num_scheduled_tokens for row in schedule.rows}
        wanted = [rows.get(seq.seq_id, 0) for seq in unfinished]
        found = share(list(counts), 12)
        assert found == wanted, f"{counts}, budget 12: {found}, the engine {wanted}"
        tokens = [[99] if row.samples else [] for row in schedule.rows]
        scheduler.update(schedule, StepResult(schedule.step_id, tokens))


if __name__ == "__main__":
    check(share)
    print("solved")
