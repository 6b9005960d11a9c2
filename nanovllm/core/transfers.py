"""The messages about KV that moves between the pool and the tiers below it.

An entry is what the prefix cache holds: a KV block, a window block or a state snapshot. A tier
keeps copies of entries: host memory, in slots of one page each, or a byte store. Plain Python
values, picklable, never changed.
"""

from typing import NamedTuple

HOST = "host"
STORE = "store"


class TierEntry(NamedTuple):
    """One entry in one tier."""

    tier: str
    """`HOST` or `STORE`."""
    key: bytes
    pages: list[int]
    """Of the pool, in the entry's order."""
    slots: list[int]
    """Of host memory: slots[i] is the copy of pages[i]. Empty for a store."""


class Load(NamedTuple):
    """Entries that a sequence waits for. They are copied from their tiers to the pool's pages."""

    load_id: int
    parts: list[TierEntry]
    """In the order in which they are needed."""


class Transfers(NamedTuple):
    """What a step moves, in the order of the fields, before its copies, zeroing and rows."""

    released: list[int]
    """Pages about to be reused: their writes and loads end, or are given up, first."""
    stores: list[TierEntry]
    """To host: copied before all else of the step. To a store: queued for writing."""
    loads: list[Load]
    """Begin in this step. A later step's result says that they have ended."""
    awaited: bool = False
    """Whether the step has no rows, and ends only when the oldest load in flight has ended."""


class Loaded(NamedTuple):
    """How a load ended."""

    load_id: int
    num_parts: int
    """How many of its first parts are right: on all ranks, in a result."""
    seconds: float
    """From the begin of its first part to the end of its last."""
