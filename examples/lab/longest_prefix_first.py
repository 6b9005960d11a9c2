"""A policy in one file: longest prefix first, so that prompts with one beginning come together.

SGLang orders those that wait by how much of their prompt the cache holds, which is a walk through
the tree of their prefixes, depth first (Zheng et al., 2024, theorem 3.1). Here a key must not
change with the cache. So this walks the tree of the prompts: branches go in order of arrival.

    nanovllm lab check examples.lab.longest_prefix_first:LongestPrefixFirst
"""

from nanovllm.core.sequence import Sequence
from nanovllm.scheduler.heap import Heap
from nanovllm.scheduler.policy import Policy

WINDOW = 64
"""Most requests that are ordered by prefix. None waits for later ones of another window, so none
starves."""
LEVELS = (512, 128, 32)
"""Lengths of the prefixes that make the tree, in tokens. What is shorter is cheap to compute."""

Key = tuple[int, ...]


class LongestPrefixFirst(Policy):
    """By priority and window; then by the prefixes that prompts share."""

    def __init__(self) -> None:
        self._prompts: Heap[Sequence] = Heap()
        self._keys: dict[Sequence, Key] = {}
        self._window = 0  # its first request
        self._begun: dict[tuple[object, ...], int] = {}
        """By prefix: the first request of the window that has it."""

    def order(self, seq: Sequence) -> Key:
        """Return the key that the sequence got when it came: it stays, whatever comes later."""
        return self._keys[seq]

    def push(self, seq: Sequence) -> None:
        if seq not in self._keys:  # else it was preempted
            self._keys[seq] = self._key(seq)
        self._prompts.set(seq, self._keys[seq])

    def remove(self, seq: Sequence) -> None:
        self._prompts.remove(seq)

    def first(self) -> Sequence | None:
        return self._prompts.first() if len(self._prompts) else None

    def end(self, seq: Sequence) -> None:
        self._keys.pop(seq, None)

    def _key(self, seq: Sequence) -> Key:
        if seq.seq_id >= self._window + WINDOW or not len(self._prompts):
            self._window, self._begun = seq.seq_id, {}
        branches = []
        for length in sorted(LEVELS):  # from the root of the tree: short prefixes first
            # Sequences with another salt or adapter share no KV, whatever their tokens are.
            prefix = (seq.root_uid, *seq.token_ids[: min(length, seq.num_prompt_tokens)])
            branches.append(self._begun.setdefault(prefix, seq.seq_id))
        return (seq.priority, self._window, *branches, seq.seq_id)
