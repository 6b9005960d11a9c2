"""Which replica a conversation prefers: the one whose prefix cache has its beginning, unless that
is too busy.

Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup and
Zadimoghaddam, 2016) keeps no state, so that every caller finds the same replica, also after a
restart.
"""

from collections.abc import Mapping

import xxhash

MAX_IMBALANCE = 1.25
"""A replica with this many times the mean number of requests gets no more of them by affinity."""
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
