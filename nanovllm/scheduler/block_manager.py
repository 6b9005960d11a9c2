"""KV blocks: which sequences own them, and which blocks the prefix cache holds.

The prefix cache is a trie. The key of a cached block is (unique id of its parent block, hash of its
tokens and of all before them). A hit also compares the tokens, so a hash collision costs a miss and
never gives a wrong prefix. Each adapter and salt has a root and a trie of its own. No tensors.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from itertools import count

from xxhash import xxh3_128_digest

from nanovllm.scheduler.sequence import Sequence

Key = tuple[int | str, bytes]
"""Of a cached block: (uid of its parent block, or `Sequence.root_uid`; chained hash)."""


@dataclass(slots=True, eq=False)
class Block:
    """A KV block.

    A block is cached if and only if it has a `uid`, a unique id of its contents that is never
    reused. A block with `ref_count` 0 is free; if it is also cached, a prefix hit can revive it.
    """

    ref_count: int = 0
    uid: int | None = None
    key: Key | None = None
    tokens: bytes = b""


class BlockManager:
    """Allocates KV blocks to sequences and caches full blocks for other sequences.

    Invariants, verified by tests/scheduler/invariants.py:
    - A block's `ref_count` is the number of block tables that hold it; at 0 the block is free.
    - Only a cached block has a `ref_count` above 1.
    - A cached block is full, and its key leads to it.

    A block may be cached only once its KV is written: `publish` relies on its caller for this. Free
    blocks are reused in LRU order, blocks that are not cached first. Every operation costs O(blocks
    that it touches), whatever the size of the pool.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.digest: Callable[[bytes], bytes] = xxh3_128_digest  # or a cryptographic one
        self.blocks = [Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # LRU order
        self._cached: dict[Key, int] = {}  # key -> block id
        self._uids = count(1)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def hit_position(self, cached_blocks: Seq[int]) -> int:
        """Return how many tokens an admission with `cached_blocks` need not compute."""
        return len(cached_blocks) * self.block_size

    def match_prefix(self, seq: Sequence) -> list[int]:
        """Return the ids of the longest chain of cached blocks that `seq` begins with.

        The chain never covers the last token: its hidden state is needed to sample the next one.
        """
        if not self.enable_prefix_caching:
            return []
        matched: list[int] = []
        parent_uid: int | str = seq.root_uid
        for key_hash, tokens in self._block_keys(seq, (len(seq.token_ids) - 1) // self.block_size):
            block_id = self._cached.get((parent_uid, key_hash))
            if block_id is None or self.blocks[block_id].tokens != tokens:
                break
            matched.append(block_id)
            parent_uid = self.blocks[block_id].uid  # type: ignore[assignment]  # never None
        return matched

    def allocate_blocks(
        self, seq: Sequence, num_tokens: int, cached_blocks: Seq[int] = ()
    ) -> list[int] | None:
        """Extend a sequence's block table to hold its first `num_tokens` tokens, all or nothing.

        Args:
            cached_blocks: the result of `match_prefix`, to begin an empty block table with.

        Returns:
            The ids of the blocks appended; None, with nothing changed, if too few blocks are free.
        """
        num_owned = len(seq.block_table)
        if num_tokens <= num_owned * self.block_size and not cached_blocks:
            return []
        num_new = self.blocks_for(num_tokens) - num_owned - len(cached_blocks)
        num_revived = sum(self.blocks[b].ref_count == 0 for b in cached_blocks)
        if num_new + num_revived > len(self._free):
            return None
        for block_id in cached_blocks:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1
            seq.parent_uid = block.uid
        seq.num_published_blocks += len(cached_blocks)
        appended = [*cached_blocks, *(self._take_free_block() for _ in range(num_new))]
        seq.block_table += appended
        return appended

    def publish(self, seq: Sequence, num_written: int) -> None:
        """Cache the full blocks of a sequence's first `num_written` tokens, whose KV is written.

        If a block with the same contents is cached already, it stays cached, and the sequence's
        next blocks are cached as children of that one.
        """
        num_full = min(num_written, len(seq.token_ids)) // self.block_size
        if not self.enable_prefix_caching or num_full <= seq.num_published_blocks:
            return
        keys = self._block_keys(seq, num_full)
        while seq.parent_uid is not None and seq.num_published_blocks < num_full:
            key_hash, tokens = keys[seq.num_published_blocks]
            key = (seq.parent_uid, key_hash)
            block_id = self._cached.setdefault(key, seq.block_table[seq.num_published_blocks])
            block = self.blocks[block_id]
            if block.uid is None:
                block.uid, block.key, block.tokens = next(self._uids), key, tokens
            elif block.tokens != tokens:  # a hash collision: later blocks have no cached parent
                seq.parent_uid = None
                return
            seq.parent_uid = block.uid
            seq.num_published_blocks += 1

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Free the blocks behind a sequence's first `num_tokens` tokens. None of them is cached."""
        num_kept = self.blocks_for(num_tokens)
        self._free_uncached(seq.block_table[num_kept:])
        del seq.block_table[num_kept:]

    def free(self, seq: Sequence, *, keep_cached: bool = True) -> None:
        """Free all blocks of a sequence. Cached blocks stay in the prefix cache until reused.

        Args:
            keep_cached: False removes those that no other sequence holds from the prefix cache.
        """
        for block_id in reversed(seq.block_table):  # so that the tail is evicted before the prefix
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if not keep_cached:
                    self._uncache(block)
                if block.uid is None:
                    self._free.move_to_end(block_id, last=False)
        seq.block_table = []
        seq.num_published_blocks = 0
        seq.parent_uid = seq.root_uid

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; return False, and forget none, while a sequence owns blocks."""
        if len(self._free) < len(self.blocks):
            return False
        for block_id in list(self._cached.values()):
            self._uncache(self.blocks[block_id])
        return True

    def _free_uncached(self, block_ids: Seq[int]) -> None:
        """Free blocks that are not cached. They are reused first."""
        for block_id in reversed(block_ids):
            self.blocks[block_id].ref_count = 0
            self._free[block_id] = None
            self._free.move_to_end(block_id, last=False)

    def _take_free_block(self) -> int:
        """Return the least recently used free block, removed from the prefix cache."""
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        self._uncache(block)
        block.ref_count = 1
        return block_id

    def _uncache(self, block: Block) -> None:
        """Remove a block from the prefix cache, if it is there."""
        if block.key is not None:
            del self._cached[block.key]
            block.uid, block.key, block.tokens = None, None, b""

    def _block_keys(self, seq: Sequence, num_blocks: int) -> list[tuple[bytes, bytes]]:
        """Return (hash, tokens) of each of the first `num_blocks` blocks; hash each only once."""
        for i in range(len(seq.block_keys), num_blocks):
            data = array("I", seq.token_ids[i * self.block_size : (i + 1) * self.block_size])
            parent = seq.block_keys[-1][0] if i else self.digest(seq.root_uid.encode())
            seq.block_keys.append((self.digest(parent + data.tobytes()), data.tobytes()))
        return seq.block_keys[:num_blocks]
