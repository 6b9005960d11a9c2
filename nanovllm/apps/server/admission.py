"""The bounded queue: counts sequences, answers that clients have not read and the bytes of large
bodies, and refuses what is too much.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.types import Message, Receive

from nanovllm.apps.server.error_bodies import APIError

_WINDOW_SECONDS = 30.0
_MAX_RETRY_SECONDS = 60
_SMALL_BODY = 2**16
"""Bytes of each body that are not counted, so that large ones do not keep out small ones."""
MANY_BODIES = 64
"""At most this many of the largest bodies are in memory, and as many bytes of answers."""


class Guard:
    """An HTTP request, which ends when its client leaves or its time is over, and what it holds.

    The tasks of the request wait for the engine within `with guard`. There, and only there, they
    are interrupted; they raise the error that says why.
    """

    user: str | None = None
    num_active = 0
    """Sequences that wait or run."""
    num_unread = 0
    """Sequences that the engine has ended, whose client has not read all."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._waiting: set[asyncio.Task[object]] = set()
        self._error: APIError | None = None
        self._is_cut = False

    def end(self, error: APIError) -> None:
        """Make every task of the request raise `error`; the first error counts."""
        if self._error is None:
            self._error = error
            for task in self._waiting:
                task.cancel()

    def cut(self) -> None:
        """End the task that sends the answer; the client, which reads slowly, gets no more."""
        assert self._task is not None
        self._is_cut = True
        self._task.cancel()

    def ends_quietly(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Whether an exception is the end of a request that was cut: it needs no report."""
        if not self._is_cut or kind is not asyncio.CancelledError:
            return False
        assert self._task is not None
        self._task.uncancel()
        return True

    async def watch(self, request: Request) -> None:
        """Wait until the client is gone, then end the request."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.end(APIError(499, "the client has closed the connection"))

    def __enter__(self) -> None:
        if self._error is not None:
            raise self._error
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._waiting.discard(task)
        if self._error is not None and kind is asyncio.CancelledError:
            task.uncancel()
            raise self._error from None


class AdmissionControl:
    """Admits requests while there is room.

    A user may hold half of the queue, so that no one keeps out all others. A request gives back its
    places when the engine has ended it. As many answers again may wait for clients that read
    slowly; beyond that, those that have waited for long are cut off.

    Args:
        max_waiting: most sequences in addition to those that run.
        num_running: returns how many sequences run in the engine now.
        read_seconds: how long an answer may wait for its client, whatever others wait.
    """

    def __init__(
        self, max_waiting: int, num_running: Callable[[], int], read_seconds: float = 60.0
    ) -> None:
        self._max_waiting = max_waiting
        self._share = -(-max_waiting // 2)
        self._held: Counter[str] = Counter()  # active sequences of each user
        self._num_running = num_running
        self._read_seconds = read_seconds
        self._requests: set[Guard] = set()
        self._unread: dict[Guard, float] = {}  # since when answers are unread, the oldest first
        self.num_active = 0
        self._num_unread = 0
        self._ended: deque[tuple[float, int]] = deque()  # time and sequences of recent ends
        self.is_draining = False

    @property
    def num_requests(self) -> int:
        """How many requests are in the server, with those whose clients still read."""
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """How many sequences do not run yet."""
        return max(0, self.num_active - self._num_running())

    @contextmanager
    def admit(self, request: Guard, num_sequences: int, user: str | None = None) -> Iterator[None]:
        """Count a request's sequences: as active until `engine_ended`, then as unread.

        Args:
            user: whose request it is; None: it has no owner and no share.

        Raises:
            APIError: status 503, the server is shutting down or its queue is full; status 429, the
                user holds half of the queue; status 400, the request has more sequences than it
                may ever have.
        """
        if self.is_draining:
            raise shutting_down()
        self._check_room(num_sequences, user)
        self._requests.add(request)
        request.user = user
        self._add_active(request, num_sequences)
        try:
            yield
        finally:
            self._requests.remove(request)
            self._free(request, request.num_active)
            self._num_unread -= request.num_unread
            self._unread.pop(request, None)

    def engine_ended(self, request: Guard, num_sequences: int) -> None:
        """Give back the places of sequences that the engine has ended."""
        if request not in self._requests:  # the client went away first
            return
        self._free(request, num_sequences)
        self._unread.setdefault(request, time.monotonic())
        request.num_unread += num_sequences
        self._num_unread += num_sequences
        self._cut_unread()

    def _add_active(self, request: Guard, num_sequences: int) -> None:
        request.num_active += num_sequences
        self.num_active += num_sequences
        if request.user is not None:
            self._held[request.user] += num_sequences
            if not self._held[request.user]:
                del self._held[request.user]

    def _free(self, request: Guard, num_sequences: int) -> None:
        if num_sequences:
            self._add_active(request, -num_sequences)
            self._ended.append((time.monotonic(), num_sequences))
            self._forget_old()

    def _cut_unread(self) -> None:
        """Cut off the oldest unread answers if there are too many."""
        oldest = time.monotonic() - self._read_seconds
        for request, since in list(self._unread.items()):
            if self._num_unread <= self._max_waiting or since > oldest:
                break
            del self._unread[request]
            self._num_unread -= request.num_unread
            request.num_unread = 0
            request.cut()

    def _check_room(self, num_sequences: int, user: str | None) -> None:
        limit = self._max_waiting if user is None else self._share
        if num_sequences > limit:
            who = "the queue holds" if user is None else "a user may have in the queue"
            raise APIError(
                400,
                f"the request asks for {num_sequences} answers (n times the prompts) and "
                f"{who} {limit}: send fewer at once",
                param="n",
            )
        num_waiting = self.num_waiting
        if num_waiting + num_sequences > self._max_waiting:
            raise APIError(
                503,
                f"the queue is full: {num_waiting} sequences wait, max_waiting is "
                f"{self._max_waiting}; try again later",
                code="queue_full",
                headers=self._retry_after(),
            )
        # Which of a user's sequences run is not known: no more of them wait than this.
        if user is not None and min(num_waiting, self._held[user]) + num_sequences > limit:
            raise APIError(
                429,
                f"too many of this user's requests are in the server: {self._held[user]} "
                f"sequences, and {limit} may wait, half of max_waiting; try again later",
                code="user_queue_full",
                headers=self._retry_after(),
            )

    def end_all(self, error: APIError) -> None:
        """End every request; each client gets the error."""
        for request in list(self._requests):
            request.end(error)

    def _retry_after(self) -> dict[str, str]:
        """Return in how many whole seconds half of the queue ends at the recent rate."""
        self._forget_old()
        if not self._ended:
            return {"Retry-After": "1"}
        seconds = max(1.0, time.monotonic() - self._ended[0][0])
        rate = sum(count for _, count in self._ended) / seconds
        wait = math.ceil(self.num_waiting / 2 / rate)
        return {"Retry-After": str(max(1, min(_MAX_RETRY_SECONDS, wait)))}

    def _forget_old(self) -> None:
        oldest = time.monotonic() - _WINDOW_SECONDS
        while self._ended and self._ended[0][0] < oldest:
            self._ended.popleft()


class BodyBudget:
    """Bounds the bytes of all bodies that are in memory at the same time.

    Args:
        max_body_bytes: of one body. All together have 64 times as many at most; the first 64 KiB
            of each are not counted.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = MANY_BODIES * max_body_bytes
        self._num_bytes = 0

    @contextmanager
    def reading(self, receive: Receive) -> Iterator[Receive]:
        """Yield a `receive` whose bytes count until the block ends: the answer has been sent."""
        size = held = 0

        async def counted() -> Message:
            nonlocal size, held
            message = await receive()
            size += len(message.get("body", b""))
            more = max(0, size - _SMALL_BODY) - held
            if self._num_bytes + more > self._max_bytes:
                raise APIError(
                    503,
                    f"the requests in the server have over {self._max_bytes} bytes; try again "
                    "later, or with a smaller one",
                    code="bodies_full",
                    headers={"Retry-After": "1", "Connection": "close"},
                )
            self._num_bytes += more
            held += more
            return message

        try:
            yield counted
        finally:
            self._num_bytes -= held


class AnswerBudget:
    """Bounds the bytes of answers waiting for their clients; a lone answer may have more.

    An answer is known by what cuts it off.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[Callable[[], object]] = Counter()

    def add(self, cut: Callable[[], object], num_bytes: int) -> None:
        """Count bytes that came, or with a negative number went; cut off whoever has most."""
        self._held[cut] += num_bytes
        while self._held.total() > self._max_bytes and len(self._held) > 1:
            (largest, _), *_ = self._held.most_common(1)
            self.drop(largest)
            largest()

    def drop(self, cut: Callable[[], object]) -> None:
        """Forget an answer, which has ended."""
        del self._held[cut]


def shutting_down() -> APIError:
    return APIError(
        503,
        "the server is shutting down",
        type="server_error",
        code="shutting_down",
        headers={"Retry-After": "1", "Connection": "close"},
    )
