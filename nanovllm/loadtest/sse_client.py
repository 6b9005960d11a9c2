"""An HTTP client for servers that speak OpenAI's API: requests, answers, server-sent events.

`stream` blocks, `HttpClient` is for asyncio. Knows no endpoint but /v1/models, and of events their
form. Follows no redirect, uses no proxy and checks certificates.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import aiohttp

from nanovllm.errors import ConfigError, InvalidRequestError, ServerError
from nanovllm.options.validation import shown

TICK_SECONDS = 0.1
"""How long a blocking stream waits for data before it yields None."""
CONNECT_SECONDS = 10.0
"""How long a connection, or an answer to `fetch`, may take."""
IDLE_SECONDS = 2.0
"""How long an unused connection is kept; servers close theirs after 5 s or more."""
WATCH_SECONDS = 1.0
"""How often an answer's connection is looked at."""
MAX_BYTES = 2**24
"""Limit of an event, and of a body that is no stream of events."""


@dataclasses.dataclass(frozen=True)
class Server:
    """Where a server is, and what each request to it says; made by `find_server`."""

    name: str
    """Host and port as they stand in the URL."""
    url: str
    """What comes before the path of an endpoint, such as /v1/models."""
    headers: dict[str, str] = dataclasses.field(repr=False)


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
        host, _ = parts.hostname, parts.port  # reading the port checks it
    except ValueError:
        raise ConfigError(rule) from None
    if not re.fullmatch(r"https?://[!-~]+", url, re.IGNORECASE) or "@" in parts.netloc:
        raise ConfigError(rule)
    if not host or parts.query or parts.fragment:
        raise ConfigError(f"{rule}, without a query")
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise ConfigError("the API key must be printable ASCII without spaces")
    headers = {"Accept": "text/event-stream, application/json", "Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Server(parts.netloc, f"{parts.scheme}://{parts.netloc}{path}", headers)


class HttpClient:
    """Connections to a server, each kept for the requests after its first."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=server.headers,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, endpoint: str, content: bytes, receive: Callable[[str], None]) -> None:
        """Send a request, and call `receive` with the data of each event when it comes.

        Args:
            content: the body, as JSON.

        Raises:
            InvalidRequestError: the server calls the request invalid (status 400, 413 or 422).
            ServerError: the server cannot be reached, refuses, or breaks off; or from `receive`.
        """
        headers = {"Content-Type": "application/json"}
        url = self._server.url + endpoint
        with _errors(self._server):
            async with self._session.post(
                url, data=content, headers=headers, allow_redirects=False
            ) as response:
                _watch(response)
                if response.status != 200 or response.content_type != "text/event-stream":
                    await _body(response)
                    raise ServerError(f"{self._server.name}{endpoint} does not stream its answer")
                events = EventParser()
                async for piece in response.content.iter_any():
                    for event in events.feed(piece):
                        receive(event)

    async def get(self, endpoint: str) -> bytes:
        """Return the body of what the server has at an endpoint.

        Raises:
            ServerError: the server cannot be reached, refuses, or takes over 10 s.
        """
        with _errors(self._server):
            async with (
                asyncio.timeout(CONNECT_SECONDS),
                self._session.get(self._server.url + endpoint, allow_redirects=False) as response,
            ):
                return await _body(response)


def _watch(response: aiohttp.ClientResponse) -> None:
    """End an answer whose connection has ended; aiohttp waits on after a malformed chunk."""
    connection = response.connection
    if connection is None:  # the answer is complete
        return
    if connection.transport is None or connection.transport.is_closing():
        response.content.set_exception(aiohttp.ClientPayloadError())
    else:
        asyncio.get_running_loop().call_later(WATCH_SECONDS, _watch, response)


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer; raise the error that it reports, if it does."""
    body = b""
    async for piece in response.content.iter_any():
        body += piece
        _check_size("body", len(body))
    if response.status != 200:
        kind = InvalidRequestError if response.status in (400, 413, 422) else ServerError
        raise kind(f"the server answers {response.status}: {message_of(body)}")
    return body


@contextlib.contextmanager
def _errors(server: Server) -> Iterator[None]:
    """Raise what goes wrong on the way as a ServerError of one line."""
    try:
        yield
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError):
        raise ServerError("the server closed the connection before its answer ended") from None
    except aiohttp.ClientResponseError as error:
        raise ServerError(f"this is no HTTP server: {' '.join(error.message.split())}") from None
    except (aiohttp.ClientError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it takes too long"
        if isinstance(error, OSError) and reason.startswith("Connect call failed"):
            reason = os.strerror(error.errno or 0)
        raise ServerError(f"cannot reach {server.name}: {reason}") from None


def stream(server: Server, endpoint: str, body: Any) -> Iterator[str | None]:
    """Post a request, and yield the data of each event; None each 0.1 s without data.

    The connection ends when the iterator is closed.

    Raises:
        InvalidRequestError: the server calls the request invalid.
        ServerError: the server cannot be reached, refuses, or breaks off.
    """
    events: asyncio.Queue[str | None] = asyncio.Queue()

    async def post() -> None:
        try:
            async with HttpClient(server) as client:
                await client.post(endpoint, json.dumps(body).encode(), events.put_nowait)
        finally:
            events.put_nowait(None)

    with asyncio.Runner() as runner:
        answer = runner.get_loop().create_task(post())
        while True:
            try:
                event = runner.run(asyncio.wait_for(events.get(), TICK_SECONDS))
            except TimeoutError:
                yield None
                continue
            if event is None:
                break
            yield event
        answer.result()


def first_model(server: Server) -> str:
    """Return the name of the first model that the server lists.

    Raises:
        ServerError: it lists none, or as `HttpClient.get`.
    """

    async def get() -> bytes:
        async with HttpClient(server) as client:
            return await client.get("/v1/models")

    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(asyncio.run(get())):
            case {"data": [{"id": str(name)}, *_]}:
                return name
    raise ServerError(f"{server.name} lists no model at /v1/models; name one")


class EventParser:
    """Reads server-sent events from bytes as they come, cut anywhere."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []
        """The begun line, and the data of the begun event."""
        self._size = 0
        """Of that data, with a byte for the end of each line."""

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of each event that a piece completes.

        Raises:
            ServerError: an event is too large.
        """
        *lines, self._line = (self._line + piece).split(b"\n")
        _check_size("event", len(self._line))
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(self._data[-1]) + 1
                _check_size("event", self._size)
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode(errors="replace"))
                self._data = []
                self._size = 0
        return events


def _check_size(what: str, num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise ServerError(f"the server sends a {what} of more than {MAX_BYTES} bytes")


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
    try:
        return [_choice(item) for item in event.get("choices") or ()]
    except (AttributeError, TypeError):
        text = json.dumps(event)[:200]
        raise ServerError(f"the server sends an event of an unknown form: {text}") from None


def _choice(given: dict[str, Any]) -> Choice:
    """Return a choice; raise AttributeError or TypeError if it has another form."""
    delta = given.get("delta") or {}
    text = given.get("text") or delta.get("content") or ""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    reason = given.get("finish_reason") or None
    for value in (text, reasoning, reason or ""):
        if not isinstance(value, str):
            raise TypeError(value)
    return Choice(text, reasoning, reason, delta)


def message_of(body: bytes) -> str:
    """Return the message in the body of an error, or the beginning of the body."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(body)
        for name in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(name):
                value = value[name]
        return value if isinstance(value, str) else json.dumps(value)[:300]
    return " ".join(body[:300].decode(errors="replace").split()) or "without a reason"
