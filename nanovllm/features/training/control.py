"""`WeightControl`: puts an engine to sleep, wakes it up, and changes its weights.

`Interruption` takes it away from its requests meanwhile.

All methods are called between two steps, by the thread that runs the engine. What happens on each
rank is in features/training/rank_weights.py.
"""

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from concurrent.futures import Future
from functools import partial
from typing import Any

from nanovllm.engine.engine_thread import fulfil
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.features.training.packets import NamedTensor, Packet
from nanovllm.features.training.rank_weights import MAX_LISTED, NewTensor, RankWeights, on_weights
from nanovllm.options.validation import listed, shown

Command = Callable[[], Any]


@dataclasses.dataclass(eq=False)
class Interruption:
    """One call. With mode "wait", other commands run between its own: aborts, metrics, a resume."""

    control: "WeightControl"
    mode: str
    check: Callable[[], None]
    """Raises if the engine cannot be interrupted."""
    act: Command
    """Interrupts it, and aborts requests if `mode` says so."""
    refusal: str | None
    """Why requests that come while this call waits are refused; None: this is a pause, and they
    wait for its end."""
    outcome: Future[None] = dataclasses.field(default_factory=Future)
    """What `act` returned or raised, after it has waited."""

    @property
    def is_pause(self) -> bool:
        return self.refusal is None

    def commands(self) -> Iterator[Command]:
        """Yield commands for an engine; each must have returned before the next is asked for.

        If one fails, or the caller leaves before the last, `fail` must be called.
        """
        if self.mode != "wait":
            yield self.act
            return
        yield partial(self.control.begin_wait, self)
        while not self.outcome.done():
            yield self.control.wait_step
        yield self.outcome.result

    def fail(self) -> None:
        """Wait no more: the engine goes on as before."""
        self.control.leave_wait(self)


TAGS = ("weights", "kv_cache")
"""What sleeps, in vLLM's names."""
MODES = ("abort", "wait")
"""What happens to requests in flight."""
_ALL = ["all weights"]
PAUSE_MODES = (*MODES, "keep")


class WeightControl:
    """The state of an engine's weights, as its users see it.

    Hazard: an exception may end any method at any line. So before ranks do what keeps requests from
    running, the state says so; and it says that requests can run once the ranks have done all.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = weakref.ref(engine)
        self._asleep: set[str] = set()
        self._level = 0
        self.is_updating = False  # between start() and finish()
        self._owner: object | None = None  # the call that updates; None: start_weight_update()
        self._missing: list[str] = []  # tensors that must come before the next request
        self._waiting: list[Interruption] = []  # for the end of the requests in flight
        self._was_paused = False  # when the first pause began to wait

    @property
    def engine(self) -> LLMEngine:
        engine = self._engine()
        assert engine is not None
        return engine

    @property
    def is_open(self) -> bool:
        """Return whether an update runs of which any call of `update_weights` is a part."""
        return self.is_updating and self._owner is None

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    @property
    def sleep_level(self) -> int:
        """The level of the sleep that the engine is in; 0 while it is awake."""
        return self._level if self._asleep else 0

    def require_ready(self) -> None:
        """Raise InvalidRequestError while no request can run; one that comes in a pause waits."""
        if not self.engine.is_paused:
            waiting = (call.refusal for call in self._waiting)
            if reason := self._reason() or next(filter(None, waiting), None):
                raise InvalidRequestError(reason)

    def pause(self, mode: str, clear_cache: bool) -> Interruption:
        """Return a call that launches no step until `resume`. See `pause_generation`."""

        def check() -> None:
            self.engine.check_health()
            _check_mode(mode, PAUSE_MODES)
            if mode == "wait" and self.engine.is_paused and (reason := self._reason()):
                raise InvalidRequestError(f'mode "wait" cannot await requests: {reason}')

        def act() -> None:
            if mode != "wait":
                check()
            if mode == "abort":
                self._abort_requests()
            self.engine.is_paused = True
            self.engine.finish_steps()
            if clear_cache:
                self._forget_prefixes()
            self._end_waiting()

        return Interruption(self, mode, check, act, None)

    def resume(self) -> None:
        """Go on after `pause`, also one that still waits; without one nothing changes.

        Raises:
            InvalidRequestError: the weights or the pool are away, or the weights are not whole.
        """
        self.engine.check_health()
        if self.engine.is_paused and (reason := self._reason()):
            raise InvalidRequestError(f"the engine stays paused: {reason}")
        message = "the pause did not begin: a resume came while it waited for requests to finish"
        for call in self._waiting:
            if call.is_pause:
                call.outcome.set_exception(InvalidRequestError(message))
        self._waiting = [call for call in self._waiting if not call.is_pause]
        self.engine.is_paused = False
        self.engine.queue_held_requests()

    def begin_wait(self, call: Interruption) -> None:
        """Let the requests in flight finish before `call` acts, with those that a pause has kept.

        Raises:
            NanoVLLMError: what `call.check` raises.
        """
        call.check()
        engine = self.engine
        if call.is_pause:
            if not any(other.is_pause for other in self._waiting):
                self._was_paused = engine.is_paused
            engine.is_paused = False
            engine.hold_new_requests()
        self._waiting.append(call)

    def wait_step(self) -> None:
        """Run a step of the requests in flight. Without any, or in a pause, all calls act."""
        engine = self.engine
        engine.check_health()
        if not engine.is_paused and engine.scheduler.num_unfinished:
            engine.run_step()
        if engine.is_paused or not engine.scheduler.num_unfinished:
            self._end_waiting()

    def leave_wait(self, call: Interruption) -> None:
        """Let `call`, if it still waits, never act."""
        if call not in self._waiting:
            return
        self._waiting.remove(call)
        is_last = call.is_pause and not any(other.is_pause for other in self._waiting)
        try:
            if is_last and self._was_paused:
                self.engine.is_paused = True
                self.engine.finish_steps()
        finally:
            if is_last:
                self.engine.queue_held_requests()

    def _end_waiting(self) -> None:
        """Let the calls that wait act, pauses first: after them the others abort nothing.

        The requests that were held go on, or wait for a resume.
        """
        calls, self._waiting = self._waiting, []
        for call in sorted(calls, key=lambda call: not call.is_pause):
            fulfil(call.outcome, call.act)
        self.engine.queue_held_requests()

    def sleep(self, level: int, mode: str) -> Interruption:
        """Return a call that gives back the memory of weights and KV pool."""

        def check() -> None:
            if isinstance(level, bool) or level not in (1, 2):
                raise InvalidRequestError(
                    f"sleep level {shown(level)} must be 1 (keep the weights in a file) or 2 "
                    "(forget them)"
                )
            _check_mode(mode, MODES)
            self._require_no_update("sleep()")

        def act() -> None:
            check()
            if level == 2 and self._level == 1 and "weights" in self._asleep:
                self.wake_up(["weights"])  # what was kept is forgotten now
            if self._asleep == set(TAGS):
                return
            self._interrupt()
            # All ranks keep their weights before one gives them back.
            self._call(RankWeights.keep, level)
            self._level = level
            if level == 2 and not self._missing:
                self._missing = _ALL
            self._asleep = set(TAGS)
            self._call(RankWeights.sleep)

        return Interruption(self, mode, check, act, "the engine is about to sleep: call wake_up()")

    def wake_up(self, tags: Seq[str] | None) -> bool:
        """Take the memory back; return whether nothing sleeps any more.

        Raises:
            InvalidRequestError: a tag is unknown.
        """
        self.engine.check_health()
        wanted = TAGS if tags is None else tags
        if isinstance(wanted, str) or any(tag not in TAGS for tag in wanted):
            raise InvalidRequestError(
                f"wake_up tags {shown(tags)} must be a list of {' and '.join(map(shown, TAGS))}"
            )
        woken = [tag for tag in TAGS if tag in wanted and tag in self._asleep]
        if woken:
            self._call(RankWeights.wake_up, woken)
            self._asleep = self._asleep - set(woken)
        return not self._asleep

    def start(self, mode: str, owner: object | None = None) -> Interruption:
        """Return a call that begins an update: no request runs until `finish`.

        Args:
            owner: what alone may load tensors, and finish; None: any call may.
        """

        def check() -> None:
            self._require_no_update("an update")
            if "weights" in self._asleep:
                raise InvalidRequestError(
                    'the weights sleep: call wake_up(["weights"]) before update_weights'
                )
            _check_mode(mode, MODES)

        def act() -> None:
            check()
            self._interrupt()
            self._missing = _union(self._call(RankWeights.give_up))  # of an update without an end
            self._owner = owner
            self.is_updating = True

        refusal = "an update of the weights is about to begin: try again when it has ended"
        return Interruption(self, mode, check, act, refusal)

    def check(
        self, infos: Seq[NewTensor], whole: bool, every: bool, owner: object | None = None
    ) -> None:
        """Check tensors of an update before any is written. See `RankWeights.check`."""
        if self.is_updating or not whole:
            self._require_update(owner)
        self._call(RankWeights.check, infos, whole, every)

    def load(self, tensors: Seq[NamedTensor | Packet], owner: object | None = None) -> None:
        """Write tensors, or let ranks keep them until the rest of their layer comes.

        Raises:
            InvalidRequestError: no update of `owner` has begun, or a tensor is wrong.
        """
        self._require_update(owner)
        self._call(RankWeights.load, tensors)

    def finish(self, version: int | str | None, owner: object | None = None) -> None:
        """End an update: requests run again, with the new version on their outputs.

        Raises:
            InvalidRequestError: no update of `owner` has begun, or a part of a rounded layer is
                missing.
        """
        check_version(version)
        self._require_update(owner)
        try:
            missing = _union(self._call(RankWeights.finish))
            outputs = self.engine.output_processor
            last = outputs.weight_version
            following = last + 1 if isinstance(last, int) else f"{last}+1"
            outputs.weight_version = following if version is None else version
            self._missing = missing
            self.is_updating = False
            self._owner = None
            self._call(RankWeights.settle)
        except BaseException:
            self.fail(owner)
            raise

    def cancel(self) -> bool:
        """End an update of several calls, if one runs; return whether the weights are whole."""
        self.engine.check_health()
        self.fail()
        return not self._missing

    def fail(self, owner: object | None = None) -> None:
        """End an update of `owner` that has failed. If it has changed weights, all must come again.

        An update of another call goes on.
        """
        if not self.is_updating or self._owner is not owner:
            return
        self._missing = self._missing or _ALL  # until the ranks have said what they have written
        self.is_updating = False
        self._owner = None
        with contextlib.suppress(NanoVLLMError):  # the engine is down, and says so
            self._missing = _union(self._call(RankWeights.give_up))

    def _interrupt(self) -> None:
        """Abort the requests that run, unless the engine is paused; forget the KV of all prefixes.

        After a wait none runs.
        """
        if not self.engine.is_paused:
            self._abort_requests()
        self._forget_prefixes()

    def _abort_requests(self) -> None:
        engine = self.engine
        engine.check_health()
        for request_id in list(engine.output_processor.requests):
            engine.abort(request_id)
        engine.run_last_steps()

    def _forget_prefixes(self) -> None:
        """Forget the KV of all prefixes; requests that a pause keeps compute theirs again."""
        reset = self.engine.reset_prefix_cache(reset_running_requests=True)
        assert reset, "no sequence has blocks"

    def _require_no_update(self, what: str) -> None:
        self.engine.check_health()
        if self.is_updating:
            raise InvalidRequestError(
                f"{what} cannot begin: an update of the weights runs; finish_weight_update() first"
            )

    def _require_update(self, owner: object | None) -> None:
        self.engine.check_health()
        if not self.is_updating:
            raise InvalidRequestError("no update of the weights has begun: start_weight_update()")
        if self._owner is not owner:
            raise InvalidRequestError("another call of update_weights runs: wait for its end")

    def _call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a method of `RankWeights` on each rank; return the results."""
        self.engine.owner.check()
        return self.engine.executor.call_all(on_weights, method, *arguments)

    def _reason(self) -> str | None:
        """Return why no request can run: weights or pool are away, or weights are not whole."""
        if self._asleep:
            asleep = " and ".join(sorted(self._asleep))
            return f"the engine sleeps ({asleep}): call wake_up()"
        if self.is_updating:
            return "an update of the weights runs: finish_weight_update() ends it"
        if self._missing:
            return (
                f"the weights are not whole: {listed(self._missing, MAX_LISTED)} must come by "
                "update_weights, after sleep(level=2) or an update that failed"
            )
        return None


def _union(of_ranks: Iterable[list[str]]) -> list[str]:
    """Return the names that one rank or more returned."""
    return list(dict.fromkeys(name for names in of_ranks for name in names))


def _check_mode(mode: str, modes: Seq[str]) -> None:
    if mode not in modes:
        raise InvalidRequestError(f"mode {shown(mode)} must be one of {', '.join(modes)}")


def check_version(version: int | str | None) -> None:
    """Raise InvalidRequestError if `version` is neither an int nor a str."""
    if isinstance(version, bool) or not isinstance(version, int | str | None):
        raise InvalidRequestError(f"weight_version {shown(version)} must be an int or a str")


_MAKING = threading.Lock()


def control_of(engine: LLMEngine) -> WeightControl:
    """Return the one control of `engine`, which is made when it is first asked for."""
    with _MAKING:
        if engine.weights is None:
            engine.weights = WeightControl(engine)
        return engine.weights
