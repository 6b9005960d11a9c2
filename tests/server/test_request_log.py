"""The form of the server's log, request ids, and the line of each request."""

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message

from nanovllm import AsyncLLM
from nanovllm.apps.server.request_log import JSONFormatter, Log, RequestLog, record_of
from tests.glossary import QUESTION
from tests.helpers import wait_until
from tests.server.conftest import Running, running

LOGGER = "nanovllm.apps.server.request_log"


async def hello(request: Request) -> PlainTextResponse:
    record = record_of(request.scope)
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


def get(path: str = "/", headers: Any = None) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(RequestLog(APP, Counter()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(run())


def line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Return the fields of the only request in the log."""
    (record,) = (record for record in caplog.records if record.name == LOGGER)
    assert len(record.getMessage().splitlines()) == 1
    fields: dict[str, Any] = vars(record)["request"]
    return fields


@pytest.mark.parametrize("given", ["a" * 128, "A.b_c:d/e+f=@g"])
def test_a_good_id_is_kept(given: str, caplog: pytest.LogCaptureFixture) -> None:
    answer = get(headers={"X-Request-Id": given})
    assert answer.headers["x-request-id"] == answer.text == line(caplog)["id"] == given


@pytest.mark.parametrize("given", [None, "a b", "a" * 129, "a\x1b[31mb", "é"])
def test_another_id_is_replaced(given: str | None, caplog: pytest.LogCaptureFixture) -> None:
    headers = None if given is None else [(b"X-Request-Id", given.encode("latin-1"))]
    answer = get(headers=headers)
    assert re.fullmatch(r"req-[0-9a-f]{32}", answer.headers["x-request-id"])
    assert line(caplog)["id"] == answer.headers["x-request-id"] == answer.text
    assert answer.text != get(headers=headers).text


def test_the_line_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    """Also of one that fails, or has a long path."""
    for path, status in (("/broken", 500), (f"/{'x' * 5000}", 200)):
        assert get(path).status_code == status == line(caplog)["status"]
        assert len(caplog.records[0].getMessage()) < 500
        caplog.clear()
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


def test_probes_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    """Also below the path that a proxy has the server at."""
    get("/health")
    get("/")
    app = RequestLog(APP, Counter())

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

    asyncio.run(RequestLog(app, Counter())(scope, receive, send))
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


NAMES = ("", "nanovllm", LOGGER)


@pytest.fixture
def bare_logging() -> Iterator[None]:
    """Logging as a new process has it; afterwards it is as before."""
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(logger.level, logger.handlers[:], logger.disabled) for logger in loggers]
    yield
    for logger, (level, handlers, disabled) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.disabled = disabled


def written(form: str, level: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of three records of the engine, one of another package, and a message."""
    logging.getLogger().handlers.clear()  # pytest's
    logging.getLogger(LOGGER).setLevel(logging.NOTSET)
    log = Log(level, form)
    engine = logging.getLogger("nanovllm.worker.kv_cache")
    engine.debug("tables")
    engine.info("KV pool: %d blocks", 7)
    try:
        raise ZeroDivisionError("no\nway")
    except ZeroDivisionError:
        engine.exception("broken")
    logging.getLogger("some.package").info("much")
    log.tell("nanovllm: ready")
    return capsys.readouterr().err.splitlines()


@pytest.mark.usefixtures("bare_logging")
@pytest.mark.parametrize(
    ("level", "messages"),
    [
        ("info", ["KV pool: 7 blocks", "broken", "ready"]),
        ("error", ["broken"]),
    ],
)
def test_json_has_one_line_a_record(
    capsys: pytest.CaptureFixture[str], level: str, messages: list[str]
) -> None:
    lines = [json.loads(line) for line in written("json", level, capsys)]
    assert [line["message"] for line in lines] == messages
    (broken,) = (line for line in lines if line["message"] == "broken")
    assert broken["level"] == "ERROR"
    assert broken["logger"] == "nanovllm.worker.kv_cache"
    assert broken["exception"].endswith("ZeroDivisionError: no\nway")
    assert broken["time"].endswith("Z")


@pytest.mark.usefixtures("bare_logging")
def test_text_is_told_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    lines = written("text", "info", capsys)
    assert lines[-1] == "nanovllm: ready"
    assert lines[0].endswith(" INFO nanovllm.worker.kv_cache: KV pool: 7 blocks")


def test_the_line_of_a_request_has_its_fields() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s", ("id=7 path=/v1",), None)
    fields = {"id": "7", "method": "GET", "path": "/v1", "status": 200, "ttft": 0.5}
    record.request = fields
    line = json.loads(JSONFormatter().format(record))
    assert (line["message"], line["request"]) == ("GET /v1 200", fields)


CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 160,
}
COMPLETIONS: dict[str, Any] = {"prompt": [QUESTION, "Hello"], "max_tokens": 3}


def test_a_request_in_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """With what the engine did for it, and nothing of what it said."""
    with caplog.at_level("INFO", "nanovllm.apps.server"):
        answer = server.send("/v1/chat/completions", CHAT, X_Request_Id="my-id")
        other = server.send("/v1/completions", COMPLETIONS)
        stream = server.send("/v1/chat/completions", {**CHAT, "stream": True})
        wait_until(lambda: len(caplog.records) >= 3, 5)  # a stream's line comes after its last byte
    assert answer.headers["x-request-id"] == "my-id"
    assert stream.status == 200
    first, second, third = (vars(record)["request"] for record in caplog.records)
    usage = answer.body["usage"]
    assert first["id"] == "my-id"
    assert first["path"] == "/v1/chat/completions"
    used = (usage, other.body["usage"], usage)
    for fields, usage in zip((first, second, third), used, strict=True):
        assert fields["status"] == 200
        assert fields["prompt_tokens"] == usage["prompt_tokens"]
        assert fields["output_tokens"] == usage["completion_tokens"]
        assert 0 < fields["ttft"] < fields["duration"]
    assert (first["finish"], second["finish"], third["finish"]) == ("stop", "length", "stop")
    assert QUESTION not in caplog.text
    assert "paged attention" not in caplog.text.lower()


@pytest.mark.of_engines
def test_metrics_of_the_server(async_llm: AsyncLLM) -> None:
    """The queue holds one sequence, so two answers are too many."""
    with running(async_llm, max_waiting=1) as server:
        assert server.send("/v1/completions", {**COMPLETIONS, "n": 2}).status == 400
        assert server.send("/v1/completions", {"max_tokens": -1, "prompt": "x"}).status == 400
        assert server.send("/v1/chat/completions", CHAT).status == 200
        assert server.send("/nowhere").status == 404
        time.sleep(0.3)  # for the event loop to be watched
        answer = server.send("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    name = server.state.model_name

    def value(sample: str, **labels: str) -> float:
        words = ",".join(f'{k}="{v}"' for k, v in sorted({"model_name": name, **labels}.items()))
        (line,) = (x for x in answer.body.splitlines() if x.startswith(f"{sample}{{{words}}} "))
        return float(line.split()[-1])

    assert value("vllm:num_requests_running", engine="0") == 0
    assert value("vllm:request_success_total", engine="0", finished_reason="stop") == 1
    assert value("vllm:request_success_total", engine="0", finished_reason="abort") == 0
    assert value("nanovllm:refused_requests_total", reason="too_many_sequences") == 1
    count = "nanovllm:http_requests_total"
    assert value(count, path="/v1/completions", status="400") == 2
    assert value(count, path="/v1/chat/completions", status="200") == 1
    assert value(count, path="other", status="404") == 1
    assert value("nanovllm:event_loop_lag_seconds_count", engine="0") > 0
