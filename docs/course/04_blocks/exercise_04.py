"""Exercise 4: a pool of blocks, and where a token's keys and values are written."""

import random
from collections.abc import Callable

from nanovllm import SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager


def allocate(
    free: list[int], block_table: list[int], num_tokens: int, block_size: int
) -> list[int] | None:
    """Extend a block table so that the sequence has room for `num_tokens` tokens.

    Returns the slots of all `num_tokens` tokens, first token first. If too few blocks are free it
    returns None, and then it must leave both lists as they were: all or nothing.

    Args:
        free: the numbers of the free blocks. Take them from the front, and remove what you take.
        block_table: the blocks that the sequence has, in order. Append those that you take. It may
            have room for `num_tokens` tokens already: then nothing is taken.
        block_size: tokens in a block.
    """
    raise NotImplementedError("write allocate")


def check(allocate: Callable[..., list[int] | None]) -> None:
    """Raise AssertionError if `allocate` does not do what its docstring says."""
    free, table = [4, 0, 2], [1]
    found = allocate(free, table, 6, 4)
    assert found == [4, 5, 6, 7, 16, 17], f"table [1], free [4, 0, 2], 6 tokens: slots {found}"
    assert (free, table) == ([0, 2], [1, 4]), f"then free is {free} and the table {table}"
    assert allocate(free, table, 17, 4) is None, "17 tokens need 5 blocks; there are 2 and 2 free"
    assert (free, table) == ([0, 2], [1, 4]), f"a refusal changed free to {free}, table to {table}"
    found = allocate(free, table, 3, 4)
    assert found == [4, 5, 6], f"table [1, 4], free [0, 2], 3 tokens: slots {found}"
    assert (free, table) == ([0, 2], [1, 4]), (
        f"table [1, 4] has room for 3 tokens, but free [0, 2] became {free}, the table {table}"
    )

    chance = random.Random(0)
    pool = BlockManager(12, 4, enable_prefix_caching=False)  # the engine's own
    sequences = [Sequence(i, list(range(48)), SamplingParams()) for i in range(3)]
    tables: list[list[int]] = [[], [], []]
    for _ in range(300):
        number, num_tokens = chance.randrange(3), chance.randrange(1, 30)
        seq, free = sequences[number], list(pool.pool.free)
        if seq.kv.block_table and chance.random() < 0.3:
            pool.free(seq)
            tables[number] = []
            continue
        case = f"table {tables[number]}, free {free}, {num_tokens} tokens"
        found = allocate(free, tables[number], num_tokens, 4)
        refused = pool.allocate_blocks(seq, num_tokens) is None
        assert (found is None) == refused, f"{case}: {found}, the engine refuses: {refused}"
        after, wanted = (tables[number], free), (seq.kv.block_table, list(pool.pool.free))
        assert after == wanted, f"{case}: table and free are then {after}, the engine's {wanted}"
        if found is not None:
            slots = [seq.kv.block_table[p // 4] * 4 + p % 4 for p in range(num_tokens)]
            assert found == slots, f"{case}: {found}, not {slots}"


if __name__ == "__main__":
    check(allocate)
    print("solved")
