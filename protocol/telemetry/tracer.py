"""Sends spans to an OpenTelemetry collector by OTLP over HTTP.

Spans are created when a request has ended, from times that are also measured without
tracing. Tracing therefore adds no latency to a token. A thread of the SDK sends spans
in batches. The thread's queue is bounded (OTEL_BSP_MAX_QUEUE_SIZE, 2048 spans by
default): if the collector is dead or slow, spans are dropped.

The packages of the extra `otel` are imported only if tracing is enabled.
"""

import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from protocol.process.logging import get_logger, silence
from protocol.settings.server_options import TelemetryOptions
from protocol.telemetry.trace_context import (
    TraceContext,
    context_from,
    new_span_id,
    new_trace_id,
)
from protocol.version import VERSION

logger = get_logger(__name__)

# Maximum time that a stopping process waits until its queued spans are sent.
CLOSE_TIMEOUT_S = 2.0
_TRACES_PATH = "/v1/traces"
_ENDPOINT_VARIABLES = (
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)
_PROTOCOL_VARIABLES = (
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
)
_HTTP_PROTOCOL = "http/protobuf"
_INSTALL = "pip install 'baton-pd[otel]'"
Value = str | int | float | bool


@dataclass(frozen=True)
class Span:
    """A span that has ended.

    Attributes:
        parent: None for the first span of a trace.
        start_s, end_s: Seconds of the machine's monotonic clock.
        kind: Name of an OpenTelemetry SpanKind.
        error: The reason for the failure; empty if the work succeeded.
    """

    name: str
    context: TraceContext
    parent: TraceContext | None
    start_s: float
    end_s: float
    kind: str = "INTERNAL"
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""


class Tracer:
    """Decides which requests are traced, and sends their spans.

    Args:
        endpoint: URL that receives the spans; None: the URL in the variables OTEL_*.
        service: The service's name, unless OTEL_SERVICE_NAME is set.
    """

    def __init__(self, endpoint: str | None, service: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        names = {"service.instance.id": f"{socket.gethostname()}:{os.getpid()}"}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            names[SERVICE_NAME] = service
        self._resource = Resource.create(names)
        # The provider's sampler follows OTEL_TRACES_SAMPLER.
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._sampler = provider.sampler
        self._scope = InstrumentationScope("baton", VERSION)
        # The SDK would log each failed export. _WatchedExporter logs only the first of
        # several failures in a row.
        silence("opentelemetry")
        exporter = OTLPSpanExporter(endpoint=endpoint)
        self._processor = BatchSpanProcessor(_WatchedExporter(exporter))

    def start(
        self, headers: Iterable[tuple[bytes, bytes]], name: str
    ) -> tuple[TraceContext, TraceContext | None]:
        """Decides whether a request is traced.

        Args:
            headers: The headers of the request.
            name: The name of the request's first span in this process.

        Returns:
            The context of the request's first span, and the context of the parent span.
            The parent is the caller's span; None without a valid `traceparent`.
        """
        from opentelemetry import trace

        parent = context_from(headers)
        parent_context = None
        if parent is not None:
            remote = _span_context(parent, is_remote=True)
            parent_context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        trace_id = parent.trace_id if parent else new_trace_id()
        result = self._sampler.should_sample(
            parent_context, trace_id, name, trace.SpanKind.SERVER
        )
        context = TraceContext(
            trace_id,
            new_span_id(),
            result.decision.is_sampled(),
            parent.state if parent else "",
        )
        return context, parent

    def send(self, spans: Iterable[Span]) -> None:
        """Queues spans. Does not wait for the collector."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        # The offset is constant, apart from corrections of the system's time.
        offset_ns = time.time_ns() - time.monotonic_ns()
        for span in spans:
            status = Status(StatusCode.UNSET)
            if span.error:
                status = Status(StatusCode.ERROR, span.error)
            parent = span.parent and _span_context(span.parent)
            self._processor.on_end(
                ReadableSpan(
                    span.name,
                    context=_span_context(span.context),
                    parent=parent,
                    resource=self._resource,
                    attributes=dict(span.attributes),
                    kind=SpanKind[span.kind],
                    status=status,
                    start_time=offset_ns + int(span.start_s * 1e9),
                    end_time=offset_ns + int(span.end_s * 1e9),
                    instrumentation_scope=self._scope,
                )
            )

    def close(self) -> None:
        """Sends the queued spans, for at most CLOSE_TIMEOUT_S."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def create_tracer(options: TelemetryOptions, service: str) -> Tracer | None:
    """Returns the tracer that the options or the variables OTEL_* describe.

    The result is None if no collector is configured, or if a variable disables traces.
    If only OTEL_* variables name the collector, a problem is logged as a warning, and
    the result is None.

    Args:
        service: The service's name, unless OTEL_SERVICE_NAME is set.

    Raises:
        ValueError: --otlp-traces-endpoint is given, and traces cannot be sent: packages
            are missing, or a variable sets a protocol other than http/protobuf.
    """
    option = options.otlp_traces_endpoint
    if option is None and not any(map(os.environ.get, _ENDPOINT_VARIABLES)):
        return None
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        logger.info("no traces: OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER is set")
        return None
    problem = ""
    if find_spec("opentelemetry") is None or not _has_exporter():
        problem = f"traces need packages that are not installed: {_INSTALL}"
    otlp_protocol = next(filter(None, map(os.environ.get, _PROTOCOL_VARIABLES)), None)
    if otlp_protocol not in (None, _HTTP_PROTOCOL):
        problem = (
            f"traces are sent by {_HTTP_PROTOCOL}, not by {otlp_protocol}: change "
            "OTEL_EXPORTER_OTLP_PROTOCOL, and use the collector's port for HTTP (4318)"
        )
    if problem and option is not None:
        raise ValueError(f"--otlp-traces-endpoint: {problem}")
    if problem:
        # The variables may be meant for other programs on this machine.
        logger.warning("OTEL_* variables name a collector, but %s", problem)
        return None
    if option is not None and urlsplit(option).path in ("", "/"):
        option = option.rstrip("/") + _TRACES_PATH
    return Tracer(option, service)


def _has_exporter() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def _span_context(context: TraceContext, *, is_remote: bool = False) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    return SpanContext(
        context.trace_id,
        context.span_id,
        is_remote=is_remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.is_sampled else 0),
        trace_state=TraceState.from_header([context.state]) if context.state else None,
    )


class _WatchedExporter:
    """A SpanExporter that warns once when exports begin to fail, and reports when they
    succeed again.
    """

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self._is_failing = False

    def export(self, spans: Any) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            result = self._exporter.export(spans)
        except Exception as error:
            result = SpanExportResult.FAILURE
            logger.debug("sending spans raised %r", error)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            logger.warning(
                "The collector of traces does not accept spans; they are dropped until "
                "it does, and requests are not affected. Check --otlp-traces-endpoint "
                "or OTEL_EXPORTER_OTLP_ENDPOINT."
            )
        elif self._is_failing and not is_failing:
            logger.info("the collector of traces accepts spans again")
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
