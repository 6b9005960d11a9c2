"""What pictures add to a scheduler: sequences wait for the tower, whose work steps share."""

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable

from nanovllm.core.messages import Schedule
from nanovllm.core.sequence import Sequence
from nanovllm.core.worker_info import EncoderInfo
from nanovllm.features.vision.messages import NAME, EncoderStep, Picture, TowerSlice
from nanovllm.kv.trie import Hit
from nanovllm.scheduler.admission_hook import AdmissionHook

_LEAST_TOKENS = 16
"""A step of fewer tokens takes as long as one of so many: it reads all weights."""
_MOST_DELAY = 1.5
"""What the tower may cost beside a step's rows, in such steps."""


class EncoderHook(AdmissionHook):
    """Holds back sequences until the pictures are encoded that the prefix cache does not cover.

    A step runs a slice of the tower's layers, so that a large picture stalls nobody. What it has
    encoded is there for later steps, because steps run in the order in which they are scheduled. So
    the workers need not answer.

    Invariants:
    - The workers have the embeddings of `_cached`, once the steps scheduled so far have run. With
      those of the picture that is being encoded they take at most `max_bytes`.
    - A parked sequence waits, held by no policy. One that was parked before another gets all of its
      pictures before those of the other begin, and these never make room for the other's. So two
      sequences never wait for each other.
    - Pictures are pinned, and never dropped, while a sequence that is not parked may read them.

    Args:
        max_bytes: of embeddings. A request whose prompt has more must have been refused.
        budget: tokens of a step.
    """

    def __init__(self, info: EncoderInfo, max_bytes: int, budget: int) -> None:
        self._info = info
        self._max_bytes = max_bytes
        self._budget = budget
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # bytes by digest, the oldest first
        self._current: _Encoding | None = None
        self._pins: Counter[bytes] = Counter()
        self._pinned: dict[Sequence, frozenset[bytes]] = {}
        self._parked: dict[Sequence, dict[bytes, Picture]] = {}  # with all that it needs
        self._dropped: list[bytes] = []  # for the next step
        self.num_encoded = 0  # pictures, since the engine started

    def begin_step(self) -> None:
        """Let sequences go on whose pictures earlier steps have encoded, and let go of what the
        rows of earlier steps have read.
        """
        for seq, needed in list(self._parked.items()):
            if needed.keys() <= self._cached.keys():
                del self._parked[seq]
                self._pin(seq, needed)
                self.scheduler.resume(seq)
        for seq in list(self._pinned):
            end = max(span.end for span in seq.inputs)
            if seq.table_idx is not None and seq.num_computed_tokens >= end:
                self._pin(seq, ())

    def prepare(self, seq: Sequence, hit: Hit) -> Hit | None:
        """Park a sequence if a picture after the hit is not encoded."""
        if not seq.inputs:
            return hit
        computed = hit.num_blocks * self.scheduler.block_manager.block_size
        needed: dict[bytes, Picture] = {}
        for span in seq.inputs:
            if span.end > computed:
                assert isinstance(span.content, Picture)
                needed[span.digest] = span.content
        if needed.keys() <= self._cached.keys():
            self._pin(seq, needed)
            return hit
        self._pin(seq, ())
        self._parked[seq] = needed
        self.scheduler.suspend(seq)
        return None

    def needs_step(self) -> bool:
        return bool(self._dropped or self._current or self._begins())

    def fill_step(self, schedule: Schedule) -> Schedule:
        """Add the next parts of the tower's layers: as many as cost what the step's rows leave of
        its tokens, but little beside the step itself, and at least one.
        """
        slices: list[TowerSlice] = []
        budget = float(self._budget - schedule.num_tokens)
        if schedule.rows:
            budget = min(budget, _MOST_DELAY * max(schedule.num_tokens, _LEAST_TOKENS))
        while self._begin_next():
            assert self._current is not None
            current = self._current
            parts_of_layer = current.picture.num_parts
            num_parts = 0
            while num_parts < current.num_left:
                layer = (num_parts - current.num_left) // parts_of_layer % self._info.num_layers
                price = self._info.price(current.picture.num_patches, layer) / parts_of_layer
                if price > budget and (slices or num_parts):
                    break
                budget -= price
                num_parts += 1
            if num_parts == 0:
                break
            digest = current.picture.digest
            slices.append(
                TowerSlice(digest, num_parts, None if current.is_sent else current.picture)
            )
            current.is_sent = True
            current.num_left -= num_parts
            if current.num_left == 0:
                self._current = None
                self._cached[digest] = self._size(current.picture)
                self.num_encoded += 1
        if not (slices or self._dropped):
            return schedule
        step = EncoderStep(self._dropped, slices)
        self._dropped = []
        return dataclasses.replace(schedule, extras={**(schedule.extras or {}), NAME: step})

    def abandon(self, schedule: Schedule) -> None:
        """Encode all anew: a failed step may or may not have done its part."""
        for seq in list(self._pinned):
            if seq.table_idx is not None:
                self.scheduler.preempt(seq)
        self.forget()
        if (step := (schedule.extras or {}).get(NAME)) is not None:
            self._dropped += step.dropped
            self._dropped += [part.digest for part in step.slices]

    def forget(self) -> None:
        """Drop all embeddings. No running sequence may still need one."""
        for seq in list(self._pinned):  # those that wait are asked again when they are admitted
            self._pin(seq, ())
        self._dropped += self._cached
        self._cached.clear()
        self._stop_encoding()

    def remove(self, seq: Sequence) -> None:
        self._pin(seq, ())
        if self._parked.pop(seq, None) is not None and self._current is not None:
            digest = self._current.picture.digest
            if not any(digest in needed for needed in self._parked.values()):
                self._stop_encoding()

    @property
    def num_bytes(self) -> int:
        """Bytes of the embeddings that the workers have, or are about to have."""
        begun = 0 if self._current is None else self._size(self._current.picture)
        return sum(self._cached.values()) + begun

    def _size(self, picture: Picture) -> int:
        return picture.num_tokens * self._info.bytes_per_token

    def _pin(self, seq: Sequence, digests: Iterable[bytes]) -> None:
        """Pin these pictures for a sequence, and no others."""
        self._pins.subtract(self._pinned.pop(seq, ()))
        if found := frozenset(digests):
            self._pinned[seq] = found
            self._pins.update(found)
            for digest in found:
                self._cached.move_to_end(digest)

    def _begins(self) -> tuple[Picture, list[bytes]] | None:
        """Return the next picture to encode, the first that a parked sequence lacks, and what is
        dropped for it; None if none can be.
        """
        kept: set[bytes] = set()  # what this sequence needs, and those before it, which lack none
        for needed in self._parked.values():
            kept |= needed.keys()
            if not needed.keys() <= self._cached.keys():
                picture = next(needed[digest] for digest in needed if digest not in self._cached)
                break
        else:
            return None
        missing = self.num_bytes + self._size(picture) - self._max_bytes
        dropped = []
        for digest, size in self._cached.items():  # the oldest first
            if missing <= 0:
                break
            if not self._pins[digest] and digest not in kept:
                dropped.append(digest)
                missing -= size
        return (picture, dropped) if missing <= 0 else None

    def _begin_next(self) -> bool:
        """Return whether a picture is being encoded; begin the next one if none is, and it fits."""
        if self._current is None and (found := self._begins()) is not None:
            picture, dropped = found
            for digest in dropped:
                del self._cached[digest]
            self._dropped += dropped
            num_left = self._info.num_layers * len(picture.views) * picture.num_parts
            self._current = _Encoding(picture, num_left)
        return self._current is not None

    def _stop_encoding(self) -> None:
        if self._current is not None:
            self._dropped.append(self._current.picture.digest)
            self._current = None


@dataclasses.dataclass
class _Encoding:
    """A picture on its way through the tower."""

    picture: Picture
    num_left: int  # parts of layers, of all views
    is_sent: bool = False  # whether the workers have it
