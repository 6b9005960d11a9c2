"""W3C trace contexts, and spans of OpenTelemetry where a tracer provider is set."""

import re
import secrets
from collections.abc import Mapping
from typing import Any

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


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


class OpenTelemetry:
    """Makes a span of each request, for a tracer provider; None is the process's own."""

    def __init__(self, provider: Any = None) -> None:
        from opentelemetry import propagate, trace

        self._propagate = propagate
        self._trace = trace
        self._tracer = trace.get_tracer("nanovllm", tracer_provider=provider)

    def start(self, headers: Mapping[str, str], method: str, path: str) -> Any:
        """Return a new span, a child of the one that the request's headers name."""
        return self._tracer.start_span(
            f"{method} {path}",
            self._propagate.extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path},
        )

    def current(self, span: Any) -> Any:
        """Return a context manager that makes spans of other libraries children of `span`."""
        return self._trace.use_span(span, end_on_exit=False)

    def end(self, span: Any, attributes: Mapping[str, Any], *, failed: bool) -> None:
        """End a span; attributes that are None are left out."""
        span.set_attributes({key: value for key, value in attributes.items() if value is not None})
        if failed:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()


def traceparent_of(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def find_open_telemetry() -> OpenTelemetry | None:
    """Return OpenTelemetry if a tracer provider is set, as `opentelemetry-instrument` does."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    is_set = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    return OpenTelemetry() if is_set else None
