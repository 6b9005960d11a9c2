"""What must hold of loads and of tiers between two calls of the scheduler. Imports no torch."""

from collections import Counter

from nanovllm.core.messages import HOST
from nanovllm.features.tiers.loads import LoadHook
from nanovllm.features.tiers.tier import HostSlots
from nanovllm.scheduler.scheduler import Scheduler


def load_gate(scheduler: Scheduler) -> LoadHook:
    """Return the hook of loads of a scheduler with tiers."""
    return next(hook for hook in scheduler.hooks if isinstance(hook, LoadHook))


def check_tiers(loads: LoadHook) -> None:
    """Verify every invariant of loads, of host slots, and of what moves next.

    Raises:
        AssertionError: a slot, a pin or a loading sequence is lost, or an unwritten page is kept.
    """
    scheduler, traffic = loads.scheduler, loads.traffic
    manager = scheduler.block_manager
    assert loads.cache._kept <= {node.uid for node in manager.trie.nodes.values()}
    assert loads._plan is None
    assert {x.load_id: x for x in loads._loading.values()} == loads._loads
    assert len({x.load_id for x in loads._loading.values()}) == len(loads._loading)
    assert bool(loads._loads) or not (loads._loading_keys or loads._parked)
    loaded: list[int] = []
    for seq, plan in loads._loading.items():
        assert plan.seq is seq
        assert seq in scheduler.running
        assert seq.is_held
        assert not seq.is_queued
        assert seq.num_in_flight_steps == 0
        assert seq.num_computed_tokens == plan.num_blocks * manager.block_size
        loaded += [page for part in plan.parts for page in part.pages]
    assert len({*loaded}) == len(loaded), "two loads fill the same page"
    for page in loaded:
        assert manager.blocks[page].ref_count == 1, "a page is loaded and has no owner"
        assert manager.blocks[page].entry is None, "a page is hit before it is loaded"
    for key, part in traffic._unsent_parts.items():
        assert all(traffic._unsent_keys[page] == key for page in part.pages)
    assert sum(len(p.pages) for p in traffic._unsent_parts.values()) == len(traffic._unsent_keys)
    if traffic.host is not None:
        check_host_slots(traffic.host, loads)


def check_host_slots(host: HostSlots, loads: LoadHook) -> None:
    """Verify that each slot has one use, and that the loads in flight pin what they read.

    Raises:
        AssertionError: a slot is leaked, or a pin is.
    """
    pins: Counter[int] = Counter()
    for plan in loads._loads.values():
        pins.update(part.slots[0] for part in plan.parts if part.tier == HOST)
    assert {slot: entry.num_pins for slot, entry in host._pinned.items()} == pins
    entries = {*host._entries.values(), *host._pinned.values()}
    slots = [slot for entry in entries for slot in entry.slots] + host._free
    assert sorted(slots) == list(range(host.num_slots)), "a slot is lost or has two uses"
    unpinned = {key for key, entry in host._entries.items() if entry.num_pins == 0}
    assert host._unpinned.keys() == unpinned
