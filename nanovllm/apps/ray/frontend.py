"""The frontend: takes HTTP requests from Ray Serve's proxies and passes each on to a replica.

It reads the body, because Ray Serve's proxies choose a replica before they have read it.
"""

import asyncio
import logging
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.apps.ray.affinity import conversation_key
from nanovllm.apps.server.admission import BodyBudget
from nanovllm.apps.server.error_bodies import APIError, as_api_error, route_path
from nanovllm.apps.server.middleware import guard
from nanovllm.apps.server.prometheus import merge
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.apps.server.sse import error_frames
from nanovllm.errors import log_failure

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
"""Replicas that may die of one request, so that a request that kills its replica does not kill
all."""
_SENT = ("type", "http_version", "method", "scheme", "path", "query_string", "headers", "client")
"""What a replica gets of a scope."""
_PROBE_SECONDS = 5.0
"""For a replica to answer a request without a body; there may be no replica yet."""
_DIED = (RayActorError, OutOfMemoryError, ReplicaUnavailableError)


class Frontend:
    """What Ray Serve makes of each frontend: an ASGI app in front of a handle of the replicas."""

    def __init__(self, engine: DeploymentHandle[Any], options: ServerOptions) -> None:
        self._engine = engine
        self._options = options

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app. Ray Serve calls this once, in the replica of the frontend."""
        app = Starlette(routes=[Route("/{path:path}", _Forward(self._engine, self._options))])
        guard(app, self._options)
        return _at_root(app)


def _at_root(app: ASGIApp) -> ASGIApp:
    """Return an app that sees paths without the prefix of the application."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": route_path(scope), "root_path": ""}
        await app(scope, receive, send)

    return answer


class _Forward:
    """An ASGI app that lets a replica answer."""

    def __init__(self, engine: DeploymentHandle[Any], options: ServerOptions) -> None:
        self._engine = engine
        self._options = options
        self._bodies = BodyBudget(options.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        answer = _Answer(send)
        try:
            if scope["path"] == "/metrics" and scope["method"] == "GET":
                await (await self._metrics())(scope, receive, answer.send)
                return
            with self._bodies.reading(receive) as counted:
                body = await self._read(scope, counted)
                if body is not None:
                    await self._forward(scope, body, answer)
        except Exception as error:
            if not isinstance(error, (APIError, *_DIED)):
                log_failure(logger, error, "a request failed")
            found = _died() if isinstance(error, _DIED) else as_api_error(error)
            if answer.has_begun:
                await answer.break_off(found, scope["path"])
            else:
                await found.response(scope["path"])(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, None if the client goes away first.

        Raises:
            APIError: it is too large, or takes too long.
        """
        seconds = self._options.read_timeout
        try:
            async with asyncio.timeout(seconds):
                return await Request(scope, receive).body()
        except ClientDisconnect:
            return None
        except TimeoutError:
            raise APIError(408, f"the request did not arrive within {seconds:g} s") from None

    async def _forward(self, scope: Scope, body: bytes, answer: "_Answer") -> None:
        """Let a replica answer; if it dies before its answer has begun, another one.

        Raises:
            APIError: there is no answer, or none in time.
        """
        key = conversation_key(scope["path"], scope["headers"], body)
        engine = self._engine.options(method_name="answer", stream=True, session_id=key)
        is_get = scope["method"] == "GET"
        first_seconds = _PROBE_SECONDS if is_get else self._options.request_timeout
        for _ in range(_ATTEMPTS):
            replies = engine.remote({name: scope[name] for name in _SENT if name in scope}, body)
            assert isinstance(replies, DeploymentResponseGenerator)
            try:
                async with asyncio.timeout(first_seconds) as waiting:
                    async for messages in replies:
                        waiting.reschedule(None)
                        for message in messages:
                            await answer.send(message)
                return
            except _DIED:
                if answer.has_begun:
                    raise
            except TimeoutError:
                replies.cancel()
                raise self._late(scope) from None
            except BackPressureError:
                raise APIError(
                    503,
                    "the queue is full: all replicas have max_ongoing_requests, and "
                    "max_queued_requests wait here; try again later",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                ) from None
            except DeploymentUnavailableError:
                raise _no_replica() from None
            except BaseException:  # the client is gone
                replies.cancel()
                raise
        raise _died()

    def _late(self, scope: Scope) -> APIError:
        if scope["method"] == "GET":
            return _no_replica()
        return APIError(
            504,
            f"the request took longer than request_timeout, {self._options.request_timeout:g} s: "
            "ask for fewer tokens, or try again when the server is less busy",
            code="request_timeout",
            headers={"x-should-retry": "false"},
        )

    async def _metrics(self) -> Response:
        """Return the metrics of all replicas; those of one that does not answer are left out."""
        try:
            found = await self._engine.broadcast("metrics").results_async(
                timeout_s=_PROBE_SECONDS, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError):
            raise _no_replica() from None
        items = [item for item in found if not isinstance(item, Exception)]
        texts = {name: text.decode() for name, text in items}
        return Response(merge(texts, "replica"), media_type=CONTENT_TYPE_LATEST)


class _Answer:
    """The answer to one request, as far as it has been sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_stream = False
        self.has_begun = False

    async def send(self, message: Message) -> None:
        """Send an ASGI message on."""
        if message["type"] == "http.response.start":
            # Ray Serve's proxy adds the request's id itself.
            headers = [item for item in message["headers"] if item[0] != b"x-request-id"]
            message = {**message, "headers": headers}
            kinds = [value for name, value in headers if name == b"content-type"]
            self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        self.has_begun = True
        await self._send(message)

    async def break_off(self, error: APIError, path: str) -> None:
        """End an answer that has begun with an error.

        A stream ends with an error event, as one of the server's own does. Otherwise the connection
        is cut, which every client notices.

        Raises:
            ConnectionError: the answer is not a stream.
        """
        if not self._is_stream:
            raise ConnectionError(error.body["error"]["message"])
        await self._send({"type": "http.response.body", "body": error_frames(error, path)})


def _died() -> APIError:
    return APIError(
        503,
        "the replica that worked on the request has died; try again",
        type="server_error",
        code="replica_died",
        headers={"Retry-After": "1"},
    )


def _no_replica() -> APIError:
    return APIError(
        503, "no replica is ready; try again later", code="no_replica", headers={"Retry-After": "5"}
    )
