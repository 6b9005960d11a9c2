"""Passes a request to a model's engine, and its answer back as it comes."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Iterable
from urllib.parse import parse_qs

import httpx
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from nanovllm.apps.router.models import Model, Models
from nanovllm.apps.server.admission import BodyBudget
from nanovllm.apps.server.error_bodies import APIError, anthropic_body
from nanovllm.apps.server.json_route import check_content_type, parse
from nanovllm.apps.server.sse import error_frame, last_frames

_LARGE_BYTES = 2**16
_OF_CONNECTION = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
        *(b"transfer-encoding", b"proxy-authenticate", b"proxy-authorization"),
    }
)
"""Headers that are not passed on: RFC 9110, section 7.6.1."""
_OF_REQUEST = _OF_CONNECTION | {b"host", b"content-length", b"expect"}


class Proxy:
    """The ASGI app of a route that every engine has.

    A request names its model in its body or, with GET, in its query.
    """

    def __init__(self, models: Models, bodies: BodyBudget) -> None:
        self._models = models
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._bodies.reading(receive) as counted:
            body = await _read(counted)
            if body is None:
                return
            model = self._models.find(await _name_in(scope, body))
            await _until_gone(receive, self._answer(scope, model, body, send))

    async def _answer(self, scope: Scope, model: Model, body: bytes, send: Send) -> None:
        request = for_engine(scope, body)
        answer = _Answer(request.url.path, model, send)
        for has_another_try in (True, False):
            async with self._models.use(model) as engine:
                try:
                    await answer.pass_on(engine.client, request)
                    return
                except httpx.ConnectError:  # the engine died before it saw the request
                    if not has_another_try:
                        raise answer.error from None
                except httpx.HTTPError:
                    await answer.break_off()
                    return
            await engine.ended()


class _Answer:
    """An answer on its way to the client."""

    def __init__(self, path: str, model: Model, send: Send) -> None:
        self._path = path
        self._send = send
        self._has_started = False
        self._is_stream = False
        self.error = APIError(
            500, f"the engine of {model.name!r} has died; try again", code="engine_dead"
        )

    async def pass_on(self, client: httpx.AsyncClient, request: httpx.Request) -> None:
        """Send a request to the engine, and the client what comes back, piece by piece.

        Raises:
            httpx.HTTPError: the engine has died.
        """
        response = await client.send(request, stream=True)
        async with contextlib.aclosing(response):
            headers = _passed(response.headers.raw, _OF_CONNECTION)
            kind = response.headers.get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
            self._has_started = True
            status = response.status_code
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            async for piece in response.aiter_raw():
                await self.write(piece)
        await self.end()

    async def write(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def break_off(self) -> None:
        """Tell the client that the engine has died.

        An answer that has begun and is no stream stays without its end, and its connection is
        closed.
        """
        if not self._has_started:
            raise self.error
        if self._is_stream:
            await self.write(_error_event(self._path, self.error))
            await self.end()


def _error_event(path: str, error: APIError) -> bytes:
    """Return the event that ends a stream of the API of `path`; it may follow half an event."""
    if path.startswith("/v1/messages"):
        return f"\n\nevent: error\ndata: {json.dumps(anthropic_body(error))}\n\n".encode()
    if path.startswith("/v1/responses"):
        return f"\n\n{error_frame(error)}".encode()
    return f"\n\n{last_frames(error)}".encode()


def _passed(
    headers: Iterable[tuple[bytes, bytes]], left_out: frozenset[bytes]
) -> list[tuple[bytes, bytes]]:
    """Return the headers that go on to the other side."""
    return [(name, value) for name, value in headers if name.lower() not in left_out]


def for_engine(scope: Scope, body: bytes) -> httpx.Request:
    """Return a client's request, to be sent to an engine."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    query = scope["query_string"].decode("latin-1")
    url = f"http://localhost{path}{'?' if query else ''}{query}"
    headers = _passed(scope["headers"], _OF_REQUEST)
    return httpx.Request(scope["method"], url, headers=headers, content=body)


async def _read(receive: Receive) -> bytes | None:
    """Return the whole body of a request; None if its client has gone."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _name_in(scope: Scope, body: bytes) -> str | None:
    """Return the model that a request names.

    Raises:
        APIError: status 400 or 415, the body is not JSON.
    """
    if scope["method"] != "POST":
        names = parse_qs(scope["query_string"].decode("latin-1")).get("model")
        return names[0] if names else None
    check_content_type(Headers(scope=scope))
    value = await asyncio.to_thread(parse, body) if len(body) > _LARGE_BYTES else parse(body)
    name = value.get("model") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None  # the engine refuses what is not a name


async def _until_gone(receive: Receive, answer: Awaitable[None]) -> None:
    """Answer, but only while the client is there."""
    answering = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()
    finally:
        for task in (answering, watching):
            task.cancel()
        await asyncio.wait({answering, watching})


async def _gone(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
