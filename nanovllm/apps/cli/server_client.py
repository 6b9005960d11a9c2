"""The client of `nanovllm chat --url`: a server's first model, and the events of an answer.

It follows no redirect, uses no proxy and checks certificates.
"""

import contextlib
import dataclasses
import json
import os
import re
import ssl
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from nanovllm.errors import ConfigError, InvalidRequestError, ServerError
from nanovllm.options.validation import shown

CONNECT_SECONDS = 10.0
"""How long a connection may take, and each wait for the list of models."""
MAX_BYTES = 2**24
"""Limit of an event's line."""


@dataclasses.dataclass(frozen=True)
class ServerAddress:
    """Where a server is, and what each request to it says; made by `find_server`."""

    name: str
    """Host and port as they stand in the URL."""
    url: str
    """What comes before the path of an endpoint, such as /v1/models."""
    headers: dict[str, str] = dataclasses.field(repr=False)

    def connect(self, timeout: httpx.Timeout) -> httpx.Client:
        """Return a client of this server; its connection is made by the first request."""
        return httpx.Client(
            base_url=self.url,
            headers=self.headers,
            timeout=timeout,
            trust_env=False,
            verify=ssl.create_default_context(),
        )


def find_server(url: str, api_key: str | None = None) -> ServerAddress:
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
    return ServerAddress(parts.netloc, f"{parts.scheme}://{parts.netloc}{path}", headers)


def model_card(server: ServerAddress, name: str | None = None) -> dict[str, Any]:
    """Return what the server lists of a model: at least its `id`.

    Without a name it is the first model of those that chat, if the server says so.

    Raises:
        ServerError: it lists none, cannot be reached, or refuses.
    """
    with _errors(server), server.connect(httpx.Timeout(CONNECT_SECONDS)) as client:
        response = client.get("/v1/models")
        _check_status(response)
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(response.content):
            case {"data": [{"id": str()}, *_] as cards}:
                known = [card for card in cards if isinstance(card, dict)]
                if name is not None:
                    return next((card for card in known if card.get("id") == name), {"id": name})
                chats = (card for card in known if card.get("chats") is not False)
                return next(chats, known[0])
    raise ServerError(f"{server.name} lists no model at /v1/models; name one")


def stream(server: ServerAddress, endpoint: str, body: Any) -> Iterator[str]:
    """Post a request, and yield the data of each event when it comes.

    The connection ends when the iterator is closed, or Ctrl-C comes.

    Raises:
        InvalidRequestError: the server calls the request invalid (status 400, 413 or 422).
        ServerError: the server cannot be reached, refuses, or breaks off.
    """
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    with (
        _errors(server),
        server.connect(timeout) as client,
        client.stream("POST", endpoint, json=body) as response,
    ):
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
        if response.status_code != 200 or kind != "text/event-stream":
            response.read()
            _check_status(response)
            raise ServerError(f"{server.name}{endpoint} does not stream its answer")
        yield from events(response.iter_raw())


def events(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event in bytes, which are cut anywhere.

    Raises:
        ServerError: an event has a line that is too long.
    """
    line = b""
    data: list[bytes] = []
    for piece in pieces:
        *lines, line = (line + piece).split(b"\n")
        for each in lines:
            each = each.removesuffix(b"\r")
            if each.startswith(b"data:"):
                data.append(each[5:].removeprefix(b" "))
            elif not each and data:
                yield b"\n".join(data).decode(errors="replace")
                data = []
        if len(line) > MAX_BYTES:
            raise ServerError(f"the server sends an event of more than {MAX_BYTES} bytes")


def _check_status(response: httpx.Response) -> None:
    """Raise the error that an answer reports, if it does."""
    status = response.status_code
    if status != 200:
        kind = InvalidRequestError if status in (400, 413, 422) else ServerError
        raise kind(f"the server answers {status}: {message_of(response.content)}")


@contextlib.contextmanager
def _errors(server: ServerAddress) -> Iterator[None]:
    """Raise what goes wrong on the way as a ServerError of one line."""
    try:
        yield
    except httpx.RemoteProtocolError as error:
        message = " ".join(str(error).split())
        if "illegal" in message:
            raise ServerError(f"the server does not speak HTTP: {message}") from None
        raise ServerError("the server closed the connection before its answer ended") from None
    except (httpx.ReadError, httpx.WriteError):
        raise ServerError("the server closed the connection before its answer ended") from None
    except (httpx.HTTPError, OSError) as error:
        raise ServerError(f"cannot reach {server.name}: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """Return why there is no connection: the operating system's reason, if it gives one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or "it takes too long"


def parse_event(data: str) -> dict[str, Any]:
    """Return the JSON object of an event.

    Raises:
        ServerError: it is not an object, or reports an error.
    """
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise ServerError(f"the server sends an event that is not a JSON object: {shown(data)}")
    if event.get("error"):
        raise ServerError(f"the server reports an error: {message_of(data.encode())}")
    return event


class ChatEvent(NamedTuple):
    """What an event says of a chat's answer."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None


def choice_of(event: dict[str, Any]) -> ChatEvent:
    """Return what an event says of the first answer.

    Raises:
        ServerError: the event has another form.
    """
    try:
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") or ""
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            reason = choice.get("finish_reason") or None
            if all(isinstance(value, str) for value in (text, reasoning, reason or "")):
                return ChatEvent(text, reasoning, reason)
            raise TypeError
    except (AttributeError, TypeError):
        text = json.dumps(event)[:200]
        raise ServerError(f"the server sends an event of an unknown form: {text}") from None
    return ChatEvent()


def message_of(body: bytes) -> str:
    """Return the message in the body of an error, or the beginning of the body."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(body)
        for name in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(name):
                value = value[name]
        return value if isinstance(value, str) else json.dumps(value)[:300]
    return " ".join(body[:300].decode(errors="replace").split()) or "without a reason"
