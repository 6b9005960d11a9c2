"""A replica that dies in the middle of a stream: what the frontend writes in its place."""

import asyncio
from typing import Any

import pytest

from nanovllm.apps.ray.frontend import _Answer, _died
from nanovllm.apps.server.sse import error_frames


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_stream_ends_with_the_error_of_its_route(path: str) -> None:
    """Symptom: /v1/messages ended with OpenAI's error, which Anthropic's client passes over."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def break_off() -> None:
        answer = _Answer(send)
        headers = [(b"content-type", b"text/event-stream")]
        await answer.send({"type": "http.response.start", "status": 200, "headers": headers})
        await answer.break_off(_died(), path)

    asyncio.run(break_off())
    assert sent[-1]["body"] == error_frames(_died(), path)
