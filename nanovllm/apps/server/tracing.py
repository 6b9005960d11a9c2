"""W3C trace contexts, and spans of OpenTelemetry where it is installed and set up.

OpenTelemetry's own environment variables (OTEL_*) say whether and where spans are sent; without
them nothing leaves the process.
"""

import logging
import os
import re
import secrets
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

logger = logging.getLogger(__name__)

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


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


def find_open_telemetry(environment: Mapping[str, str] = os.environ) -> OpenTelemetry | None:
    """Return OpenTelemetry if it records spans, otherwise None.

    It does if somebody has set a tracer provider, such as the command `opentelemetry-instrument`;
    or if OTEL_TRACES_EXPORTER, or an endpoint of OTLP, is set, and the package of that exporter
    is installed.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        return None
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = _make_provider(environment)
        if provider is None:
            return None
        trace.set_tracer_provider(provider)
    return OpenTelemetry()


def _make_provider(environment: Mapping[str, str]) -> Any:
    """Return a provider with the exporters that the environment names; None if it names none."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    default = "otlp" if any(environment.get(name) for name in _ENDPOINTS) else "none"
    names = environment.get("OTEL_TRACES_EXPORTER") or default
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        names = "none"
    exporters = [_exporter(name.strip(), environment) for name in names.split(",")]
    found = [exporter for exporter in exporters if exporter is not None]
    if not found:
        return None
    provider = TracerProvider()  # reads OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, the sampler
    for exporter in found:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter(name: str, environment: Mapping[str, str]) -> Any:
    """Return the exporter that the variable's word means; None if there is none, with a warning."""
    if name in ("none", ""):
        return None
    if name == "otlp":
        protocol = next(filter(None, map(environment.get, _PROTOCOLS)), "http/protobuf")
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    for entry in entry_points(group="opentelemetry_traces_exporter", name=name):
        return entry.load()()
    logger.warning("OpenTelemetry's exporter %r is not installed: no spans are sent to it", name)
    return None
