"""Exercise 5: find the blocks that the cache has of a prompt's beginning."""

import random
from collections.abc import Callable

from nanovllm import SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager

Key = tuple[int | None, tuple[int, ...]]


def match_prefix(cache: dict[Key, int], token_ids: list[int], block_size: int) -> list[int]:
    """Return the blocks of the longest cached beginning of a prompt, in order.

    Args:
        cache: the number of each cached block, by (the block before it, its own tokens). For the
            first block of a text, the block before it is None. So (None, (10, 11, 12, 13)) is the
            key of a text's first block, and if that is block 5, (5, (14, 15, 16, 17)) is the key of
            a second block after it.
        token_ids: the prompt. At least one of its tokens must be left to compute: the blocks that
            you return hold fewer tokens than it has.
    """
    raise NotImplementedError("write match_prefix")


def check(match_prefix: Callable[..., list[int]]) -> None:
    """Raise AssertionError if `match_prefix` does not do what its docstring says."""
    cache: dict[Key, int] = {(None, (1, 2)): 5, (5, (3, 4)): 7, (7, (1, 2)): 0, (None, (9, 9)): 1}
    for token_ids, wanted in (
        ([1, 2, 3, 4, 8], [5, 7]),
        ([1, 2, 8, 8, 1, 2], [5]),
        ([3, 4, 3, 4], []),  # 3, 4 is only known after block 5
        ([1, 2, 3, 4, 1, 2, 3], [5, 7, 0]),
        ([1, 2, 3, 4], [5]),  # the last token must be left
        ([1, 2], []),
        ([1], []),
    ):
        found = match_prefix(dict(cache), list(token_ids), 2)
        assert found == wanted, f"cache {cache}, prompt {token_ids}: {found}, not {wanted}"

    chance = random.Random(0)
    pool = BlockManager(num_blocks=2000, block_size=4)  # the engine's own
    mine: dict[Key, int] = {}
    for number in range(200):
        token_ids = [chance.randrange(2) for _ in range(chance.randrange(1, 30))]
        seq = Sequence(number, token_ids, SamplingParams())
        hit = pool.match_prefix(seq)
        wanted = [node.page for node in hit.nodes]  # a node of the tree, and its block's number
        found = match_prefix(dict(mine), list(token_ids), 4)
        assert found == wanted, f"prompt {token_ids}: {found}, the engine finds {wanted}"
        pool.allocate_blocks(seq, seq.num_tokens, hit)
        pool.publish(seq, seq.num_tokens)
        before = None
        for start in range(0, len(token_ids) - 3, 4):  # what the engine has published now
            key = (before, tuple(token_ids[start : start + 4]))
            before = mine.setdefault(key, seq.kv.block_table[start // 4])


if __name__ == "__main__":
    check(match_prefix)
    print("solved")
