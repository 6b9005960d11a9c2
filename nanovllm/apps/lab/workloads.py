"""The workloads of `nanovllm lab bench`: requests of random tokens, the same in each process.

They are scaled to a pool of POOL_TOKENS tokens and to MOST_RUNNING sequences, so that requests wait
and cached KV is evicted, as with a large model and many users.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

POOL_TOKENS = 2048
MOST_RUNNING = 8


class WorkloadRequest(NamedTuple):
    """A request and, of a conversation, what follows its answer."""

    prompt: list[int]
    max_tokens: int
    questions: tuple[list[int], ...] = ()
    """The later turns: each prompt is all that came before and the next of these."""


Tokens = Callable[[int], list[int]]
"""Returns so many random tokens."""


def make(name: str, vocab_size: int) -> list[WorkloadRequest]:
    """Return the requests of a workload, which all come at once."""
    rng = random.Random(name)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(vocab_size), k=count)

    return WORKLOADS[name](rng, tokens)


def _nano_vllm(rng: random.Random, tokens: Tokens) -> list[WorkloadRequest]:
    """Prompts and answers of even lengths, as in nano-vllm's bench.py, but shorter."""
    return [WorkloadRequest(tokens(rng.randint(16, 160)), rng.randint(16, 64)) for _ in range(20)]


def _shared_prefixes(rng: random.Random, tokens: Tokens) -> list[WorkloadRequest]:
    """System prompts of which some are asked often, in any order; together they fill the pool."""
    prefixes = [tokens(256) for _ in range(16)]
    weights = [rank**-0.5 for rank in range(1, 17)]
    chosen = rng.choices(prefixes, weights, k=48)
    return [WorkloadRequest(prefix + tokens(rng.randint(4, 24)), 8) for prefix in chosen]


def _long_and_short(rng: random.Random, tokens: Tokens) -> list[WorkloadRequest]:
    """One long request for three short ones."""
    return [
        WorkloadRequest(tokens(500), 48)
        if number % 4 == 0
        else WorkloadRequest(tokens(rng.randint(16, 32)), 12)
        for number in range(28)
    ]


def _agents(rng: random.Random, tokens: Tokens) -> list[WorkloadRequest]:
    """Conversations that begin with the same instructions; a turn follows the answer at once."""
    instructions = tokens(128)
    return [
        WorkloadRequest(
            instructions + tokens(rng.randint(16, 64)),
            16,
            questions=tuple(tokens(rng.randint(16, 64)) for _ in range(3)),
        )
        for _ in range(8)
    ]


WORKLOADS: dict[str, Callable[[random.Random, Tokens], list[WorkloadRequest]]] = {
    "nano-vllm's": _nano_vllm,
    "shared prefixes": _shared_prefixes,
    "long and short": _long_and_short,
    "agents' turns": _agents,
}
"""What `nanovllm lab bench` plays, by name."""
