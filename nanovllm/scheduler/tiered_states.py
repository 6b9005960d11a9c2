"""Snapshots of states as entries of tiers, see tiered_blocks.py and stateful.py.

Knows no tensors.
"""

from collections.abc import Sequence as Seq
from typing import Any

from nanovllm.scheduler.messages import PageCopy
from nanovllm.scheduler.sequence import Sequence
from nanovllm.scheduler.snapshots import Snapshot
from nanovllm.scheduler.stateful import StatefulBlockManager
from nanovllm.scheduler.tiered_blocks import Found, TieredBlocks

STATE = b"s"
"""Ends the key of a snapshot."""


class TieredStatefulBlockManager(TieredBlocks, StatefulBlockManager):
    """A hit needs the KV blocks of a prefix, and the snapshot at its end.

    A snapshot is loaded to the pages of the sequence's state. A step makes its copies after its
    offers to host memory, and one that fails may make none. So a snapshot whose copy the next step
    makes is not offered. The store is offered a snapshot when its copy is certain.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unoffered: dict[Snapshot, None] = {}  # cached, for the store once they are certain

    def publish(self, seq: Sequence, num_written: int) -> None:
        """Cache full blocks and snapshots; note the prompt's snapshots for the store."""
        end = min(num_written, seq.num_prompt_tokens)
        begun = [s for s in self._states[seq].unpublished if s.position <= end]
        super().publish(seq, num_written)
        for snapshot in begun:
            if self.traffic.store and snapshot.uid is not None and not snapshot.is_dropped:
                self._unoffered[snapshot] = None

    def free(self, seq: Sequence, *, keep_cached: bool = True) -> None:
        """Free all that a sequence owns. Its last snapshot needs no copy, so it is certain."""
        begun = self._states[seq].begun
        super().free(seq, keep_cached=keep_cached)
        if begun is not None:
            self.offer_snapshot(begun)

    def copies_to(self, copies: Seq[PageCopy]) -> list[Snapshot]:
        """Return the snapshots that the `copies` of the step just scheduled make."""
        found = (self._snapshot_pages.get(copy.targets[0]) for copy in copies)
        return [snapshot for snapshot in found if snapshot is not None]

    def offer_snapshot(self, snapshot: Snapshot) -> None:
        """Offer a snapshot to the store, if it shall be: the step that copied it did not fail."""
        if snapshot in self._unoffered and snapshot.uid is not None:
            del self._unoffered[snapshot]
            digest = self._digests[snapshot.uid]
            if digest not in self._distrusted:
                self.traffic.keep(self._key(digest, STATE), snapshot.pages)

    def _reach(
        self, seq: Sequence, num_hit: int, pooled: list[int], num_blocks: int
    ) -> tuple[int, list[Found]]:
        for index in reversed(range(num_hit, num_blocks)):
            found = self._find(seq.block_keys[index][0], index, STATE, self.state_pages)
            if found is not None:
                return index + 1, [found]
        return num_hit, []

    def _snapshot_behind(self, cached_blocks: Seq[int]) -> Snapshot | None:
        """Return the snapshot that a sequence begins with; None for one whose state is loaded."""
        if self._admitted is not None and self._admitted.found:
            return None
        return super()._snapshot_behind(cached_blocks)

    def _pages_of(self, seq: Sequence, entry: Found) -> list[int]:
        return self._states[seq].pages if entry.suffix else super()._pages_of(seq, entry)

    def _suffixes(self) -> list[bytes]:
        return [*super()._suffixes(), STATE]

    def _take_over(self, hit: Snapshot) -> list[int]:
        self._is_evicting = True
        pages = super()._take_over(hit)
        self._is_evicting = False
        for page in pages:
            self.traffic.reuse(page)
        return pages

    def _make_room(self, num_pages: int) -> bool:
        self._is_evicting = True
        has_room = super()._make_room(num_pages)
        self._is_evicting = False
        return has_room

    def _forget(self, snapshot: Snapshot) -> None:
        self._unoffered.pop(snapshot, None)
        uid, pages = snapshot.uid, snapshot.pages
        is_copied = all(copy.targets != pages for copy in self._copies)
        if self._is_evicting and uid is not None and pages and is_copied:
            self._evict(self._digests[uid], STATE, pages)
        super()._forget(snapshot)
