"""Solution 4."""


def allocate(
    free: list[int], block_table: list[int], num_tokens: int, block_size: int
) -> list[int] | None:
    num_blocks = -(-num_tokens // block_size)
    num_missing = max(0, num_blocks - len(block_table))
    if num_missing > len(free):
        return None
    block_table += free[:num_missing]
    del free[:num_missing]
    return [
        block_table[position // block_size] * block_size + position % block_size
        for position in range(num_tokens)
    ]
