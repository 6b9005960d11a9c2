"""What `nanovllm lab` tries: a policy or an order of eviction, and how an engine gets it."""

import contextlib
import importlib
from functools import partial
from typing import Any, NamedTuple

from nanovllm.errors import ConfigError
from nanovllm.kv.eviction import EvictionOrder
from nanovllm.options.plugins import check_plugin, load_class, make_guarded
from nanovllm.scheduler.policy import Policy

POLICY, EVICTION = "scheduling_policy", "eviction_policy"
"""The engine options that name a plugin, which are its kind here."""
_BASES: dict[str, tuple[type, tuple[str, ...]]] = {
    POLICY: (Policy, ()),
    EVICTION: (EvictionOrder, ("num_pages",)),
}


class Plugin(NamedTuple):
    """A class of the user's."""

    kind: str
    """POLICY or EVICTION."""
    made_by: type
    value: str
    """What the option takes, "module:Class"."""

    @property
    def options(self) -> dict[str, Any]:
        """The engine option that names it."""
        return {self.kind: self.value}

    @property
    def for_scheduler(self) -> dict[str, Any]:
        """`make_policy` or `make_order` of `nanovllm.testing.fake_engine.Engine`."""
        name = f'{self.kind}="{self.value}"'
        made = partial(make_guarded, name, _BASES[self.kind][0], self.made_by)
        return {"make_policy" if self.kind == POLICY else "make_order": made}


def find_plugin(value: str) -> Plugin:
    """Return the plugin that "module:Class" names, as the engine's options do.

    Raises:
        ConfigError: there is no such class, it is neither a policy nor an order of eviction, or it
            cannot be made.
    """
    value = check_plugin(ConfigError, "PLUGIN", value, "")
    kind = EVICTION if _is_order(value) else POLICY
    base, arguments = _BASES[kind]
    return Plugin(kind, load_class(kind, value, base, arguments), value)


def _is_order(value: str) -> bool:
    module, _, name = value.partition(":")
    with contextlib.suppress(Exception, SystemExit):  # `load_class` says what is wrong
        return issubclass(getattr(importlib.import_module(module), name), EvictionOrder)
    return False
