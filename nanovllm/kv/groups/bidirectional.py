"""Layers whose tokens see those after them: a prompt is computed in one step."""

from collections.abc import Mapping, Sequence as Seq

from nanovllm.core.messages import Admission, Row
from nanovllm.core.sequence import Sequence
from nanovllm.kv.groups.group import KVCacheGroup, StepPages
from nanovllm.kv.trie import Hit, Node


class BidirectionalGroup(KVCacheGroup):
    """Requires each prompt in one step; owns no pages: those are `FullGroup`'s.

    The prefix cache must be off, because a token's keys depend on the tokens after it.

    Args:
        max_model_len: most tokens of a step's last row.
    """

    suffix = b"whole"  # of no entry
    num_tables = 0
    grows = False

    def __init__(self, max_model_len: int) -> None:
        self.max_extra_tokens = max_model_len - 1

    def row_length(self, seq: Sequence, most: int) -> int:
        return seq.num_tokens - seq.num_computed_tokens

    def needed(self, num_blocks: int) -> range:
        return range(0)

    def has(self, node: Node) -> bool:
        return False

    def num_missing(self, seq: Sequence, num_tokens: int, hit: Hit | None = None) -> int:
        return 0

    def begin(self, seq: Sequence, hit: Hit, num_missing: int) -> int:
        return 0

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """Do nothing, as all that follows."""

    def publish(self, seq: Sequence, first: int, nodes: Seq[Node], num_written: int) -> None:
        pass

    def free(self, seq: Sequence, distrusted: Seq[Node] | None) -> None:
        pass

    def forget(self, node: Node, *, evicted: bool) -> None:
        pass

    def pages_of(self, seq: Sequence, index: int) -> list[int]:
        return []

    def fill_step(
        self,
        step: StepPages,
        rows: Seq[Row],
        admissions: Seq[Admission],
        sequences: Mapping[int, Sequence],
        width: int,
    ) -> None:
        pass
