"""Plugins that are wrong, each in one way: the twins of those in examples/lab."""

from examples.lab.lfu_eviction import LeastFrequentlyUsed
from examples.lab.longest_prefix_first import LongestPrefixFirst
from examples.lab.shortest_job_first import ShortestFirst
from nanovllm.core.sequence import Sequence


class NeverAges(ShortestFirst):
    """Lets a long request starve."""

    def order(self, seq: Sequence) -> tuple[int, int, int]:
        return (seq.priority, seq.max_num_tokens, seq.seq_id)


class AsksTheClock(ShortestFirst):
    """Goes by how far a sequence is, which changes."""

    def order(self, seq: Sequence) -> tuple[int, int, int]:
        return (seq.priority, -seq.num_computed_tokens, seq.seq_id)


class PreemptsTheFirst(ShortestFirst):
    """Takes the pages of the sequence that needs one, each time."""

    def victim(self, candidates: object) -> Sequence:
        return candidates[0]  # type: ignore[index]


class LongestPrefixOnly(LongestPrefixFirst):
    """Lets those with a known prefix go first, for ever."""

    def _key(self, seq: Sequence) -> tuple[int, ...]:
        prefix = (seq.root_uid, *seq.token_ids[:16])
        return (seq.priority, self._begun.setdefault(prefix, seq.seq_id), seq.seq_id)


class LosesPages(LeastFrequentlyUsed):
    """Forgets a page that is let go and holds something."""

    def put_last(self, page: int) -> None:
        if page % 3:
            super().put_last(page)


class ForgetsHits(LeastFrequentlyUsed):
    """A hit counts as none, and what was let go last is reused first."""

    def touch(self, page: int) -> None: ...

    def put_last(self, page: int) -> None:
        self._filled.set(page, (0, -next(self._times)))


class TakesWhatIsHeld(LeastFrequentlyUsed):
    """Takes pages that hold something before empty ones."""

    def take(self) -> int:
        if len(self._filled):
            page = self._filled.first()
            self._filled.remove(page)
            return page
        return super().take()


class CannotRevive(LeastFrequentlyUsed):
    """Fails at a hit of a free page."""

    def remove(self, page: int) -> None:
        raise KeyError(7)
