"""`Interruption`: takes an engine away from its requests, for a pause, sleep or new weights.

Requests in flight are aborted; or they finish first, while the engine goes on.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.features.training.control import WeightControl

Command = Callable[[], Any]


class Interruption:
    """One call. With mode "wait", other commands run between its own: aborts, metrics, a resume.

    Args:
        check: raises if the engine cannot be interrupted.
        act: interrupts it, and aborts requests if `mode` says so.
        refusal: why requests that come while this call waits are refused; None: this is a pause,
            and they wait for its end.

    Attributes:
        outcome: what `act` returned or raised, after it has waited.
    """

    def __init__(
        self,
        control: "WeightControl",
        mode: str,
        check: Callable[[], None],
        act: Command,
        refusal: str | None,
    ) -> None:
        self._control = control
        self._mode = mode
        self.check = check
        self.act = act
        self.refusal = refusal
        self.outcome: Future[None] = Future()

    @property
    def is_pause(self) -> bool:
        return self.refusal is None

    def commands(self) -> Iterator[Command]:
        """Yield commands for an engine; each must have returned before the next is asked for.

        If one fails, or the caller leaves before the last, `fail` must be called.
        """
        if self._mode != "wait":
            yield self.act
            return
        yield partial(self._control.begin_wait, self)
        while not self.outcome.done():
            yield self._control.wait_step
        yield self.outcome.result

    def fail(self) -> None:
        """Wait no more: the engine goes on as before."""
        self._control.leave_wait(self)
