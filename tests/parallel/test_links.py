"""Connections between machines: whoever has another key is dropped, and cannot keep others out."""

import socket
import threading
from multiprocessing import AuthenticationError
from typing import Any

import pytest

from nanovllm.parallel import links
from nanovllm.parallel.links import accept, connect, listen

KEY = b"k" * 32


@pytest.fixture
def server() -> Any:
    with listen("127.0.0.1") as made:
        yield made


def in_background(call: Any, *args: Any) -> Any:
    """Call in a thread; return what waits for its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call(*args)), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(10)
        return results[0]

    return result


def test_messages_go_both_ways(server: Any) -> None:
    accepted = in_background(accept, server, KEY)
    ours = connect(*server.getsockname(), KEY, 5)
    theirs = accepted()
    large = "x" * 2**20
    sent = in_background(ours.send, large)
    assert theirs.recv() == large
    sent()
    theirs.send([1])
    assert ours.recv() == [1]
    with socket.socket(fileno=ours.fileno()) as made:
        # Else half of a message waits 40 ms for the other machine to confirm the first half.
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        made.detach()
    ours.close()
    with pytest.raises(EOFError):
        theirs.recv()


def test_strangers_are_dropped(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has another key, one says nothing, one is gone at once. The next with the key gets in."""
    monkeypatch.setattr(links, "_PROOF_SECONDS", 0.2)
    accepted = in_background(accept, server, KEY)
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        connect(*server.getsockname(), b"another", 5)
    silent = socket.create_connection(server.getsockname())
    socket.create_connection(server.getsockname()).close()
    ours = connect(*server.getsockname(), KEY, 5)
    accepted().send("hello")
    assert ours.recv() == "hello"
    assert silent.recv(1000).startswith(b"\0")  # the challenge, then the end
    silent.close()


def test_who_connects_is_not_kept_waiting(server: Any) -> None:
    with pytest.raises(OSError, match="temporarily unavailable"):
        connect(*server.getsockname(), KEY, 0.2)  # nobody accepts
