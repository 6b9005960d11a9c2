"""A policy decides which requests go first. This one prefers short prompts.

Run it in the folder of this file:

    PYTHONPATH=. nanovllm serve MODEL --scheduling-policy my_policy:MyPolicy

The contract is nanovllm/scheduler/policy.py; docs/plugins.md has the rules. A policy changes when
a request is computed, never what it gets.
"""

from nanovllm.core.sequence import Sequence
from nanovllm.scheduler.heap import Heap
from nanovllm.scheduler.policy import Policy

AGEING = 16
"""Each request that arrives later counts as so many tokens longer, so that none starves."""


class MyPolicy(Policy):
    """By priority; then the shortest prompt first, with ageing.

    It holds the sequences that wait, and those whose prompt is partly computed. It is called at
    each step, and 100,000 sequences may wait: keep each method at O(log n).
    """

    def __init__(self) -> None:  # called without arguments, once
        self._prompts: Heap[Sequence] = Heap()  # any item can be removed, not only the first

    def order(self, seq: Sequence) -> tuple[int, int, int]:
        """Return the sort key: lower goes first, and no two may be equal.

        The key may depend on what a sequence is (num_prompt_tokens, max_num_tokens, priority, user,
        seq_id, which grows with arrival), never on the time or on how far it has got.
        """
        return (seq.priority, seq.num_prompt_tokens + AGEING * seq.seq_id, seq.seq_id)

    def push(self, seq: Sequence) -> None:
        """Hold a sequence: it is new, or it was preempted."""
        self._prompts.set(seq, self.order(seq))

    def remove(self, seq: Sequence) -> None:
        """Hold it no more: its prompt is computed, or it has ended."""
        self._prompts.remove(seq)

    def first(self) -> Sequence | None:
        """Return the one to go next. It stays held until it is removed."""
        return self._prompts.first() if len(self._prompts) else None

    # Optional, with these defaults:
    #
    # def advance(self, seq, num_left):  # all but num_left tokens of its prompt are computed
    # def victim(self, candidates):      # who loses its KV when the pool is full
    #     return candidates[-1]
    # def share(self, seq, num_missing, budget):  # how much of its prompt a step computes
    #     return min(num_missing, budget)
