"""Writes answers: whole ones, and streams as server-sent events. Knows no answer's contents."""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence as Seq
from contextlib import aclosing

from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nanovllm.server.error_bodies import APIError, as_api_error

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


Event = BaseModel | str
"""A model is one event with the fields that were set; a string is an event as it is sent."""


def sse(
    events: AsyncIterator[Event | Seq[Event]], *, done: str = "data: [DONE]\n\n"
) -> StreamingResponse:
    """Return a response that sends `events`, and an error among them as an error event.

    Args:
        events: those of a list are written at once.
        done: what to send at the end.
    """
    return _EventStream(_frames(events, done), headers=_HEADERS, media_type="text/event-stream")


async def _frames(
    events: AsyncIterator[Event | Seq[Event]], done: str
) -> AsyncGenerator[bytes, None]:
    assert isinstance(events, AsyncGenerator)
    try:
        async with aclosing(events):
            async for found in events:
                together = [found] if isinstance(found, Event) else found
                texts = [frame(e) if isinstance(e, BaseModel) else e for e in together]
                if texts:
                    yield "".join(texts).encode()
    except Exception as error:
        if not isinstance(error, APIError):
            logger.exception("a stream ended with an error")
        yield f"data: {json.dumps(as_api_error(error).body)}\n\n".encode()
    yield done.encode()


def frame(event: BaseModel, name: str | None = None) -> str:
    """Return one event; `name` is its kind, for clients that listen to kinds."""
    data = f"data: {event.model_dump_json(exclude_unset=True)}\n\n"
    return data if name is None else f"event: {name}\n{data}"


def json_response(answer: BaseModel) -> Response:
    """Return a response with the fields of `answer` that were set."""
    # As `model_dump_json`, but bytes at once: no text.
    data = answer.__pydantic_serializer__.to_json(answer, exclude_unset=True)
    return Response(data, media_type="application/json")
