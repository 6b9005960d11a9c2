"""The limits of connections, with an app that only answers."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("fastapi")

import uvicorn

from nanovllm.apps.server.connection import connection_class

LIMIT = 0.3
MOST = 4
LARGE = 5 * 2**19
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


LEFT = threading.Event()


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Read the request and answer: /large with many bytes, /wait when its client has left."""
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/wait":
        assert (await receive())["type"] == "http.disconnect"
        LEFT.set()
        return
    body = bytes(LARGE) if scope["path"] == "/large" else b"ok"
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def address() -> Iterator[Any]:
    http = connection_class(LIMIT, MOST)
    server = uvicorn.Server(
        uvicorn.Config(app, http=http, loop="asyncio", lifespan="off", log_config=None)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**18)  # for its connections
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join()


@pytest.fixture
def connection(address: Any) -> Iterator[socket.socket]:
    with socket.socket() as found:
        found.settimeout(10)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        found.connect(address)
        yield found


@pytest.mark.parametrize(
    "second",
    [b"POST / HT", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n"],
    ids=["line", "body"],
)
def test_a_request_behind_another_has_as_long(connection: socket.socket, second: bytes) -> None:
    """It begins in the packet of the first, so nothing arrives once its turn has come."""
    begin, found = time.monotonic(), b""
    connection.sendall(GET + second)
    while piece := connection.recv(65536):
        found += piece
    assert 0.9 * LIMIT < time.monotonic() - begin < 8
    assert found.startswith(b"HTTP/1.1 200")
    assert found.count(b"HTTP/1.1 408") == 1


def test_a_connection_may_idle_between_requests(connection: socket.socket) -> None:
    for _ in range(2):
        connection.sendall(GET)
        found = b""
        while not found.endswith(b"ok"):  # which may come by itself
            found += connection.recv(65536)
        assert found.startswith(b"HTTP/1.1 200")
        time.sleep(1.2 * LIMIT)


def test_a_slow_reader_that_goes_on_gets_all(connection: socket.socket) -> None:
    """It takes twice the limit, and the server's buffer is not empty meanwhile."""
    connection.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    begin, found = time.monotonic(), 0
    while piece := connection.recv(LARGE // 13, socket.MSG_WAITALL):
        found += len(piece)
        time.sleep(0.05)
    assert time.monotonic() - begin > 2 * LIMIT
    assert found > LARGE


def test_chunks_of_one_byte_leave_others_their_time(address: Any) -> None:
    """Symptom: 300 KB hold up every connection for seconds."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"

    def send() -> None:
        with socket.create_connection(address, timeout=10) as found, suppress(OSError):
            found.sendall(head + b"1\r\n \r\n" * 30_000)

    senders = [threading.Thread(target=send) for _ in range(2)]
    for sender in senders:
        sender.start()
    waits = []
    while any(sender.is_alive() for sender in senders) and len(waits) < 100:
        begin = time.monotonic()
        with socket.create_connection(address, timeout=10) as other:
            other.sendall(GET)
            assert other.recv(65536).startswith(b"HTTP/1.1 200")
        waits.append(time.monotonic() - begin)
    assert max(waits, default=0) < 0.4
    for sender in senders:
        sender.join()


def test_chunks_of_one_byte_are_a_body(connection: socket.socket) -> None:
    chunks = b"1\r\n \r\n" * 500 + b"0\r\n\r\n"
    for begin in (b"", GET):
        found = b""
        connection.sendall(begin + GET[:-2].replace(b"GET", b"POST"))
        connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        while found.count(b"ok") < 1 + bool(begin):
            piece = connection.recv(65536)
            assert piece, f"the server has closed: {found!r}"
            found += piece
        assert found.count(b"HTTP/1.1 200") == 1 + bool(begin)


@pytest.mark.parametrize("more", [b"X", GET, GET * 2000], ids=["byte", "request", "many"])
def test_a_client_that_sent_more_and_left_is_noticed(address: Any, more: bytes) -> None:
    """Symptom: behind a request that runs nothing is read, nor that its client has gone."""
    LEFT.clear()
    with socket.create_connection(address, timeout=10) as found:
        found.sendall(GET.replace(b"/", b"/wait", 1) + more)
        time.sleep(0.1)
    assert LEFT.wait(5)


def test_a_connection_too_many_is_refused(address: Any) -> None:
    others = [socket.create_connection(address) for _ in range(MOST)]
    with socket.create_connection(address, timeout=10) as one_too_many:
        reply = b""
        while piece := one_too_many.recv(65536):
            reply += piece
    assert reply.startswith(b"HTTP/1.1 503")
    assert b"has 4 connections" in reply
    for other in others:
        other.close()
    for _ in range(100):  # the server notices a little later
        with socket.create_connection(address, timeout=10) as again:
            again.sendall(GET)
            if again.recv(65536).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.05)
    raise AssertionError("a connection is refused after others have ended")
