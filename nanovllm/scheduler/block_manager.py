"""KV blocks: who owns which, and which hold a prefix that another sequence can use.

The prefix cache is a trie. A cached block's key is (unique id of its parent, xxh64 of its own
tokens), and its tokens are compared on a hit, so a hash collision costs a miss and never a wrong
answer. Knows nothing of tensors.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence as Seq
from itertools import count

from xxhash import xxh64_intdigest

from nanovllm.scheduler.sequence import ROOT_UID, Sequence


class Block:
    """A KV block. `uid` is None unless its contents are published; it names contents and is never
    used again.
    """

    __slots__ = ("key", "ref_count", "tokens", "uid")

    def __init__(self) -> None:
        self.ref_count = 0
        self.uid: int | None = None
        self.key: tuple[int, int] | None = None  # (parent uid, hash of tokens)
        self.tokens = b""


class BlockManager:
    """Gives blocks to sequences and takes them back; every operation is O(blocks it touches)."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # LRU first
        self._cached: dict[tuple[int, int], int] = {}
        self._uids = count(ROOT_UID + 1)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, seq: Sequence) -> list[int]:
        """Return the longest cached chain of blocks that `seq` begins with, and change nothing.

        At least one token is left to compute: without it there is no hidden state to sample from.
        """
        if not self.enable_prefix_caching:
            return []
        matched: list[int] = []
        parent_uid = ROOT_UID
        for key_hash, tokens in self._keys(seq, (len(seq.token_ids) - 1) // self.block_size):
            block_id = self._cached.get((parent_uid, key_hash))
            if block_id is None or self.blocks[block_id].tokens != tokens:
                break
            matched.append(block_id)
            parent_uid = self.blocks[block_id].uid  # type: ignore[assignment]  # cached: has a uid
        return matched

    def allocate_blocks(
        self, seq: Sequence, num_tokens: int, cached_blocks: Seq[int] = ()
    ) -> list[int] | None:
        """Extend `seq`'s block table to hold its first `num_tokens` tokens, all or nothing.

        `cached_blocks`, from `match_prefix`, come first in a table that is still empty.
        Returns the blocks appended, or None (and changes nothing) where there is no space.
        """
        num_new = self.blocks_for(num_tokens) - len(seq.block_table) - len(cached_blocks)
        if num_new <= 0 and not cached_blocks:
            return []
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
        appended = [*cached_blocks, *(self._take_free() for _ in range(num_new))]
        seq.block_table += appended
        return appended

    def publish(self, seq: Sequence, num_written: int) -> None:
        """Offer to others the full blocks among `seq`'s first `num_written` tokens, whose KV is
        written.

        Of two blocks with the same contents the first stays cached; the other sequence goes on
        below it.
        """
        if not self.enable_prefix_caching:
            return
        num_full = min(num_written, len(seq.token_ids)) // self.block_size
        if num_full <= seq.num_published_blocks:
            return
        keys = self._keys(seq, num_full)
        while seq.parent_uid is not None and seq.num_published_blocks < num_full:
            key_hash, tokens = keys[seq.num_published_blocks]
            key = (seq.parent_uid, key_hash)
            block_id = self._cached.setdefault(key, seq.block_table[seq.num_published_blocks])
            block = self.blocks[block_id]
            if block.uid is None:
                block.uid, block.key, block.tokens = next(self._uids), key, tokens
            elif block.tokens != tokens:  # a collision: what follows has no parent to hang from
                seq.parent_uid = None
                return
            seq.parent_uid = block.uid
            seq.num_published_blocks += 1

    def free(self, seq: Sequence) -> None:
        """Take back all of `seq`'s blocks. Cached ones stay readable until they are needed."""
        for block_id in reversed(seq.block_table):  # the tail is evicted before the prefix
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if block.uid is None:
                    self._free.move_to_end(block_id, last=False)
        seq.block_table = []
        seq.num_published_blocks = 0
        seq.parent_uid = ROOT_UID

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Verify every invariant, given all sequences that may own blocks. For tests: O(pool).

        Raises:
            AssertionError: a block is leaked, owned without a reference, or wrongly cached.
        """
        owners: Counter[int] = Counter()
        for seq in sequences:
            assert len(set(seq.block_table)) == len(seq.block_table), "a table holds a block twice"
            assert seq.num_published_blocks <= len(seq.block_table)
            owners.update(seq.block_table)
        for block_id, block in enumerate(self.blocks):
            assert block.ref_count == owners[block_id], f"block {block_id}: owners and references"
            assert (block.ref_count == 0) == (block_id in self._free), f"block {block_id}: leaked"
            assert block.ref_count <= 1 or block.uid is not None, f"block {block_id}: shared unread"
            assert (block.uid is None) == (block.key is None)
            if block.key is not None:
                assert self._cached[block.key] == block_id
                assert len(block.tokens) == self.block_size * _TOKEN_BYTES
        assert all(self.blocks[b].key == key for key, b in self._cached.items())

    def _take_free(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        if block.key is not None:
            del self._cached[block.key]
            block.uid, block.key, block.tokens = None, None, b""
        block.ref_count = 1
        return block_id

    def _keys(self, seq: Sequence, num_blocks: int) -> list[tuple[int, bytes]]:
        """(hash, tokens) of at least the first `num_blocks` blocks; each is hashed once in a
        lifetime.
        """
        for i in range(len(seq.block_keys), num_blocks):
            tokens = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
            data = array("I", tokens).tobytes()
            seq.block_keys.append((xxh64_intdigest(data), data))
        return seq.block_keys[:num_blocks]


_TOKEN_BYTES = array("I").itemsize
