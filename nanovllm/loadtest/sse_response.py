"""The parser of an HTTP answer whose body may be a stream of server-sent events.

Takes bytes and gives the data of events. Knows no socket, and nothing of what the events say.
"""

import contextlib
import json
import re

from nanovllm.errors import InvalidRequestError, ServerError
from nanovllm.options.validation import shown

MAX_HEAD_BYTES = 2**16
"""Limit of an answer's head."""
MAX_PART_BYTES = 2**24
"""Limit of a line of events, and of a body that is no stream of events."""


class Response:
    """The parser of one answer. It is fed with bytes as they come, cut anywhere."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is there."""
        self.headers: dict[str, str] = {}
        """By name in lower case."""
        self.body = bytearray()
        """The body, unless it is a stream of events."""
        self.is_complete = False
        self.is_stream = False
        """Whether the body is a stream of events."""
        self.keeps_alive = False
        """Whether the connection can be used again after this answer."""
        self._buffer = bytearray()
        self._chunked = self._in_trailer = False
        self._left: int | None = 0
        """Bytes still to come of the body or the chunk; None: until the connection ends."""
        self._line = b""
        self._data: list[bytes] = []
        """The begun line, and the data of the begun event."""

    def feed(self, data: bytes) -> list[str]:
        """Take bytes, and return the data of each event that they complete.

        Raises:
            ServerError: this is no HTTP, or a part of it is too large.
        """
        self._buffer += data
        if not self.status and not self._take_head():
            return []
        piece = self._take_chunks() if self._chunked else self._take_body()
        if self.is_stream:
            return self._take_events(piece)
        self.body += piece
        _check_size("body", len(self.body), MAX_PART_BYTES)
        return []

    def end(self) -> None:
        """Take note that the connection has ended.

        Raises:
            ServerError: it ended before the answer did.
        """
        if not self.is_complete:
            if not self.status or self._chunked or self._left is not None:
                raise ServerError("the server closed the connection before its answer ended")
            self.is_complete = True

    def check(self) -> None:
        """Raise the error that the server reports, if it does.

        Raises:
            InvalidRequestError: it calls the request invalid (status 400, 413 or 422).
            ServerError: another status than 200.
        """
        if self.status != 200:
            invalid = self.status in (400, 413, 422)
            kind = InvalidRequestError if invalid else ServerError
            raise kind(f"the server answers {self.status}: {message_of(bytes(self.body))}")

    def _take_head(self) -> bool:
        """Read the head if it is there; pass over heads such as 100 Continue."""
        while True:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                _check_size("head", len(head), MAX_HEAD_BYTES)
                return False
            self._buffer = rest
            first, *lines = head.decode("latin-1").split("\r\n")
            found = re.match(r"HTTP/1\.([01]) (\d{3})", first)
            if found is None:
                raise ServerError(f"this is no HTTP server: its answer begins with {shown(first)}")
            if not found[2].startswith("1"):
                break
        self.status = int(found[2])
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length", "0" if self.status in (204, 304) else "")
        if not self._chunked:
            self._left = int(length) if re.fullmatch(r"\d{1,15}", length) else None
        closes = "close" in self.headers.get("connection", "").lower() or found[1] == "0"
        self.keeps_alive = not closes and (self._chunked or self._left is not None)
        kind = self.headers.get("content-type", "")
        self.is_stream = self.status == 200 and kind.startswith("text/event-stream")
        return True

    def _take_body(self) -> bytes:
        piece = bytes(self._buffer[: self._left])
        del self._buffer[: self._left]
        if self._left is not None:
            self._left -= len(piece)
            self.is_complete = self._left == 0
        return piece

    def _take_chunks(self) -> bytes:
        piece = bytearray()
        while self._buffer and not self.is_complete:
            if self._left:
                taken = self._buffer[: self._left]
                piece += taken[: max(0, self._left - 2)]  # the last two bytes end the chunk
                del self._buffer[: len(taken)]
                self._left -= len(taken)
                continue
            line, end, rest = self._buffer.partition(b"\r\n")
            if not end:
                _check_size("chunk's head", len(line), MAX_HEAD_BYTES)
                break
            self._buffer = rest
            if self._in_trailer:
                self.is_complete = not line
                continue
            size = re.match(rb"[0-9a-fA-F]{1,12}(?=\s*(;|$))", line)
            if size is None:
                raise ServerError(f"the server sends a chunk of size {shown(bytes(line))}")
            self._left = int(size[0], 16)
            self._in_trailer = self._left == 0
            self._left += 0 if self._in_trailer else 2
        return bytes(piece)

    def _take_events(self, piece: bytes) -> list[str]:
        *lines, self._line = (self._line + piece).split(b"\n")
        _check_size("event", len(self._line), MAX_PART_BYTES)
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode(errors="replace"))
                self._data = []
        return events


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise ServerError(f"the server sends a {what} of more than {limit} bytes")


def message_of(body: bytes) -> str:
    """Return the message in the body of an error, or the beginning of the body."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(body)
        for name in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(name):
                value = value[name]
        return value if isinstance(value, str) else json.dumps(value)[:300]
    return " ".join(body[:300].decode(errors="replace").split()) or "without a reason"
