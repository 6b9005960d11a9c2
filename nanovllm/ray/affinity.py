"""Which replica gets a request: that of its conversation, unless it has too much to do.

Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup and
Zadimoghaddam, 2016). It keeps no state, so that every caller finds the same replica, also after a
restart. Knows no HTTP and no prompts: the conversation is the session id of a handle's call.
"""

import random
from collections.abc import Mapping

import xxhash
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

MAX_IMBALANCE = 1.25
"""A replica that has so many times the mean of all replicas' requests gets no more of them by
affinity."""
FREE_REQUESTS = 8
"""A replica with fewer requests is never too busy: a small batch costs each request little."""


def order(conversation: str, loads: Mapping[str, int]) -> list[str]:
    """Return the names of replicas in the order in which a conversation prefers them.

    Those that are too busy come last, the idlest of them first. A replica that comes or goes moves
    only the conversations that prefer it.

    Args:
        conversation: its key.
        loads: number of requests of each replica, by name.
    """
    bound = max(FREE_REQUESTS, MAX_IMBALANCE * (sum(loads.values()) + 1) / len(loads))

    def rank(name: str) -> tuple[int, int]:
        busy = loads[name] if loads[name] >= bound else 0
        return busy, -xxhash.xxh3_64_intdigest(f"{conversation} {name}".encode())

    return sorted(loads, key=rank)


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Sends the requests with one session id to one replica; others to the idlest replica."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, to be tried in this order; of a group the idlest is tried."""
        if pending_request is None or not pending_request.metadata.session_id:
            return [random.sample(candidate_replicas, len(candidate_replicas))]
        pending_request.routing_context.should_backoff = True  # when all of them are full
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self._load(replica) for name, replica in by_name.items()}
        names = order(pending_request.metadata.session_id, loads)
        return [[by_name[name]] for name in names]

    def _load(self, replica: RunningReplica) -> int:
        """Return how many requests a replica has, as far as is known."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
