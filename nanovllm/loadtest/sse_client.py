"""An HTTP client for servers that speak OpenAI's API: requests, answers, server-sent events.

`stream` and `fetch` block, `Connections` is for asyncio; `sse_response` parses the answers. Knows
no endpoint but /v1/models, and of events their form. Follows no redirect, uses no proxy and checks
certificates.
"""

import asyncio
import dataclasses
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from nanovllm.errors import ConfigError, ServerError
from nanovllm.loadtest.sse_response import Response, message_of
from nanovllm.options.validation import shown

TICK_SECONDS = 0.1
"""How long a blocking stream waits for data before it yields None."""
CONNECT_SECONDS = 10.0
"""How long a connection, or an answer to `fetch`, may take."""


@dataclasses.dataclass(frozen=True)
class Server:
    """Where a server is, and what each request to it says; made by `find_server`."""

    name: str
    """Host and port as they stand in the URL."""
    host: str
    port: int
    path: str
    """What comes before the path of an endpoint; "" for nothing."""
    tls: ssl.SSLContext | None
    api_key: str | None = dataclasses.field(repr=False)

    def request(self, method: str, endpoint: str, body: Any = None) -> bytes:
        """Return the bytes of a request with a JSON body, or without one."""
        content = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method} {self.path}{endpoint} HTTP/1.1",
            f"Host: {self.name}",
            "Accept: text/event-stream, application/json",
        ]
        if self.api_key:
            head.append(f"Authorization: Bearer {self.api_key}")
        if body is not None:
            head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + content


def find_server(url: str, api_key: str | None = None) -> Server:
    """Return the server at `url`, such as http://127.0.0.1:8000; a /v1 at its end is left out.

    Args:
        api_key: None takes the environment variable OPENAI_API_KEY, if it is set.

    Raises:
        ConfigError: the URL or the key cannot be sent.
    """
    api_key = api_key or os.environ.get("OPENAI_API_KEY") or None
    rule = f"the server's URL must be like http://127.0.0.1:8000, got {shown(url)}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(rule) from None
    if not re.fullmatch(r"https?://[!-~]+", url, re.IGNORECASE) or not host or "@" in parts.netloc:
        raise ConfigError(rule)
    if parts.query or parts.fragment:
        raise ConfigError(f"{rule}: it has a query")
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise ConfigError("the API key must be printable ASCII without spaces")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Server(parts.netloc, host, port or (443 if tls else 80), path, tls, api_key)


def stream(server: Server, endpoint: str, body: Any) -> Iterator[str | None]:
    """Post a request, and yield the data of each event; None each 0.1 s without data.

    The connection ends when the iterator is closed.

    Raises:
        InvalidRequestError: the server calls the request invalid.
        ServerError: the server cannot be reached, refuses, or breaks off.
    """
    response = Response()
    for events in _exchange(server, server.request("POST", endpoint, body), response):
        yield from events or (None,)
    response.check()
    if not response.is_stream:
        raise ServerError(f"{server.name}{endpoint} does not stream its answer")


def fetch(server: Server, endpoint: str) -> Any:
    """Return the JSON value that the server has at an endpoint.

    Raises:
        ServerError: the server cannot be reached, refuses, or takes over 10 s.
    """
    response = Response()
    deadline = time.monotonic() + CONNECT_SECONDS
    for _ in _exchange(server, server.request("GET", endpoint), response):
        if time.monotonic() > deadline:
            raise ServerError(f"{server.name} did not answer within {CONNECT_SECONDS:g} s")
    response.check()
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError):
        raise ServerError(f"{server.name}{endpoint} did not answer with JSON") from None


def first_model(server: Server) -> str:
    """Return the name of the first model that the server lists.

    Raises:
        ServerError: it lists none, or as `fetch`.
    """
    match fetch(server, "/v1/models"):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    raise ServerError(f"{server.name} lists no model at /v1/models; name one")


def parse_event(data: str) -> dict[str, Any]:
    """Return the JSON object of an event.

    Raises:
        ServerError: it is no object, or reports an error.
    """
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise ServerError(f"the server sends an event that is no JSON object: {shown(data)}")
    if event.get("error"):
        raise ServerError(f"the server reports an error: {message_of(data.encode())}")
    return event


class Choice(NamedTuple):
    """What an event says of one answer, of a chat or a completion."""

    text: str
    reasoning: str
    finish_reason: str | None
    delta: dict[str, Any]
    """What is new of a chat; {} in a completion."""


def choices_of(event: dict[str, Any]) -> list[Choice]:
    """Return what an event says of each answer.

    Raises:
        ServerError: the event has another form.
    """
    choices = event.get("choices") or []
    found = [_choice(item) for item in choices] if isinstance(choices, list) else [None]
    whole = [choice for choice in found if choice is not None]
    if len(whole) < len(found):
        raise ServerError(
            f"the server sends an event of an unknown form: {json.dumps(event)[:200]}"
        )
    return whole


def _choice(given: Any) -> Choice | None:
    """Return a choice, None if it has another form."""
    delta = given.get("delta") or {} if isinstance(given, dict) else None
    if not isinstance(delta, dict):
        return None
    text = given.get("text") or delta.get("content") or ""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    reason = given.get("finish_reason") or None
    if not all(isinstance(value, str) for value in (text, reasoning, reason or "")):
        return None
    return Choice(text, reasoning, reason, delta)


class Connections:
    """Connections to a server for asyncio, each kept for the requests after its first."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._idle: list[_Connection] = []

    async def post(self, request: bytes, receive: Callable[[str], None]) -> None:
        """Send a request, and call `receive` with the data of each event when it comes.

        Args:
            request: the bytes from `Server.request`.

        Raises:
            InvalidRequestError: the server calls the request invalid.
            ServerError: the server cannot be reached, refuses, or breaks off; or from `receive`.
        """
        response = None
        while response is None:
            connection = self._idle.pop() if self._idle else None
            try:
                if connection is not None:
                    response = await connection.exchange(request, receive, is_kept=True)
                    continue
                connection = await self._connect()
                response = await connection.exchange(request, receive, is_kept=False)
            except OSError as error:
                raise _unreachable(self._server, error) from None
        assert connection is not None
        if response.keeps_alive:
            self._idle.append(connection)
        else:
            connection.close()
        response.check()
        if not response.is_stream:
            raise ServerError(f"{self._server.name} does not stream its answer")

    def close(self) -> None:
        """Close the connections that no request uses."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> "_Connection":
        server = self._server
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):  # TimeoutError is an OSError
            _, connection = await loop.create_connection(
                _Connection, server.host, server.port, ssl=server.tls
            )
        return connection


class _Connection(asyncio.Protocol):
    """One connection: at most one request at a time. No task wakes up for a token."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._response = Response()
        self._receive: Callable[[str], None] = lambda _: None
        self._ended: asyncio.Future[None] | None = None

    async def exchange(
        self, request: bytes, receive: Callable[[str], None], *, is_kept: bool
    ) -> Response | None:
        """Return the answer; None if the server had closed a connection that was kept."""
        if self._transport.is_closing():
            return None
        self._response, self._receive = Response(), receive
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except ServerError:
            if is_kept and not self._response.status:
                return None
            raise
        finally:
            self._ended = None
            if not self._response.is_complete:
                self._transport.abort()
        return self._response

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():
            self._transport.abort()  # nobody asked
            return
        try:
            for event in self._response.feed(data):
                self._receive(event)
        except ServerError as error:
            self._ended.set_exception(error)
            self._transport.abort()
            return
        if self._response.is_complete:
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        try:
            self._response.end()
        except ServerError as broken:
            self._ended.set_exception(broken)
        else:
            self._ended.set_result(None)


def _exchange(server: Server, request: bytes, response: Response) -> Iterator[list[str]]:
    """Send a request, and yield the events of each piece of the answer; none after 0.1 s."""
    try:
        connection = socket.create_connection((server.host, server.port), CONNECT_SECONDS)
        try:
            if server.tls is not None:
                connection = server.tls.wrap_socket(connection, server_hostname=server.host)
            connection.sendall(request)
            connection.settimeout(TICK_SECONDS)
            while not response.is_complete:
                try:
                    data = connection.recv(2**16)
                except TimeoutError:
                    yield []
                    continue
                if data:
                    yield response.feed(data)
                else:
                    response.end()
        finally:
            connection.close()
    except OSError as error:
        raise _unreachable(server, error) from None


def _unreachable(server: Server, error: OSError) -> ServerError:
    reason = error.strerror or str(error) or "it takes too long"
    return ServerError(f"cannot reach {server.name}: {reason}")
