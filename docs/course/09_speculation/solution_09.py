"""Solution 9."""

from collections.abc import Callable

Model = Callable[[list[int], list[int]], list[int]]
Proposer = Callable[[list[int]], list[int]]


def speculate(model: Model, propose: Proposer, token_ids: list[int], num_tokens: int) -> list[int]:
    text = list(token_ids)
    while len(text) < len(token_ids) + num_tokens:
        guesses = propose(list(text))
        own = model(list(text), guesses)
        num_right = 0
        while num_right < len(guesses) and guesses[num_right] == own[num_right]:
            num_right += 1
        text += own[: num_right + 1]
    return text[len(token_ids) : len(token_ids) + num_tokens]
