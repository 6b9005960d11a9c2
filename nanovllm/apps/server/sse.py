"""Writes answers: whole ones, and streams as server-sent events."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nanovllm.apps.server.error_bodies import APIError, anthropic_body, as_api_error
from nanovllm.errors import log_failure

T = TypeVar("T")

logger = logging.getLogger(__name__)

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class _EventStream(StreamingResponse):
    """Sends events as they come, in the task of the request: no task and no queue between.

    That the client goes away is noticed by what makes the events; see `generation.run`.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        assert isinstance(self.body_iterator, AsyncGenerator)
        async with aclosing(self.body_iterator) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


DONE = "data: [DONE]\n\n"


def error_frames(error: APIError, path: str = "") -> bytes:
    """Return what ends a stream that an error breaks off, in the form of the route `path`.

    Whoever ends a stream writes this: the route, or a server in front of its engine.
    """
    if path.startswith("/v1/messages"):
        return f"event: error\ndata: {json.dumps(anthropic_body(error))}\n\n".encode()
    done = "" if path.startswith("/v1/responses") else DONE
    return f"data: {json.dumps(error.body)}\n\n{done}".encode()


def sse(
    outputs: AsyncGenerator[T, None],
    frames: Callable[[T], str],
    *,
    failed: Callable[[APIError], bytes] = error_frames,
    in_thread: bool = False,
) -> _EventStream:
    """Return a response that sends the frames of each output as it comes.

    Args:
        failed: returns what ends the stream if an error breaks it off.
        in_thread: whether `frames` takes so long that a thread does it.
    """

    async def encoded() -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    text = await asyncio.to_thread(frames, output) if in_thread else frames(output)
                    if text:
                        yield text.encode()
        except Exception as error:
            if not isinstance(error, APIError):
                log_failure(logger, error, "a stream ended with an error")
            yield failed(as_api_error(error))

    return _EventStream(encoded(), headers=_HEADERS, media_type="text/event-stream")


def frame(event: Mapping[str, Any]) -> str:
    return f"data: {_json(event).decode()}\n\n"


def named_frames(events: Iterable[Mapping[str, Any]]) -> str:
    """Return events for clients that listen to their types."""
    return "".join(f"event: {event['type']}\n{frame(event)}" for event in events)


class TextFrames:
    """Makes frames that differ only in the last text of `event`, where it has TEXT."""

    TEXT = "\ufffdtext\ufffd"

    def __init__(self, event: Mapping[str, Any]) -> None:
        self._head, _, self._tail = frame(event).rpartition(f'"{self.TEXT}"')

    def frame(self, text: str) -> str:
        return f"{self._head}{json.dumps(text, ensure_ascii=False)}{self._tail}"


def json_response(answer: Mapping[str, Any]) -> Response:
    return Response(_json(answer), media_type="application/json")


def _json(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="null")
