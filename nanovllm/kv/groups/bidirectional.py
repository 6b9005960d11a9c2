"""Layers whose tokens see those after them: a prompt is computed in one step."""

from nanovllm.core.sequence import Sequence
from nanovllm.kv.groups.group import KVCacheGroup


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
