"""A policy and an order of eviction of the user's, whose exceptions name them."""

from collections.abc import Callable

from nanovllm.kv.eviction import EvictionOrder
from nanovllm.options.plugins import at_start, guarded
from nanovllm.scheduler.policy import Policy


def user_policy(name: str, found: Callable[[], Policy]) -> Policy:
    """Return the user's policy.

    Args:
        name: the option and the class, `scheduling_policy="module:Class"`.
        found: the class.

    Raises:
        ConfigError: its `__init__` raises an exception that is not ours.
    """
    return guarded(at_start(name, "__init__()", found), Policy, name)


def user_order(name: str, found: Callable[[int], EvictionOrder], num_pages: int) -> EvictionOrder:
    """Return the user's order of eviction. The arguments are as for `user_policy`.

    Raises:
        ConfigError: its `__init__` raises an exception that is not ours.
    """
    return guarded(at_start(name, "__init__()", found, num_pages), EvictionOrder, name)
