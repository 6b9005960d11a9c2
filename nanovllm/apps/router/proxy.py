"""Passes a request to a model's engine, and its answer back as it comes."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from urllib.parse import parse_qs

import httpx
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from nanovllm.apps.router.models import Models
from nanovllm.apps.server.admission import AnswerBudget, BodyBudget, Guard
from nanovllm.apps.server.error_bodies import APIError, route_path
from nanovllm.apps.server.json_route import check_content_type, parse
from nanovllm.apps.server.request_log import record_of
from nanovllm.apps.server.sse import error_frames

_LARGE_BYTES = 2**16
_OF_CONNECTION = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
        *(b"transfer-encoding", b"proxy-authenticate", b"proxy-authorization"),
    }
)
"""Headers that are not passed on: RFC 9110, section 7.6.1."""
_OF_REQUEST = _OF_CONNECTION | {b"host", b"content-length", b"expect", b"x-request-id"}
_OF_ANSWER = _OF_CONNECTION | {b"date", b"request-id", b"x-request-id"}
"""The server that sends it adds its own."""


class Proxy:
    """The ASGI app of a route that every engine has.

    A request names its model in its body or, without one, in its query.

    Args:
        has_json: whether its requests have a body in JSON. One that has none loads no model if it
            needs no key either: any web page can send it.
    """

    def __init__(
        self, models: Models, bodies: BodyBudget, backlog: AnswerBudget, *, has_json: bool
    ):
        self._models = models
        self._bodies = bodies
        self._backlog = backlog
        self._has_json = has_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            counted = held.enter_context(self._bodies.reading(receive))
            try:
                body = await Request(scope, counted).body()
            except ClientDisconnect:
                return
            name = await self._name(scope, body)
            guard = Guard()
            held.push(guard.ends_quietly)
            held.callback(self._backlog.drop, guard.cut)
            held.enter_context(self._models.admission.admit(guard, 1))
            watch = asyncio.create_task(guard.watch(Request(scope, counted)))
            held.callback(watch.cancel)
            answer = _Answer(scope, send, guard, self._backlog)
            loads = self._has_json or "key_digest" in scope["state"]
            held.callback(answer.stop)
            try:
                with guard:
                    await self._answer(answer, name, for_engine(scope, body), loads=loads)
            except APIError as error:
                await answer.break_off(error)
            self._models.admission.engine_ended(guard, 1)
            await answer.end()

    async def _name(self, scope: Scope, body: bytes) -> str | None:
        """Return the model that a request names; raise APIError if the body is not JSON."""
        if self._has_json:
            check_content_type(Headers(scope=scope))
            is_large = len(body) > _LARGE_BYTES
            value = await asyncio.to_thread(parse, body) if is_large else parse(body)
            found = value.get("model") if isinstance(value, dict) else None
        else:
            query = parse_qs(scope["query_string"].decode("latin-1"))
            found = query.get("model", [None])[0]
        return found if isinstance(found, str) else None  # the engine refuses what is not a name

    async def _answer(
        self, answer: "_Answer", name: str | None, request: httpx.Request, *, loads: bool
    ) -> None:
        """Let the model's engine answer; it is free when it has ended, whoever still reads."""
        for has_another_try in (True, False):
            model = self._models.find(name) if loads else self._models.in_memory(name)
            reason = f"the engine of {model.name!r} has died; try again"
            died = APIError(500, reason, code="engine_dead")
            uses = self._models.use(model) if loads else nullcontext(model.engine)
            async with uses as engine:
                assert engine is not None
                try:
                    await answer.pass_on(engine.client, request)
                    return
                except httpx.ConnectError:  # the engine died before it saw the request
                    if not has_another_try:
                        raise died from None
                except httpx.HTTPError:
                    raise died from None
            await engine.ended()


class _Answer:
    """An answer on its way to the client: at once, or as fast as the client reads.

    The engine never waits for a client. Of a stream whole events go out, so that what ends it
    never follows half of one.
    """

    def __init__(self, scope: Scope, send: Send, guard: Guard, backlog: AnswerBudget) -> None:
        self._path = route_path(scope)
        self._record = record_of(scope)
        self._connection = scope["state"]["connection"]
        self._send = send
        self._guard = guard
        self._backlog = backlog
        self._has_started = False
        self._is_stream = False
        self._is_whole = False
        self._half = b""
        self._unread: deque[bytes] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def pass_on(self, client: httpx.AsyncClient, request: httpx.Request) -> None:
        """Send a request to the engine, and the client what comes back, piece by piece."""
        response = await client.send(request, stream=True)
        async with contextlib.aclosing(response):
            headers = _passed(response.headers.raw, _OF_ANSWER)
            kind = response.headers.get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
            self._has_started = True
            if self._record is not None:
                self._record.is_passed_on = True
            status = response.status_code
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            async for piece in response.aiter_raw():
                if self._is_stream:
                    whole, end, self._half = (self._half + piece).rpartition(b"\n\n")
                    piece = whole + end
                await self._write(piece)
        self._is_whole = True

    async def _write(self, piece: bytes) -> None:
        if not piece:
            return
        if self._sender is None and not self._connection.flow.write_paused:
            await self._send_body(piece)
            return
        self._unread.append(piece)
        self._backlog.add(self._guard.cut, len(piece))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_unread())

    async def _send_unread(self) -> None:
        while self._unread:
            piece = self._unread.popleft()
            await self._send_body(piece)
            self._backlog.add(self._guard.cut, -len(piece))
        self._sender = None

    async def _send_body(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def break_off(self, error: APIError) -> None:
        """Report an error to the client; an answer that has begun and is no stream is cut off."""
        if not self._has_started:
            raise error
        if self._is_stream:
            await self._write(error_frames(error, self._path))
            self._half = b""
            self._is_whole = True

    async def end(self) -> None:
        """Return when the client has all of the answer."""
        await self._write(self._half)
        if self._sender is not None:
            await self._sender
        if self._is_whole:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def stop(self) -> None:
        if self._sender is not None:
            self._sender.cancel()


def _passed(
    headers: Iterable[tuple[bytes, bytes]], left_out: frozenset[bytes]
) -> list[tuple[bytes, bytes]]:
    """Return the headers that go on to the other side."""
    return [(name, value) for name, value in headers if name.lower() not in left_out]


def for_engine(scope: Scope, body: bytes) -> httpx.Request:
    """Return a client's request, to be sent to an engine: with the path as the client wrote it."""
    query = scope["query_string"]
    target = scope["raw_path"] + b"?" * bool(query) + query
    headers = _passed(scope["headers"], _OF_REQUEST)
    if (record := record_of(scope)) is not None:  # then both logs have one id
        headers.append((b"x-request-id", record.request_id.encode()))
    return httpx.Request(
        scope["method"],
        "http://localhost",
        headers=headers,
        content=body,
        extensions={"target": target},
    )
