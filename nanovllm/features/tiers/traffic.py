"""The tiers below a pool, and what moves between them and the pool.

`TierCache` tells it which pages lose or get their contents. The scheduler takes from it what the
next step has to move.
"""

from collections import Counter
from collections.abc import Sequence as Seq

from nanovllm.core.messages import HOST, Load, Loaded, TierEntry, Transfers
from nanovllm.features.tiers.tier import HostSlots, StoreTier, Tier
from nanovllm.scheduler.scheduler import TierStats

SMOOTHING = 0.25  # weight of the newest measurement of a tier's seconds per page
DECAY = 0.9
"""Each time that a tier is too slow, it is believed to be so much faster. So it is tried again."""


class TierTraffic:
    """Finds entries in the tiers, and collects what the next step moves.

    Invariants, verified by tests/tiers/invariants.py:
    - Each part that waits to be stored lies in pages that keep its contents until the next step.
    - A host entry is pinned once for each load in flight that reads it.

    Computing a prompt's token takes `token_seconds`; 0.0: that is unknown, and each load pays.
    """

    def __init__(
        self,
        host: HostSlots | None = None,
        store: StoreTier | None = None,
        *,
        token_seconds: float = 0.0,
    ) -> None:
        self.host = host
        self.store = store
        self.tiers: list[Tier] = [tier for tier in (host, store) if tier is not None]
        self.stats = TierStats()
        self._by_name = {tier.name: tier for tier in self.tiers}
        self.token_seconds = token_seconds
        self._too_slow: list[str] = []  # tiers of the last load that did not pay
        self._released: dict[int, None] = {}  # for the next step
        self._evicted: list[TierEntry] = []  # to host memory, in the next step
        self._unsent_parts: dict[bytes, TierEntry] = {}  # to the store, in the next step
        self._unsent_keys: dict[int, bytes] = {}  # by page
        self._sent: set[int] = set()  # pages that the store may still read

    @property
    def has_unsent(self) -> bool:
        """Whether parts wait to be written to the store."""
        return bool(self._unsent_parts)

    def find(self, key: bytes) -> str | None:
        """Return the name of the nearest tier that has an entry."""
        return next((tier.name for tier in self.tiers if tier.find(key)), None)

    def pays(self, num_pages: Counter[str], num_tokens: int) -> bool:
        """Return whether loading these pages, by tier, should be faster than computing tokens."""
        self._too_slow = []
        seconds = sum(self._by_name[name].page_seconds * n for name, n in num_pages.items())
        if not self.token_seconds or seconds < self.token_seconds * num_tokens:
            return True
        self._too_slow = list(num_pages)
        return False

    def retry_slow(self) -> None:
        """Take tiers that were too slow for an admission to be a little faster than they were: so
        each is tried again in the end. Called once an admission, however long that waited.
        """
        for name in self._too_slow:
            self._by_name[name].page_seconds *= DECAY
        self._too_slow = []

    def evict(self, key: bytes, pages: Seq[int]) -> None:
        """Copy an entry to host memory in the next step: its pages are about to be reused."""
        part = None if self.host is None else self.host.offer(key, pages)
        if part is not None:
            self._evicted.append(part)
            self.stats.num_offloaded_pages += len(pages)

    def keep(self, key: bytes, pages: Seq[int]) -> None:
        """Write an entry to the store after the next step, unless its pages are reused first."""
        part = None if self.store is None else self.store.offer(key, pages)
        if part is not None and key not in self._unsent_parts:
            self._unsent_parts[key] = part
            self._unsent_keys.update(dict.fromkeys(pages, key))

    def reuse(self, page: int) -> None:
        """Note that a page gets other contents in the next step."""
        if page in self._unsent_keys:
            self.drop_unsent(self._unsent_keys[page])
        if page in self._sent:
            self._sent.remove(page)
            self._released[page] = None

    def drop_unsent(self, key: bytes) -> None:
        """Do not write an entry to the store, if that was not scheduled yet."""
        part = self._unsent_parts.pop(key, None)
        for page in () if part is None else part.pages:
            del self._unsent_keys[page]

    def begin(self, name: str, key: bytes) -> TierEntry:
        """Return how an entry that was found is loaded, without pages. It stays until `unpin`."""
        return self._by_name[name].begin(key)

    def unpin(self, parts: Seq[TierEntry]) -> None:
        """Note that a load of `parts` is over, or never began."""
        for part in reversed(parts):  # so that the tail is evicted before the prefix
            self._by_name[part.tier].end(part)

    def end(self, parts: Seq[TierEntry], loaded: Loaded) -> None:
        """Learn how a load ended: what it took, and that its first wrong part is none."""
        self.unpin(parts)
        self.stats.num_loads += 1
        if loaded.num_parts < len(parts):
            self.stats.num_failed_loads += 1
            failed = parts[loaded.num_parts]
            self._by_name[failed.tier].forget(failed.key)
        else:
            self._learn(parts, loaded.seconds)

    def give_up(self, parts: Seq[TierEntry]) -> None:
        """Note that nothing waits for a load. It is over before the next step does anything."""
        self.unpin(parts)
        self._released.update(dict.fromkeys(page for part in parts for page in part.pages))

    def forget(self, key: bytes) -> None:
        """Remove an entry that may be wrong from all tiers."""
        self.drop_unsent(key)
        for tier in self.tiers:
            tier.forget(key)

    def take(self, loads: list[Load], *, awaited: bool) -> Transfers:
        """Return what the next step moves."""
        kept = list(self._unsent_parts.values())
        evicted = _last_of_each_slot(self._evicted)
        self._sent.update(self._unsent_keys)
        transfers = Transfers(list(self._released), [*evicted, *kept], loads, awaited)
        self._released = {}
        self._evicted = []
        self._unsent_parts = {}
        self._unsent_keys = {}
        return transfers

    def undo(self, transfers: Transfers) -> None:
        """Forget what a failed step may not have stored, and what was to be stored next: it may be
        a copy that the step did not make. The next step ends what this one should have ended.
        """
        for part in [*transfers.stores, *self._evicted]:
            if part.tier == HOST and self.host is not None:
                self.host.forget(part.key)
        self._evicted = []
        self._released.update(dict.fromkeys(transfers.released))
        for key in list(self._unsent_parts):  # so that an engine whose steps all fail has an end
            self.drop_unsent(key)

    def clear(self) -> None:
        """Forget all that waits to be written, and all of host memory. No load is in flight."""
        for key in list(self._unsent_parts):
            self.drop_unsent(key)
        self._evicted.clear()
        if self.host is not None:
            self.host.clear()

    def _learn(self, parts: Seq[TierEntry], seconds: float) -> None:
        """Give what a load took to its farthest tier, less what the others are known to take."""
        num_pages: Counter[str] = Counter()
        for part in parts:
            num_pages[part.tier] += len(part.pages)
        *others, last = (tier for tier in self.tiers if tier.name in num_pages)
        seconds -= sum(tier.page_seconds * num_pages[tier.name] for tier in others)
        measured = max(seconds, 0.0) / num_pages[last.name]
        weight = SMOOTHING if last.page_seconds else 1.0
        last.page_seconds += weight * (measured - last.page_seconds)


def _last_of_each_slot(parts: list[TierEntry]) -> list[TierEntry]:
    """Return host parts without those whose slots a later part takes."""
    found: list[TierEntry] = []
    taken: set[int] = set()
    for part in reversed(parts):
        if taken.isdisjoint(part.slots):
            found.append(part)
        taken.update(part.slots)
    return found[::-1]
