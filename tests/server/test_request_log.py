"""Request ids, trace contexts and the line of each request in the log."""

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message

from nanovllm.apps.server.request_log import (
    RequestLog,
    RequestRecord,
    child_traceparent,
    record_of,
)

LOGGER = "nanovllm.apps.server.request_log"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def hello(request: Request) -> PlainTextResponse:
    record = record_of(request.scope)
    assert record is not None
    return PlainTextResponse(record.request_id)


async def broken(request: Request) -> PlainTextResponse:
    raise ZeroDivisionError


APP = Starlette(
    routes=[
        Route("/", hello, methods=["GET", "POST"]),
        Route("/broken", broken),
        Route("/health", hello),
        Route("/{path:path}", hello),
    ]
)


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, LOGGER):
        yield


def get(path: str = "/", headers: Any = None, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(RequestLog(APP, **options), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(run())


def line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Return the fields of the only request in the log."""
    (record,) = (record for record in caplog.records if record.name == LOGGER)
    assert len(record.getMessage().splitlines()) == 1
    fields: dict[str, Any] = vars(record)["request"]
    return fields


@pytest.mark.parametrize("given", ["abc", "2f1d-4", "a" * 128, "A.b_c:d/e+f=@g"])
def test_a_good_id_is_kept(given: str, caplog: pytest.LogCaptureFixture) -> None:
    answer = get(headers={"X-Request-Id": given})
    assert answer.headers["x-request-id"] == answer.text == line(caplog)["id"] == given


@pytest.mark.parametrize("given", [None, "", "a b", "a" * 129, 'a"b', "a\x1b[31mb", "é"])
def test_another_id_is_replaced(given: str | None, caplog: pytest.LogCaptureFixture) -> None:
    headers = None if given is None else [(b"X-Request-Id", given.encode("latin-1"))]
    answer = get(headers=headers)
    assert re.fullmatch(r"req-[0-9a-f]{32}", answer.headers["x-request-id"])
    assert line(caplog)["id"] == answer.headers["x-request-id"] == answer.text
    assert answer.text != get(headers=headers).text


def test_the_trace_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    answer = get(headers={"traceparent": PARENT})
    sent, found = PARENT.split("-"), answer.headers["traceparent"].split("-")
    assert found[1] == sent[1] == line(caplog)["trace"]
    assert re.fullmatch(r"[0-9a-f]{16}", found[2])
    assert found[2] != sent[2]
    assert (found[0], found[3]) == ("00", sent[3])


def test_a_later_version_of_the_header_may_have_more_fields() -> None:
    found = child_traceparent("01" + PARENT[2:] + "-more")
    assert found is not None
    assert (found[:36], found[52:]) == (PARENT[:36], PARENT[52:])


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        "ff" + PARENT[2:],
        PARENT + "-more",
        PARENT.upper(),
        PARENT[:-1],
        PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        PARENT.replace("b7ad6b7169203331", "0" * 16),
        PARENT + "\n",
    ],
)
def test_an_invalid_trace_is_left_out(header: str) -> None:
    assert child_traceparent(header) is None
    if "\n" not in header:
        assert "traceparent" not in get(headers={"traceparent": header}).headers


def test_the_line_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    get("/some/path?key=secret-in-query", headers={"Authorization": "Bearer secret-key"})
    fields = line(caplog)
    assert fields["duration"] < 10
    assert {k: fields[k] for k in ("method", "path", "status", "client")} == {
        "method": "GET",
        "path": "/some/path",
        "status": 200,
        "client": "127.0.0.1",
    }
    assert "method=GET path=/some/path status=200" in caplog.text
    assert "secret" not in caplog.text
    assert "prompt_tokens" not in fields


def test_control_characters_are_escaped(caplog: pytest.LogCaptureFixture) -> None:
    get("/a%0Ab%1B%5B31m%E2%80%A8c%22%20id=forged")
    assert line(caplog)["path"] == '/a\nb\x1b[31m\u2028c" id=forged'
    message = caplog.records[-1].getMessage()
    assert message.isascii()
    assert message.isprintable()
    assert r'path="/a\nb\u001b[31m\u2028c\" id=forged"' in message


def test_a_long_path_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    get("/" + "x" * 5000)
    assert len(caplog.records[-1].getMessage()) < 500


def test_an_error_of_a_route(caplog: pytest.LogCaptureFixture) -> None:
    assert get("/broken").status_code == 500
    assert line(caplog)["status"] == 500


def test_probes_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    """Also below the path that a proxy has the server at."""
    get("/health")
    get("/")
    app = RequestLog(APP)

    async def below(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "root_path": "/llm"}, receive, send)

    async def run() -> None:
        transport = httpx.ASGITransport(below)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/llm/health")).status_code == 200

    asyncio.run(run())
    levels = [r.levelno for r in caplog.records if r.name == LOGGER]
    assert levels == [logging.DEBUG, logging.INFO, logging.DEBUG]


def call(app: Any, scope: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Run an app as ASGI's server does and return what it sent."""
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(RequestLog(app)(scope, receive, send))
    return sent


def test_a_client_that_went_away(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    scope = {"type": "http", "method": "POST", "path": "/x", "headers": [], "client": None}
    messages: list[Message] = [{"type": "http.request"}, {"type": "http.disconnect"}]
    assert call(app, scope, messages) == []
    assert line(caplog)["status"] == 499
    assert "client" not in line(caplog)


def test_other_kinds_of_connection_pass(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(await receive())

    sent = call(app, {"type": "lifespan"}, [{"type": "lifespan.startup"}])
    assert sent == [{"type": "lifespan.startup"}]
    assert not caplog.records


def test_without_the_middleware_there_is_no_record() -> None:
    assert record_of({"type": "http"}) is None


def test_the_shortest_time_to_a_first_token_counts() -> None:
    record = RequestRecord("id")
    for seconds in (0.4, 0.2, 0.3):
        record.first_token(seconds)
    assert record.time_to_first_token == 0.2
