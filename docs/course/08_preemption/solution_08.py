"""Solution 8."""

from typing import NamedTuple


class Running(NamedTuple):
    """A sequence that is decoding."""

    name: str
    num_tokens: int
    num_blocks: int


def make_step(
    running: list[Running], num_free: int, block_size: int
) -> tuple[list[str], list[str]]:
    left = list(running)
    computed: list[str] = []
    preempted: list[str] = []
    while left:
        seq = left[0]
        if seq.num_tokens > seq.num_blocks * block_size:
            while num_free == 0 and left:
                victim = left.pop()
                preempted.append(victim.name)
                num_free += victim.num_blocks
            if not left:  # the sequence itself had to go
                break
            num_free -= 1
        computed.append(left.pop(0).name)
    return computed, preempted
