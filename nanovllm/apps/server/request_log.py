"""The server's log, on standard error, with a line for each request; request ids.

Of a request only its id, method and path get there: no prompt, no answer, no key.
"""

import dataclasses
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.apps.server import pages
from nanovllm.utils.terminal import complain

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""The status in the log of a request whose client went away before the answer began."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PLAIN = re.compile(r"[A-Za-z0-9._:/+=@,-]+")
_PROBES = {"/health", "/ready", "/metrics", pages.FILE_ROUTE}
"""Routes that are asked for every few seconds, or many times a page: their lines have the level
DEBUG.
"""
_MAX_PATH = 200
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """What the log says of one HTTP request; it may have several requests of the engine."""

    request_id: str
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    time_to_first_token: float | None = None
    """Seconds from arrival in the engine."""
    finish_reasons: dict[str, None] = dataclasses.field(default_factory=dict)
    is_passed_on: bool = False
    """Whether an engine of its own process answers, and logs it."""


def record_of(scope: Mapping[str, Any]) -> RequestRecord | None:
    """Return the record of a request by its ASGI scope, None if `RequestLog` is not in use."""
    found: RequestRecord | None = scope.get("state", {}).get("record")
    return found


class RequestLog:
    """Gives each request an id, and logs it when its answer has been sent.

    The id, which the answer has too, is the header X-Request-Id if that is safe to log. `answers`
    counts requests by the path of their route and their status.
    """

    def __init__(self, app: ASGIApp, answers: Counter[tuple[str, int]]) -> None:
        self._app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given_id = Headers(scope=scope).get("x-request-id", "")
        is_safe = _REQUEST_ID.fullmatch(given_id)
        record = RequestRecord(given_id if is_safe else f"req-{uuid.uuid4().hex}")
        scope.setdefault("state", {})["record"] = record
        status = 500
        start = time.monotonic()
        try:
            status = await _run(self._app, scope, receive, send, record)
        finally:
            fields = _fields(scope, record, status, time.monotonic() - start)
            route = getattr(scope.get("route"), "path", "other")
            is_probe = route in _PROBES and status < 400
            level = logging.DEBUG if is_probe or record.is_passed_on else logging.INFO
            words = " ".join(f"{name}={_quoted(value)}" for name, value in fields.items())
            # A log formatter finds the fields in `record.request`.
            logger.log(level, "%s", words, extra={"request": dict(fields)})
            if not record.is_passed_on:
                self._answers[route, status] += 1


async def _run(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, record: RequestRecord
) -> int:
    """Run the app, add headers to its answer, and return the status of the answer."""
    status = None
    is_gone = False
    request_id = record.request_id.encode()
    headers = [(b"x-request-id", request_id)]
    if "/v1/messages" in scope["path"]:
        headers.append((b"request-id", request_id))  # Anthropic's name, which its client reads

    async def noting_receive() -> Message:
        nonlocal is_gone
        message = await receive()
        is_gone = is_gone or message["type"] == "http.disconnect"
        return message

    async def noting_send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = CLIENT_CLOSED if is_gone else message["status"]
            message["headers"] = [*message.get("headers", ()), *headers]
        await send(message)

    await app(scope, noting_receive, noting_send)
    if status is None:
        return CLIENT_CLOSED if is_gone else 500
    return status


def _fields(
    scope: Scope, record: RequestRecord, status: int, seconds: float
) -> dict[str, str | int | float]:
    """Return what the log says of a request, in order."""
    found: dict[str, str | int | float | None] = {
        "id": record.request_id,
        "method": scope["method"],
        "path": scope["path"][:_MAX_PATH],
        "status": status,
        "duration": round(seconds, 6),
        "client": scope["client"][0] if scope.get("client") else None,
    }
    if record.num_prompt_tokens:
        found |= {
            "prompt_tokens": record.num_prompt_tokens,
            "output_tokens": record.num_output_tokens,
            "finish": ",".join(record.finish_reasons) or "abort",
        }
        if record.time_to_first_token is not None:
            found["ttft"] = round(record.time_to_first_token, 6)
    return {name: value for name, value in found.items() if value not in (None, "")}


def _quoted(value: str | int | float) -> str:
    """Return a value as one word; text with other than plain characters as a JSON string."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class JSONFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time (UTC), level, logger, message.

    The line of a request has its fields in `request`; an exception's traceback is in `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := getattr(record, "request", None)) is not None:
            line["message"] = "{method} {path} {status}".format(**request)
            line["request"] = request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Log:
    """Where the server's lines go: to standard error, in the form "text" or "json".

    Records of nanovllm from `level` on are written, and warnings of others.
    """

    def __init__(self, level: str, form: str) -> None:
        self.is_plain = form == "text"
        """Whether people read it, not programs."""
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_TEXT) if self.is_plain else JSONFormatter())
        logging.basicConfig(handlers=[handler])
        logging.getLogger("nanovllm").setLevel(level.upper())

    def tell(self, message: str, level: int = logging.INFO) -> None:
        """Tell the user who started the server something: as it is, or as a line of the log."""
        if self.is_plain:
            complain(message)
        else:
            logger.log(level, "%s", message.removeprefix("nanovllm: ").strip())
