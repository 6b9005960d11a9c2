"""Layers whose tokens see those after them: a prompt is computed in one step."""

from nanovllm.core.sequence import Sequence
from nanovllm.kv.groups.group import KVCacheGroup


class BidirectionalGroup(KVCacheGroup):
    """Asks for whole prompts, and keeps nothing: their pages are those of `FullGroup`.

    The prefix cache must be off, because what a token's keys are depends on the tokens after it.

    Args:
        max_model_len: the last row of a step may have as many tokens.
    """

    suffix = b"whole"  # of no entry
    num_tables = 0
    grows = False

    def __init__(self, max_model_len: int) -> None:
        self.max_extra_tokens = max_model_len - 1

    def row_length(self, seq: Sequence, most: int) -> int:
        return seq.num_tokens - seq.num_computed_tokens
