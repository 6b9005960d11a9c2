"""What the frontend makes of its replicas' answers: of a stream that breaks off, and of metrics."""

import asyncio
from typing import Any

import pytest

from nanovllm.apps.ray.frontend import _Answer, _died
from nanovllm.apps.server.prometheus import merge
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


PAGE = """# HELP tokens_total Tokens.
# TYPE tokens_total counter
tokens_total{engine="0"} 5.0
# HELP seconds Seconds.
# TYPE seconds histogram
seconds_bucket{le="1"} 2.0
seconds_bucket{le="+Inf"} 3.0
seconds_count 3.0
seconds_sum 4.5
"""


def test_every_sample_names_its_replica() -> None:
    page = merge({"b": PAGE, "a": PAGE.replace("5.0", "7.0")}, "replica").decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert lines[:2] == [
        'tokens_total{engine="0",replica="a"} 7.0',
        'tokens_total{engine="0",replica="b"} 5.0',
    ]
    assert 'seconds_bucket{le="+Inf",replica="b"} 3.0' in lines
    assert len(lines) == 10
    assert page.count("# TYPE tokens_total counter") == page.count("# TYPE seconds histogram") == 1
