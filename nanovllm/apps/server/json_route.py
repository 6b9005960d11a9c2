"""Routes of requests with a body: JSON is read strictly, answers are sent in pieces."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from nanovllm.apps.server.error_bodies import APIError
from nanovllm.options.validation import shown
from nanovllm.utils import strict_json
from nanovllm.utils.strict_json import StrictJSONError

MAX_COMMAS = 2**18
"""Commas in a body. The limit bounds the number of values, which take longer to read than text."""
_LARGE_BYTES = 2**16


class JSONRoute(APIRoute):
    """A route whose body is read by `parse`.

    `request.state.held` is a stack of what ends when the answer has been sent.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. A large answer waits here, not with the connection, for its client."""
        server = scope["app"].state.server

        def cut() -> None:
            if connection := scope["state"].get("connection"):  # None behind other servers
                connection.transport.abort()

        async def send_pieces(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= _LARGE_BYTES:
                await send(message)
                return
            server.answers.add(cut, len(body))
            try:
                for start in range(0, len(body) - _LARGE_BYTES, _LARGE_BYTES):
                    piece = body[start : start + _LARGE_BYTES]
                    await send({**message, "body": piece, "more_body": True})
                rest = (len(body) - 1) // _LARGE_BYTES * _LARGE_BYTES
                await send({**message, "body": body[rest:]})
            finally:
                server.answers.drop(cut)

        with ExitStack() as held:
            scope.setdefault("state", {})["held"] = held
            counted = held.enter_context(server.bodies.reading(receive))
            await super().handle(scope, counted, send_pieces)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        has_body = self.body_field is not None

        async def handle_strictly(request: Request) -> Response:
            if not has_body:
                return await handle(request)
            check_content_type(request.headers)
            return await handle(_JSONRequest(request.scope, request.receive))

        return handle_strictly


class _JSONRequest(Request):
    async def body(self) -> bytes:
        """Return the first byte: FastAPI asks whether there is one, and keeps what it gets."""
        return (await super().body())[:1]

    async def json(self) -> Any:
        """Return the parsed body, once; a large one is parsed outside the event loop."""
        body = await super().body()
        self._body = b""
        return await asyncio.to_thread(parse, body) if len(body) > _LARGE_BYTES else parse(body)


def parse(body: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        APIError: status 400, the text is not JSON in UTF-8, too deep, has too many values, a key
            twice, or a number or character that JSON or Unicode does not have.
    """
    if body.count(b",") > MAX_COMMAS:
        raise APIError(400, f"the body has more than {MAX_COMMAS} values: send fewer at once")
    try:
        value = strict_json.read(body, "the body")
        if b"\\u" in body:  # half a surrogate pair may be escaped; nothing can encode it again
            json.dumps(value, ensure_ascii=False).encode()
    except StrictJSONError as error:
        raise APIError(400, str(error), param=error.key) from None
    except UnicodeEncodeError:
        raise APIError(
            400, "the body has half a surrogate pair, which is not a character"
        ) from None
    return value


def check_content_type(headers: Headers) -> None:
    """Raise APIError, status 415, if a request's body is not said to be plain JSON."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise APIError(
            415, f"the body must not be compressed, got {shown(encoding)}: send it plain"
        )
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        given = shown(kind) if kind else "none"
        raise APIError(
            415, f"the header Content-Type must be application/json, got {given}", param=None
        )
