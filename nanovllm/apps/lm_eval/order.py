"""The order in which texts with common beginnings are sent, so that they find the prefix cache.

Knows neither lm_eval nor the engine.
"""

from collections.abc import Iterator, Sequence as Seq
from itertools import takewhile
from typing import NamedTuple


class Scored(NamedTuple):
    """A text of which the end is scored."""

    tokens: list[int]
    start: int
    """Index of the first token that is scored; at least 1."""


def prefix_order(texts: Seq[Scored], lag: int) -> Iterator[int]:
    """Yield the indices of `texts` so that each context is computed once.

    A block is in the prefix cache only after the step that computes it. So of the texts with one
    context the first goes ahead, and the others follow when `lag` tokens of other texts are between
    them. Contexts are in the order of their tokens, so those with the same beginning, such as the
    same examples, are neighbours.
    """
    by_tokens = sorted(range(len(texts)), key=lambda index: texts[index].tokens)
    waiting: list[int] = []  # their contexts are sent
    recent: list[int] = []  # their contexts were sent less than `lag` tokens ago
    num_sent = 0
    previous: list[int] = []
    for index in by_tokens:
        tokens, start = texts[index]
        if previous and tokens[:start] == previous[:start]:
            recent.append(index)
            continue
        same = takewhile(lambda pair: pair[0] == pair[1], zip(previous, tokens, strict=False))
        num_sent += len(tokens) - sum(1 for _ in same)
        previous = tokens
        yield index
        if num_sent >= lag:
            yield from waiting
            waiting, recent, num_sent = recent, [], 0
    yield from waiting
    yield from recent
