"""Lesson 4: the cache is cut into blocks, and a block table says which of them a text has."""

from nanovllm import SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager

NUM_BLOCKS, BLOCK_SIZE = 8, 4


def make_sequence(seq_id: int, num_tokens: int) -> Sequence:
    """Return a text of `num_tokens` tokens: 100, 101, ... for number 1."""
    return Sequence(seq_id, [100 * seq_id + i for i in range(num_tokens)], SamplingParams())


def grow(pool: BlockManager, seq: Sequence, num_tokens: int) -> None:
    """Make room for the first `num_tokens` tokens of a sequence."""
    blocks = pool.allocate_blocks(seq, num_tokens)
    if blocks is None:
        raise MemoryError(f"{num_tokens} tokens need more blocks than are free")


def picture(pool: BlockManager, sequences: dict[str, Sequence]) -> list[str]:
    """Return for each block of the pool the names of who has it; "." for nobody."""
    owners = ["."] * NUM_BLOCKS
    for name, seq in sequences.items():
        for block in seq.kv.block_table:
            owners[block] = name
    return owners


def run() -> list[tuple[str, list[str], dict[str, list[int]]]]:
    """Return what happened, the owners of the blocks after it, and the block tables."""
    pool = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    sequences: dict[str, Sequence] = {}
    story: list[tuple[str, list[str], dict[str, list[int]]]] = []

    def tell(event: str) -> None:
        tables = {name: list(seq.kv.block_table) for name, seq in sequences.items()}
        story.append((event, picture(pool, sequences), tables))

    for name, seq_id, num_tokens in (("A", 1, 6), ("B", 2, 9)):
        sequences[name] = make_sequence(seq_id, num_tokens)
        grow(pool, sequences[name], num_tokens)
        tell(f"{name} comes with {num_tokens} tokens")
    grow(pool, sequences["A"], 9)
    tell("A grows to 9 tokens")
    pool.free(sequences.pop("B"))
    tell("B ends")
    sequences["C"] = make_sequence(3, 17)
    grow(pool, sequences["C"], 17)
    tell("C comes with 17 tokens")
    return story


def slot(block_table: list[int], position: int) -> int:
    """Return where the keys and values of the token at `position` are in the pool."""
    return block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def main() -> None:
    story = run()
    for event, owners, tables in story:
        print(f"{event:22}", *owners, "  tables", tables)
    table = story[-1][2]["A"]
    print("slots of A:", [slot(table, position) for position in range(9)])


if __name__ == "__main__":
    main()
