"""`nanovllm lab check`: does an engine keep every rule with a plugin in place?

Random runs of the scheduler with all invariants verified; how long a policy lets a request wait,
how it shares among users, and what an eviction order keeps, counted in runs with a fake worker, so
the same each time; and the ways of `nanovllm prove`.
"""

import itertools
import linecache
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from nanovllm.apps.lab.plugin import EVICTION, POLICY, CheckOptions, Plugin
from nanovllm.apps.prove import ProveOptions
from nanovllm.core.sequence import Sequence
from nanovllm.errors import ConfigError, NanoVLLMError
from nanovllm.kv.eviction import LeastRecentlyUsed
from nanovllm.options.validation import check_installed
from nanovllm.testing.fake_engine import VOCAB_SIZE, FakeEngine

_MOST_OVERTAKEN = 500
"""A request starves if this many later ones were admitted first."""
_MOST_STEPS = 50_000
_BACKLOG = 8
"""Requests of the stream that wait at any time: more come than the engine can run."""
_MAX_MODEL_LEN = 64
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
    check_installed("lab", "hypothesis")
    if not __debug__:
        raise ConfigError("python -O removes the assertions that are checked here: leave -O out")
    checks: dict[str, Callable[[], Checked]] = {}
    if plugin.kind == EVICTION:
        checks["random calls"] = partial(_random_calls, plugin, options.num_runs)
    checks["random runs"] = partial(_random_runs, plugin, options.num_runs)
    if plugin.kind == POLICY:
        checks |= {name: partial(_wait, plugin, name) for name in WAITS}
        checks["users take turns"] = partial(_turns, plugin, is_required=options.fair)
    else:
        checks["hits"] = partial(_hits, plugin)
    checks["the same bits"] = partial(_proof, plugin, model, engine_options, prove)
    found: list[Finding] = []
    for name, checked in checks.items():
        start = time.monotonic()
        holds, words = _guarded(checked)
        found.append(Finding(name, holds, words, round(time.monotonic() - start, 2)))
        on_finding(found[-1])
        if not holds and name.startswith("random"):
            break  # the others may never end with such a plugin
    return found


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
        f"it starves: after {_MOST_OVERTAKEN} more requests it has not ended; {most} of them went "
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
    return False, f"{proof.difference}"


class Ask(NamedTuple):
    """A kind of request."""

    prompt_len: int
    max_tokens: int
    user: str = ""
    shared: int = 0
    """Tokens at its beginning that all requests of its kind have."""


SHORT, LONG = Ask(3, 2), Ask(24, 24)
WAITS: dict[str, tuple[Ask, Ask]] = {
    "a long request among short ones": (LONG, SHORT),
    "a short request among long ones": (SHORT, LONG),
    "a request among others with one prefix": (Ask(18, 4), Ask(18, 4, shared=16)),
    "a request among those of another user": (Ask(8, 4, "ann"), Ask(8, 4, "bob")),
}
"""By name: the request that must not starve, and those that come without end."""


class Wait(NamedTuple):
    """How a request fared among others that came without end."""

    num_overtaken: int
    """Requests that arrived later and were admitted before it."""
    num_preemptions: int
    ended: bool


def wait_of(request: Ask, others: Ask, *, scarce: bool, **plugin: Any) -> Wait:
    """Return how a request fares while requests of another kind come without end.

    Args:
        scarce: whether the pool is too small for all that run, so that some are preempted.
        plugin: `make_policy` or `make_order` of `FakeEngine`.

    Raises:
        AssertionError: the scheduler does something wrong with the plugin.
        PluginError: the plugin raises an exception.
    """
    engine = _engine(num_blocks=24 if scarce else 120, **plugin)
    numbers = itertools.count()
    for _ in range(2 * _BACKLOG):
        _add(engine, others, next(numbers))
    steps = _steps(engine)
    for _ in range(6):
        next(steps)
    seq = _add(engine, request, next(numbers))
    while not seq.is_finished and len(engine.sequences) < seq.seq_id + _MOST_OVERTAKEN:
        for _ in range(_BACKLOG - engine.scheduler.num_waiting):
            _add(engine, others, next(numbers))
        next(steps)
    admitted = engine.admitted
    before = admitted[: admitted.index(seq.seq_id)] if seq.was_admitted else admitted
    later = sum(seq_id > seq.seq_id for seq_id in before)
    return Wait(later, engine.preempted.count(seq.seq_id), seq.is_finished)


def share_of_a_flood(**plugin: Any) -> float:
    """Return which part of the admitted requests is a user's with many requests that wait, beside
    one with two: 0.5 if they take turns, and about 0.9 if the first to come is the first to go.
    """
    engine = _engine(num_blocks=120, **plugin)
    numbers = itertools.count()
    many, few = Ask(8, 4, "many"), Ask(8, 4, "few")
    steps = _steps(engine)
    while len(engine.admitted) < 200:
        for ask, backlog in ((many, 2 * _BACKLOG), (few, 2)):
            waiting = sum(not s.was_admitted and s.user == ask.user for s in engine.sequences)
            for _ in range(backlog - waiting):
                _add(engine, ask, next(numbers))
        next(steps)
    admitted = [engine.sequences[seq_id] for seq_id in engine.admitted]
    return sum(seq.user == "many" for seq in admitted) / len(admitted)


class AnyPage(LeastRecentlyUsed):
    """Reuses any page that holds something: what an order must beat that keeps what is hit."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._rng = random.Random(0)
        self._empty = {*range(num_pages)}

    def take(self) -> int:
        page = next(iter(self))
        if page not in self._empty:
            page = self._rng.choice([*self])
        self.remove(page)
        self._empty.discard(page)
        return page

    def put_first(self, page: int) -> None:
        super().put_first(page)
        self._empty.add(page)


def hit_rates(**plugin: Any) -> Mapping[str, float]:
    """Return which part of the prompt tokens comes from the cache, for two kinds of requests: some
    shared prompts of which a few are asked often, and conversations whose turns come in any order.
    """
    return {
        "shared prefixes": _hit_rate(_shared_prefixes(), **plugin),
        "conversations": _hit_rate(_conversations(), **plugin),
    }


def _hit_rate(prompts: Iterator[list[int]], **plugin: Any) -> float:
    engine = _engine(num_blocks=40, **plugin)
    for prompt in prompts:
        engine.add(prompt, max_tokens=1)
        while engine.scheduler.num_unfinished:
            engine.step()
    stats = engine.scheduler.stats
    return stats.num_cached_tokens / stats.num_prompt_tokens


def _shared_prefixes() -> Iterator[list[int]]:
    rng = random.Random(1)
    prefixes = [_tokens(rng, 24) for _ in range(12)]
    weights = [1 / rank for rank in range(1, 13)]
    for _ in range(300):
        yield rng.choices(prefixes, weights)[0] + _tokens(rng, 8)
        if rng.random() < 0.5:
            yield _tokens(rng, 32)  # asked once


def _conversations() -> Iterator[list[int]]:
    rng = random.Random(2)
    begun: list[list[int]] = []
    for _ in range(300):
        if len(begun) < 6:
            begun.append(_tokens(rng, 8))
        index = min(int(rng.expovariate(0.6)), len(begun) - 1)
        text = begun.pop(index)
        yield text
        if len(text) < 48:
            begun.insert(0, text + _tokens(rng, 8))


def _engine(num_blocks: int, **plugin: Any) -> FakeEngine:
    return FakeEngine(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=_MAX_MODEL_LEN,
        **plugin,
    )


def _steps(engine: FakeEngine) -> Iterator[None]:
    """Make a step for each `next`.

    Raises:
        AssertionError: there are so many that some request can never end.
    """
    for _ in range(_MOST_STEPS):
        engine.step()
        yield
    admitted = len(set(engine.admitted))
    raise AssertionError(f"{_MOST_STEPS} steps, and of {admitted} requests that run some never end")


def _add(engine: FakeEngine, ask: Ask, number: int) -> Sequence:
    rng = random.Random(number)
    own = _tokens(rng, ask.prompt_len - ask.shared)
    return engine.add([1] * ask.shared + own, ask.max_tokens, ignore_eos=True, user=ask.user)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCAB_SIZE), k=count)
