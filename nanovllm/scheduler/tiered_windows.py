"""Window blocks as entries of tiers, see tiered_blocks.py and windowed.py. Knows no tensors."""

from collections.abc import Sequence as Seq

from nanovllm.scheduler.sequence import Sequence
from nanovllm.scheduler.tiered_blocks import Found, Plan, TieredBlocks
from nanovllm.scheduler.windowed import WindowBlock, WindowedBlockManager


def suffix(number: int) -> bytes:
    """Return what ends the key of a block of a window group."""
    return b"w%d" % number


class TieredWindowedBlockManager(TieredBlocks, WindowedBlockManager):
    """A hit needs the KV blocks of a prefix, and of each window group those that are read next.

    Each of them may be in the pool or in a tier, whatever lies beside it.
    """

    def publish_loaded(self, plan: Plan, num_parts: int) -> None:
        """Cache what was loaded, also the window blocks of blocks that the pool had."""
        for entry in plan.found[:num_parts]:
            if entry.suffix and entry.block_index < plan.num_pooled:
                uid = self.blocks[plan.seq.block_table[entry.block_index]].uid
                number, block = self._loaded_block(plan.seq, entry)
                assert uid is not None
                self._cache(block, (number, uid))
        super().publish_loaded(plan, num_parts)

    def _reach(
        self, seq: Sequence, num_hit: int, pooled: list[int], num_blocks: int
    ) -> tuple[int, list[Found]]:
        known: dict[tuple[int, int], Found | bool] = {}
        while num_blocks > num_hit:
            needed = list(self._needed(num_blocks))
            for number, index in needed:
                if (number, index) not in known:
                    known[number, index] = self._look_up(seq, pooled, number, index)
                if known[number, index] is False:
                    num_blocks = index  # the last one that is missing
                    break
            else:
                found = (known[key] for key in needed)
                return num_blocks, [entry for entry in found if isinstance(entry, Found)]
        return num_hit, []

    def _look_up(self, seq: Sequence, pooled: list[int], number: int, index: int) -> Found | bool:
        """Return a window block in a tier; True if the pool has it, False if nobody has."""
        if index < len(pooled):
            uid = self.blocks[pooled[index]].uid
            assert uid is not None
            if (number, uid) in self._cached_windows:
                return True
        digest = seq.block_keys[index][0]
        return self._find(digest, index, suffix(number), self.windows[number].pages) or False

    def _begun_block(self, number: int, index: int, cached_blocks: Seq[int]) -> WindowBlock:
        """Return a block, without pages if it is to be loaded."""
        if self._admitted is not None and (index, suffix(number)) in self._admitted.places:
            return WindowBlock([], ref_count=0)  # like a cached one that is revived
        return super()._begun_block(number, index, cached_blocks)

    def _take_pages(self, seq: Sequence, plan: Plan) -> None:
        """Give pages to the window blocks that are loaded. `allocate_blocks` has counted them."""
        for entry in plan.found:
            if entry.suffix:
                number, block = self._loaded_block(seq, entry)
                count = self.windows[number].pages
                block.pages = [self._take_free_block() for _ in range(count)]

    def _pages_of(self, seq: Sequence, entry: Found) -> list[int]:
        if entry.suffix:
            return self._loaded_block(seq, entry)[1].pages
        return super()._pages_of(seq, entry)

    def _loaded_block(self, seq: Sequence, entry: Found) -> tuple[int, WindowBlock]:
        """Return the group of an admitted sequence's window block, and the block."""
        number = int(entry.suffix[1:])
        table = self._tables[seq][number]
        return number, table.blocks[entry.block_index - table.start]

    def _keep_entries(self, uid: int, digest: bytes, page: int) -> None:
        super()._keep_entries(uid, digest, page)
        for number in range(len(self.windows)):
            block = self._cached_windows.get((number, uid))
            if block is not None:
                self.traffic.keep(self._key(digest, suffix(number)), block.pages)

    def _suffixes(self) -> list[bytes]:
        return [*super()._suffixes(), *(suffix(number) for number in range(len(self.windows)))]

    def _forget(self, block: WindowBlock) -> None:
        if self._is_evicting and block.key is not None:
            number, uid = block.key
            self._evict(self._digests[uid], suffix(number), block.pages)
        super()._forget(block)
