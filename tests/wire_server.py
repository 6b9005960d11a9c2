"""A server on a socket that answers as it is told: bytes, and how long to wait before them.

It is the other end of the wire for tests of clients; what a server says is the test's to write.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

Step = tuple[float, bytes]
"""Seconds to wait, then bytes to send."""
CLOSE: Step = (0.0, b"")
"""The last step of an answer that ends its connection; an answer without steps does so too."""

MODELS = {"object": "list", "data": [{"id": "wire-model", "object": "model"}]}


class Asked(NamedTuple):
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


Script = Callable[[Asked], list[Step]]
"""What to answer."""


class WireServer:
    """Serves in a thread of its own while the `with` block runs."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._loop = asyncio.new_event_loop()
        self.asked: list[Asked] = []
        self.hung_up = threading.Event()
        """Set when a client ends a connection in the middle of an answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "WireServer":
        started = threading.Event()

        def serve() -> None:
            asyncio.set_event_loop(self._loop)
            server = self._loop.run_until_complete(
                asyncio.start_server(self._connection, "127.0.0.1", 0)
            )
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            self._loop.run_forever()
            server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                asked = await _read(reader)
                self.asked.append(asked)
                if not await self._answer(asked, reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _answer(
        self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        steps = [(0.0, whole(200, MODELS))] if asked.path == "/v1/models" else self._script(asked)
        for seconds, data in steps:
            await asyncio.sleep(seconds)
            if reader.at_eof():
                self.hung_up.set()
                return False
            writer.write(data)
            await writer.drain()
        return bool(steps) and steps[-1] != CLOSE


async def _read(reader: asyncio.StreamReader) -> Asked:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, json.loads(body) if body else None)


def whole(status: int, value: Any) -> bytes:
    """Return an answer with a JSON body."""
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} Reason\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """Return an event; of a string, or of a JSON value."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"data: {text}\n\n".encode()


def streamed(*steps: tuple[float, Any], cut: int = 0) -> list[Step]:
    """Return an answer that streams an event after each wait, then [DONE].

    Args:
        cut: send pieces of this many bytes; 0 sends each event in one piece.
    """
    sent = [(0.0, HEAD), *((wait, chunk(event(value))) for wait, value in steps)]
    sent.append((0.0, chunk(event("[DONE]")) + LAST_CHUNK))
    if not cut:
        return sent
    return [
        (wait * (start == 0), data[start : start + cut])
        for wait, data in sent
        for start in range(0, len(data), cut)
    ]


def chat_event(reason: str | None = None, **delta: Any) -> dict[str, Any]:
    """Return an event of /v1/chat/completions."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
