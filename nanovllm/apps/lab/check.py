"""`nanovllm lab check`: does an engine keep every rule with a plugin in place?

Random runs of the scheduler with all invariants verified, bounds of waiting or of hits, and the
ways of `nanovllm prove`.
"""

import importlib.util
import linecache
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from nanovllm.apps.lab.bounds import (
    MOST_OVERTAKEN,
    WAITS,
    AnyPage,
    hit_rates,
    share_of_a_flood,
    wait_of,
)
from nanovllm.apps.lab.lab_options import CheckOptions
from nanovllm.apps.lab.plugin import EVICTION, POLICY, Plugin
from nanovllm.apps.prove.prove_options import ProveOptions
from nanovllm.errors import ConfigError, NanoVLLMError

_FAIR = 0.6
"""The most that one of two users may get of what both wait for, if users are to take turns."""


class Finding(NamedTuple):
    """What one check showed."""

    name: str
    holds: bool
    words: str
    """What was counted, or what is wrong."""
    seconds: float


OnFinding = Callable[[Finding], object]
Checked = tuple[bool, str]
"""Whether a rule holds, and `Finding.words`."""


def check(
    plugin: Plugin,
    model: str,
    engine_options: dict[str, Any],
    options: CheckOptions,
    prove: ProveOptions,
    on_finding: OnFinding = lambda finding: None,
) -> list[Finding]:
    """Check a plugin; return what was found, in the order in which it was tried. What fails in
    random calls or runs ends the check.

    Args:
        model, engine_options: of the engine that the ways of `nanovllm prove` run.
        on_finding: called with each finding as soon as it is known.

    Raises:
        ConfigError: hypothesis is not installed, Python runs without assertions, or the engine
            refuses its options, or the ways of `nanovllm prove` show nothing.
        CheckpointError: the model cannot be found or read.
    """
    if importlib.util.find_spec("hypothesis") is None:
        raise ConfigError("hypothesis is not installed: pip install -e '.[lab]' -c constraints.txt")
    if not __debug__:
        raise ConfigError("python -O removes the assertions that are checked here: leave -O out")
    found: list[Finding] = []
    start = time.monotonic()
    for name, (holds, words) in _findings(plugin, model, engine_options, options, prove):
        found.append(Finding(name, holds, words, round(time.monotonic() - start, 2)))
        on_finding(found[-1])
        if not holds and name.startswith("random"):
            break  # the others may never end with such a plugin
        start = time.monotonic()
    return found


def _findings(
    plugin: Plugin,
    model: str,
    engine_options: dict[str, Any],
    options: CheckOptions,
    prove: ProveOptions,
) -> Iterator[tuple[str, Checked]]:
    runs = options.num_runs
    if plugin.kind == EVICTION:
        yield "random calls", _guarded(lambda: _random_calls(plugin, runs))
    yield "random runs", _guarded(lambda: _random_runs(plugin, runs))
    if plugin.kind == POLICY:
        for name in WAITS:
            yield name, _guarded(partial(_wait, plugin, name))
        yield "users take turns", _guarded(lambda: _turns(plugin, is_required=options.fair))
    else:
        yield "hits", _guarded(lambda: _hits(plugin))
    yield "the same bits", _guarded(lambda: _proof(plugin, model, engine_options, prove))


def _guarded(checked: Callable[[], Checked]) -> Checked:
    """Return what a check says; an exception of the plugin's or of an invariant is a fault."""
    try:
        return checked()
    except ConfigError:
        raise
    except Exception as error:
        words = (isinstance(error, NanoVLLMError) and str(error)) or _words(error)
        lines = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
        calls = [line for line in lines if line.startswith("state.") and line != "state.check()"]
        return False, "\n".join([words, *calls])


def _words(error: Exception) -> str:
    """Return where an exception was raised, and its message or else the code that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    lines = range(last.lineno or 0, (last.end_lineno or 0) + 1)
    code = " ".join(linecache.getline(last.filename, number).strip() for number in lines)
    return f"{type(error).__name__} in {last.name}: {str(error) or code}"


def _random_calls(plugin: Plugin, num_runs: int) -> Checked:
    from nanovllm.testing.random_runs import OrderMachine, run_machine

    make = plugin.for_scheduler["make_order"]
    run_machine(lambda: OrderMachine(make), num_runs)
    return True, f"{num_runs} runs"


def _random_runs(plugin: Plugin, num_runs: int) -> Checked:
    from nanovllm.testing.random_runs import PluginMachine, run_machine

    run_machine(lambda: PluginMachine(**plugin.for_scheduler), num_runs)
    return True, f"{num_runs} runs, every invariant after every step"


def _wait(plugin: Plugin, name: str) -> Checked:
    waits = [
        wait_of(*WAITS[name], scarce=scarce, **plugin.for_scheduler) for scarce in (False, True)
    ]
    most = max(wait.num_overtaken for wait in waits)
    if all(wait.ended for wait in waits):
        return True, f"{most} later ones went first"
    preempted = max(wait.num_preemptions for wait in waits)
    return False, (
        f"it starves: after {MOST_OVERTAKEN} more requests it has not ended; {most} of them went "
        f"first, and it was preempted {preempted} times"
    )


def _turns(plugin: Plugin, *, is_required: bool) -> Checked:
    share = share_of_a_flood(**plugin.for_scheduler)
    words = f"a user with many requests gets {share:.0%} beside one with two"
    if share <= _FAIR:
        return True, words
    return not is_required, f"no: {words}" + " (allowed without --fair)" * (not is_required)


def _hits(plugin: Plugin) -> Checked:
    found = hit_rates(**plugin.for_scheduler)
    least = hit_rates(make_order=AnyPage)
    lru = hit_rates()
    words = "; ".join(
        f"{name}: {rate:.0%} (lru {lru[name]:.0%}, any page {least[name]:.0%})"
        for name, rate in found.items()
    )
    if any(rate > least[name] for name, rate in found.items()):
        return True, words
    return False, f"it keeps less than an order that takes any page: {words}"


def _proof(
    plugin: Plugin, model: str, engine_options: dict[str, Any], prove: ProveOptions
) -> Checked:
    from nanovllm.apps.prove.proof import Prover

    proof = Prover(model, {**engine_options, **plugin.options}, prove).prove()
    if proof.holds:
        proof.check_shown()
        num_requests = max(map(len, proof.digests.values()))
        ways = f"{proof.num_same} way" + "s" * (proof.num_same > 1)
        return True, f"{num_requests} requests, {ways} as `nanovllm prove` has them"
    return False, f"{proof.difference}; {proof.reproduction} shows it"
