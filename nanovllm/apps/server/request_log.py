"""Request ids, trace contexts, and one line a request in the log: a pure ASGI middleware.

Of a request only its id, method and path get there: no prompt, no answer, no key.
"""

import dataclasses
import json
import logging
import re
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.apps.server import pages
from nanovllm.outputs import RequestOutput

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""The status in the log of a request whose client went away before the answer began."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PLAIN = re.compile(r"[A-Za-z0-9._:/+=@,-]+")
_PROBES = {"/health", "/ready", "/metrics", "/status.json", pages.FILE_ROUTE}
"""Routes that are asked for every few seconds, or many times a page: their lines have the level
DEBUG.
"""
_MAX_PATH = 200
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """What the log says of one HTTP request; it may have several requests of the engine."""

    request_id: str
    traceparent: str | None = None
    """The header that names the request's span, None outside of traces."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    time_to_first_token: float | None = None
    """Seconds from arrival in the engine."""
    finish_reasons: dict[str, None] = dataclasses.field(default_factory=dict)
    """Each that occurred, in order."""
    is_passed_on: bool = False
    """Whether an engine of its own process answers, and logs it."""

    def first_token(self, seconds: float) -> None:
        """Note the time to a first token; the shortest counts."""
        self.time_to_first_token = min(seconds, self.time_to_first_token or seconds)

    def observe(self, output: RequestOutput, *, is_first: bool) -> None:
        """Add a delta, or a whole output; `is_first` says that it is the first of its request."""
        if is_first:
            self.num_prompt_tokens += len(output.prompt_token_ids)
        for completion in output.outputs:
            self.num_output_tokens += len(completion.token_ids)
            if completion.finish_reason is not None:
                self.finish_reasons[completion.finish_reason] = None


def record_of(scope: Mapping[str, Any]) -> RequestRecord | None:
    """Return the record of a request by its ASGI scope, None if `RequestLog` is not in use."""
    found: RequestRecord | None = scope.get("state", {}).get("record")
    return found


class RequestLog:
    """Gives each request an id, and logs it when its answer has been sent.

    The id is the header X-Request-Id if the client sent one that is safe to log. It is in the
    answer's headers, as is `traceparent` if the client sent one.

    Args:
        count: called with the path of each request's route and the status of its answer.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None] | None = None) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given_id = headers.get("x-request-id", "")
        is_safe = _REQUEST_ID.fullmatch(given_id)
        record = RequestRecord(given_id if is_safe else f"req-{uuid.uuid4().hex}")
        scope.setdefault("state", {})["record"] = record
        record.traceparent = child_traceparent(headers.get("traceparent", ""))
        status = 500
        start = time.monotonic()
        try:
            status = await _run(self._app, scope, receive, send, record)
        finally:
            fields = _fields(scope, record, status, time.monotonic() - start)
            route = getattr(scope.get("route"), "path", "other")
            is_probe = route in _PROBES and status < 400
            _log(fields, is_probe=is_probe or record.is_passed_on)
            if self._count is not None and not record.is_passed_on:
                self._count(route, status)


def child_traceparent(parent: str) -> str | None:
    """Return the header `traceparent` of a new span below that of the header `parent`.

    It is 00, the trace's id of 32 hexadecimal digits, the span's of 16, and two digits of flags,
    with dashes between. None if the parent's is not valid.
    """
    found = _TRACEPARENT.fullmatch(parent)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) * int(span_id, 16):
        return None
    return f"00-{trace_id}-{secrets.token_hex(8)}-{flags}"


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
    if record.traceparent is not None:
        headers.append((b"traceparent", record.traceparent.encode()))

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
        "trace": record.traceparent and record.traceparent.split("-")[1],
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


def _log(fields: Mapping[str, str | int | float], *, is_probe: bool) -> None:
    """Log a request as words name=value; a log formatter finds the fields in `record.request`."""
    words = " ".join(f"{name}={_quoted(value)}" for name, value in fields.items())
    level = logging.DEBUG if is_probe else logging.INFO
    logger.log(level, "%s", words, extra={"request": dict(fields)})


def _quoted(value: str | int | float) -> str:
    """Return a value as one word; text with other than plain characters as a JSON string."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
