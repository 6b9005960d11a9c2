"""What `nanovllm lab check` tries: a policy or an eviction order, how an engine gets it, and the
options of the check.
"""

import contextlib
import importlib
from functools import partial
from typing import Annotated, Any, NamedTuple

from nanovllm.errors import ConfigError
from nanovllm.kv.eviction import EvictionOrder
from nanovllm.options.plugins import check_plugin, load_class, make_guarded
from nanovllm.options.validation import check_int, checked_dataclass
from nanovllm.scheduler.policy import Policy

POLICY, EVICTION = "scheduling_policy", "eviction_policy"
"""The engine options that name a plugin, which are its kind here."""
_BASES: dict[str, tuple[type, tuple[str, ...]]] = {
    POLICY: (Policy, ()),
    EVICTION: (EvictionOrder, ("num_pages",)),
}


@checked_dataclass(ConfigError)
class CheckOptions:
    """What `nanovllm lab check` requires, and how long it tries.

    Raises:
        ConfigError: a field is unknown, of the wrong type, or out of range.
    """

    fair: bool = False
    """Require that users take turns, as they do by default."""
    num_runs: Annotated[int, check_int, 1, 1_000_000] = 400
    """Number of random runs, each of up to 40 calls."""


class Plugin(NamedTuple):
    """A user's class."""

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
        """`make_policy` or `make_order` of `nanovllm.testing.fake_engine.FakeEngine`."""
        name = f'{self.kind}="{self.value}"'
        made = partial(make_guarded, name, _BASES[self.kind][0], self.made_by)
        return {"make_policy" if self.kind == POLICY else "make_order": made}


def find_plugin(value: str) -> Plugin:
    """Return the plugin that "module:Class" names, as the engine's options do.

    Raises:
        ConfigError: there is no such class, it is neither a policy nor an eviction order, or it
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
