"""Solution 7."""

from typing import NamedTuple


class Counts(NamedTuple):
    """What a step needs to know of a sequence."""

    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int


def share(sequences: list[Counts], budget: int) -> list[int]:
    shares = [0] * len(sequences)

    def is_prompt(index: int) -> bool:
        return sequences[index].num_computed_tokens < sequences[index].num_prompt_tokens

    for index in sorted(range(len(sequences)), key=is_prompt):  # stable: else the order given
        missing = sequences[index].num_tokens - sequences[index].num_computed_tokens
        shares[index] = min(missing, budget)
        budget -= shares[index]
    return shares
