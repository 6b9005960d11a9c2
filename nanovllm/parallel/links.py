"""Connections between machines, for messages that only their two ends can write.

A message is a pickle, which can run anything when it is read. So both ends first prove that they
have the same key, as multiprocessing's do (HMAC; the key itself is not sent). Nothing is encrypted.
"""

import contextlib
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

_PROOF_SECONDS = 5  # how long a stranger may keep the other end waiting
_IDLE_SECONDS = 2
_PROBE_SECONDS = 1
_NUM_PROBES = 4
"""An idle connection is lost when the other machine has been silent for 2 + 4 * 1 seconds. This
works while nothing is on its way: lost data is sent again for minutes instead. So a connection over
which nothing is sent tells of a lost machine."""


def listen(address: str) -> socket.socket:
    """Return a socket that listens on this machine's `address`, on a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def accept(server: socket.socket, key: bytes) -> Connection:
    """Return the next connection to `server` whose other end has `key`; drop all others."""
    while True:
        accepted, _ = server.accept()
        connection = _connection(accepted)
        try:
            _allow_seconds(connection, _PROOF_SECONDS)
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            _allow_seconds(connection, 0)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
        else:
            return connection


def connect(address: str, port: int, key: bytes, seconds: float) -> Connection:
    """Return a connection to a socket of `listen`, within `seconds` each for it and its proof.

    Raises:
        AuthenticationError: the other end has another key.
        EOFError, OSError: nothing listens there, or it ended.
    """
    connection = _connection(socket.create_connection((address, port), timeout=seconds))
    try:
        _allow_seconds(connection, seconds)
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        _allow_seconds(connection, 0)
    except BaseException:
        connection.close()
        raise
    return connection


def _connection(made: socket.socket) -> Connection:
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_SECONDS),
        ("TCP_KEEPCNT", _NUM_PROBES),
    ):
        with contextlib.suppress(AttributeError):  # macOS has another name for the first
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(made.detach())


def _allow_seconds(connection: Connection, seconds: float) -> None:
    """Let reading and writing take so long; 0 is for ever."""
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=connection.fileno()) as made:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            made.setsockopt(socket.SOL_SOCKET, option, timeval)
        made.detach()
