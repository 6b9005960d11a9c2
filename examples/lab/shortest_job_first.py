"""A policy in one file: shortest job first, with ageing.

nanovllm lab check examples.lab.shortest_job_first:ShortestFirst
"""

from nanovllm.core.sequence import Sequence
from nanovllm.scheduler.heap import Heap
from nanovllm.scheduler.policy import Policy

AGEING = 32
"""Each request that arrives later counts as so many tokens longer."""


class ShortestFirst(Policy):
    """By priority; then those that may have the fewest tokens, with ageing, so that none starves.

    A request waits for no request of its priority that arrived more than its own length / AGEING
    requests later.
    """

    def __init__(self) -> None:
        self._prompts: Heap[Sequence] = Heap()

    def order(self, seq: Sequence) -> tuple[int, int, int]:
        return (seq.priority, seq.max_num_tokens + AGEING * seq.seq_id, seq.seq_id)

    def push(self, seq: Sequence) -> None:
        self._prompts.set(seq, self.order(seq))

    def remove(self, seq: Sequence) -> None:
        self._prompts.remove(seq)

    def first(self) -> Sequence | None:
        return self._prompts.first() if len(self._prompts) else None
