"""uvicorn's HTTP/1.1 connection with limits: of their number, and of time, for requests that
trickle in and for answers that are not read. Errors of the protocol leave as OpenAI's JSON, too.
"""

import asyncio
import json
import time
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.apps.server.error_bodies import APIError
from nanovllm.utils.system import has_left, num_unsent

_TURN_SECONDS = 0.002
"""For the parts of a body that one connection has sent, before others have their turn."""
_LEAST_PIECE = 256
_LARGEST_PIECE = 2**18
_WATCH_SECONDS = 0.5


def connection_class(read_timeout: float, most: int) -> type[H11Protocol]:
    """Return a connection class that allows at most `most` connections.

    A request must have arrived whole within `read_timeout`, and a client that has stopped reading
    must go on within it.
    """

    class Connection(_Connection):
        timeout = read_timeout
        max_connections = most
        waiting: ClassVar[set[_Connection]] = set()

    return Connection


class _Connection(H11Protocol):
    timeout: float
    max_connections: int
    _arriving: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    waiting: ClassVar[set["_Connection"]]
    """Connections of which more has arrived than a turn has time for."""
    _turn: asyncio.TimerHandle | None = None
    _leaving: asyncio.TimerHandle | None = None
    _piece_size = _LEAST_PIECE

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first request; refuse a connection too many."""
        super().connection_made(transport)
        self._arrived = bytearray()
        self.app_state = {**self.app_state, "connection": self}  # found in each request's state
        if len(self.connections) > self.max_connections:
            self._refuse(503, f"the server has {self.max_connections} connections; try again later")
        else:
            self._watch_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arriving, self._stuck, self._turn, self._leaving):
            if timer is not None:
                timer.cancel()
        self.waiting.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on what has arrived; start or stop the clock of its request.

        A body may come in chunks of a byte, which take a thousand times as long as their bytes: so
        it is read in pieces, and all connections whose pieces take long share a third of the time.
        """
        self._arrived += data
        if self._turn is None:
            self._read_pieces()
        else:  # the app has asked for more
            self.transport.pause_reading()

    def _read_pieces(self) -> None:
        self._turn = None
        self.waiting.discard(self)
        while self._arrived and not self.transport.is_closing():
            piece = bytes(self._arrived[: self._piece_size])
            del self._arrived[: self._piece_size]
            start = time.perf_counter()
            super().data_received(piece)
            took = time.perf_counter() - start
            size = int(len(piece) * _TURN_SECONDS / max(took, 1e-6))
            self._piece_size = min(max(size, _LEAST_PIECE), _LARGEST_PIECE)
            if self._arrived and took > _TURN_SECONDS / 4:
                self.waiting.add(self)
                self._turn = self.loop.call_later(2 * took * len(self.waiting), self._read_pieces)
                break
        self._watch_arrival()
        if self._turn is not None:
            self.transport.pause_reading()
        elif not self.flow.read_paused:
            self.transport.resume_reading()
        if self._leaving is None and (self._turn or self.flow.read_paused):
            self._leaving = self.loop.call_later(_WATCH_SECONDS, self._check_presence)

    def _check_presence(self) -> None:
        """Cut off a client that has left while nothing is read from it, its end neither."""
        self._leaving = None
        if self._turn is None and not self.flow.read_paused:
            return
        if has_left(self.transport.get_extra_info("socket")):
            self.transport.abort()
        else:
            self._leaving = self.loop.call_later(_WATCH_SECONDS, self._check_presence)

    def on_response_complete(self) -> None:
        """Go on with a request that was sent before this answer; start its clock."""
        super().on_response_complete()
        has_begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        if has_begun and not self.transport.is_closing():
            self._watch_arrival()

    @property
    def can_write(self) -> bool:
        """Whether an answer has begun whose body goes in chunks, and its client reads on."""
        cycle = self.cycle
        is_open = cycle.response_started and not (cycle.response_complete or cycle.disconnected)
        is_open = is_open and not self.transport.is_closing()  # its client went away just now
        return is_open and not self.flow.write_paused and self.conn.their_http_version == b"1.1"

    def write(self, data: bytes) -> None:
        """Send a piece of the answer's body at once, while `can_write`.

        It is not empty, and the answer gave no length. To h11 a chunk changes nothing.
        """
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def pause_writing(self) -> None:
        """Give a client that reads nothing some time."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop the clock: the client reads again."""
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(400, msg)

    def _watch_arrival(self) -> None:
        is_arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_arriving and self._arriving is None:
            self._arriving = self.loop.call_later(self.timeout, self._arrived_too_slowly)
        elif not is_arriving and self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _watch_reader(self) -> None:
        self._stuck = self.loop.call_later(self.timeout, self._check_reader, self._num_unread())

    def _check_reader(self, num_before: int) -> None:
        """Cut the client off if it has read nothing since there were `num_before` bytes."""
        if self._num_unread() < num_before:
            self._watch_reader()
        else:
            self.transport.abort()

    def _num_unread(self) -> int:
        """Return how many bytes wait for the client, here and in the kernel's socket. Without
        those, progress shows in steps of a megabyte.
        """
        num_here: int = self.transport.get_write_buffer_size()
        return num_here + num_unsent(self.transport.get_extra_info("socket"))

    def _arrived_too_slowly(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(408, f"the request did not arrive within {self.timeout:g} s")
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Send an error without the app and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the app waits for the body: it learns of the end
            self.cycle.message_event.set()
        body = json.dumps(APIError(status, message, type="invalid_request_error").body).encode()
        headers = [("content-type", "application/json"), ("connection", "close")]
        headers.append(("content-length", str(len(body))))
        for event in (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
