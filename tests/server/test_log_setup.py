"""The form of the server's log."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm.apps.server.log_setup import JSONFormatter, Log
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.errors import ConfigError

NAMES = ("", "nanovllm", "nanovllm.apps.server.log_setup")


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
        ("debug", ["tables", "KV pool: 7 blocks", "broken", "ready"]),
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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"log_level": "inf"}, "log_level must be one of .*did you mean 'info'"),
        ({"log_format": "xml"}, "log_format must be one of text, json"),
    ],
)
def test_options_are_checked(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerOptions(**option)
