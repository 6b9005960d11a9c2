"""The cached blocks that a sequence's published blocks are equal to. Knows no tensors."""

from collections.abc import Iterator

from nanovllm.scheduler.block_manager import BlockManager
from nanovllm.scheduler.sequence import Sequence


def cached_chain(
    manager: BlockManager, seq: Sequence, index: int, parent_uid: int | str | None
) -> Iterator[tuple[int, int]]:
    """Yield (uid, block id) of the cached blocks of a sequence's published blocks from `index` on.

    They are not all in its block table: another sequence may have published an equal block first.

    Args:
        parent_uid: `Block.uid` of the block before `index`, or the root; None after a collision.
    """
    for key_hash, _ in seq.block_keys[index : seq.num_published_blocks]:
        block_id = None if parent_uid is None else manager._cached.get((parent_uid, key_hash))
        if block_id is None:
            return
        parent_uid = manager.blocks[block_id].uid
        assert parent_uid is not None
        yield parent_uid, block_id
