"""Solution 1."""

from collections.abc import Callable


def generate(
    next_logits: Callable[[list[int]], list[float]],
    token_ids: list[int],
    max_tokens: int,
    end: int,
) -> list[int]:
    output: list[int] = []
    while len(output) < max_tokens:
        logits = next_logits([*token_ids, *output])
        token = max(range(len(logits)), key=logits.__getitem__)
        output.append(token)
        if token == end:
            break
    return output
