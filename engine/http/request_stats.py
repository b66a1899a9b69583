"""Records metrics of each request, and logs a line when the request ends."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

from engine.http.request_span import RequestSpan
from protocol.errors import BatonError, InvalidRequest, RequestError
from protocol.http.access import grant_of, share_of
from protocol.http.bodies import ClientDisconnected
from protocol.messages import CACHE_MISS
from protocol.metrics import Metrics
from protocol.openai.responses import Usage, kv_header
from protocol.process.logging import current_request_id, get_logger, trace_extra
from protocol.server_stats import (
    MAX_ID_CHARS,
    REPORT_HEADER,
    FinishedRequest,
    PhaseTimes,
    ServerStats,
    phases_text,
)
from protocol.settings.server_options import TelemetryOptions
from protocol.short_repr import short_repr
from protocol.telemetry.tracer import create_tracer

log = get_logger(__name__)

_OUTCOMES = (
    "stop",
    "length",
    "tool_calls",
    CACHE_MISS,
    "abort",
    "rejected",
    "error",
    "moved",
)
_COMPLETE_OUTCOMES = ("stop", "length", "tool_calls")
# Phases with a histogram. baton_kv_transfer_seconds measures transfers instead.
_MEASURED_PHASES = {"queue", "prefill", "decode"}
MAX_RECENT = 256  # maximum number of ended requests that GET /stats reports
# GET /stats reports the engine's metrics with these prefixes.
_ENGINE_METRIC_PREFIXES = (
    "baton_requests_",
    "baton_kv_blocks{",
    "baton_kv_transfer_bytes",
    "baton_engine_",
)
# The metrics of the HTTP process that GET /stats reports.
_REPORTED_METRICS = (
    "baton_requests_in_progress",
    "baton_generation_tokens",
    "baton_cached_prompt_tokens",
    "baton_kv_tokens",
    "baton_inter_token_seconds",
)


class ServerMetrics(Metrics):
    """The metrics of a server's HTTP process, and its last MAX_RECENT ended requests.

    All time series of requests exist from the start. Otherwise Prometheus's `rate`
    would miss the first event of each series.

    Args:
        endpoints: the values of the label `endpoint`.
        model_name: the value of the label `model_name`.
        role: the server's role.
        options: set the names of metrics, and the destination of traces.

    Attributes:
        tracer: sends the spans of requests; None if tracing is off.
        num_ended: how many requests have ended since the start.
    """

    def __init__(
        self,
        endpoints: Iterable[str],
        model_name: str,
        role: str,
        options: TelemetryOptions,
    ) -> None:
        super().__init__("server", model_name, options.metric_aliases)
        self.role = role
        self.tracer = create_tracer(options, f"baton-{role}")
        self._recent: deque[FinishedRequest] = deque(maxlen=MAX_RECENT)
        self.num_ended = 0
        for endpoint, outcome in product(endpoints, _OUTCOMES):
            self.expose_series("baton_requests", endpoint=endpoint, outcome=outcome)
        for source in Usage().baton_kv():
            self.expose_series("baton_kv_tokens", source=source)

    def add_ended(self, request: FinishedRequest, trace_id: str | None = None) -> None:
        """Store the report on a request that has ended, and count it.

        Args:
            trace_id: the trace with the request's spans; None if there is no trace.
        """
        self._recent.append(request)
        self.num_ended += 1
        self.inc("baton_requests_in_progress", -1)
        self.inc("baton_requests", endpoint=request.endpoint, outcome=request.outcome)
        for source, count in request.kv.items():
            self.inc("baton_kv_tokens", count, source=source)
        self.inc("baton_cached_prompt_tokens", request.cached_tokens)
        if "first" in request.times:
            self.observe(
                "baton_request_seconds", request.times["end"], trace_id=trace_id
            )
        phases = request.phases()
        for name in _MEASURED_PHASES & phases.keys():
            start_s, end_s = phases[name]
            self.observe(
                f"baton_request_{name}_seconds", end_s - start_s, trace_id=trace_id
            )
        if request.outcome in _COMPLETE_OUTCOMES:
            self.observe("baton_request_prompt_tokens", request.prompt_tokens)
            self.observe("baton_request_generation_tokens", request.generated)

    def stats_report(
        self, since: str, server: dict[str, Any], engine_values: dict[str, float]
    ) -> ServerStats:
        """Return the response to GET /stats.

        Args:
            since: the sequence number of the first request to report. A number above
                `num_ended` dates from before a restart of the server. In that case, all
                recent requests are reported.
            server: the server's description.
            engine_values: the engine's metrics.

        Raises:
            InvalidRequest: `since` is not a number.
        """
        if not since.isdecimal():
            raise InvalidRequest(
                f"since is {short_repr(since)}; set it to the `next` of the previous "
                "response, or to 0",
                param="since",
            )
        number = int(since[:18])
        start = 0 if number > self.num_ended else number
        reported = [request for request in self._recent if request.number >= start]
        values = {
            name: value
            for name, value in engine_values.items()
            if name.startswith(_ENGINE_METRIC_PREFIXES)
        }
        values |= self.values(*_REPORTED_METRICS)
        return ServerStats(server, values, reported, self.num_ended)


class RequestStats:
    """Records one request's metrics, and logs a line when the request ends.

    The constructor counts the request as in progress. The log line has the name of the
    API key in the request's ASGI `scope`.

    Attributes:
        share: identifies the client's API key to the engine; see AddRequest.share.
        report: the report on the request; None until the request has ended.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        endpoint: str,
        scope: Mapping[str, Any],
    ) -> None:
        self._metrics = metrics
        self._span = RequestSpan.start(
            metrics.tracer,
            f"{metrics.role} {endpoint}",
            metrics.model_name or "",
            scope["headers"],
        )
        self._trace_id = self._span.trace_id if self._span else None
        self._key_name = grant_of(scope).name
        self.share = share_of(scope)
        self._endpoint = endpoint
        self._start_s = time.monotonic()
        self._times: dict[str, float] = {}  # will become FinishedRequest.times
        self._last_token_s: float | None = None
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self.report: FinishedRequest | None = None
        self._end_callbacks: list[Callable[[], None]] = []
        metrics.inc("baton_requests_in_progress")

    def mark_accepted(self, num_prompt_tokens: int) -> None:
        """Record that the request was tokenized and sent to the engine."""
        self._times["accepted"] = time.monotonic() - self._start_s
        self._num_prompt_tokens = num_prompt_tokens
        self._metrics.inc("baton_prompt_tokens", num_prompt_tokens)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Register a callback, which is called once when the request ends."""
        self._end_callbacks.append(callback)

    def add_tokens(self, count: int) -> None:
        """Count generated tokens, and measure the time since the previous tokens."""
        now = time.monotonic()
        self._num_generated_tokens += count
        self._metrics.inc("baton_generation_tokens", count)
        if self._last_token_s is None:
            first_s = now - self._start_s
            self._times["first"] = first_s
            self._metrics.observe(
                "baton_time_to_first_token_seconds", first_s, trace_id=self._trace_id
            )
        else:
            self._metrics.observe("baton_inter_token_seconds", now - self._last_token_s)
        self._last_token_s = now

    def report_headers(self) -> dict[str, str]:
        """Return the header with the report on a request that has ended."""
        if self.report is None:
            return {}
        return {REPORT_HEADER: self.report.encode().decode()}

    def mark_finished(
        self, usage: Usage, finish_reason: str, times: PhaseTimes | None = None
    ) -> None:
        """Record that the request has a complete response.

        Args:
            times: when the phases of the request ended in the engine.
        """
        detail = (
            f"generated={usage.completion_tokens} kv={kv_header(usage)} "
            f"cached={usage.kv.cached_tokens}"
        )
        self._end(finish_reason, detail, times, usage)

    def mark_migrated(self) -> None:
        """Record that the request continues at another server."""
        self._end("moved", "migrated to another server")

    def mark_failed(self, error: BaseException) -> None:
        """Record that `error` ended the request, if the request has not ended yet."""
        if isinstance(error, BatonError):
            outcome = "rejected" if isinstance(error, RequestError) else "error"
            # The message of an InvalidRequest quotes the client's text, which must not
            # be logged. The name of the wrong field is logged instead.
            cause = error.message
            if type(error) is InvalidRequest:
                cause = error.param or "body"
            detail = f"status={error.status} error={error.code}: {cause}"
            self._end(outcome, detail, error=error.code)
        elif isinstance(error, ClientDisconnected | asyncio.CancelledError):
            self._end("abort", "client disconnected")
        else:
            self._end("error", f"error={error!r}")

    def _end(
        self,
        outcome: str,
        detail: str,
        times: PhaseTimes | None = None,
        usage: Usage | None = None,
        error: str | None = None,
    ) -> None:
        """Run the callbacks, record the metrics and log the end of the request.

        Only the first call has an effect.
        """
        if self.report is not None:
            return
        phase_times = {name: round(at, 6) for name, at in self._times.items()}
        phase_times["end"] = round(time.monotonic() - self._start_s, 6)
        if times:
            phase_times |= times.since(self._start_s)
        self.report = FinishedRequest(
            number=self._metrics.num_ended,
            id=(current_request_id() or "")[:MAX_ID_CHARS],
            endpoint=self._endpoint,
            outcome=outcome,
            error=error,
            times=phase_times,
            prompt_tokens=self._num_prompt_tokens,
            generated=self._num_generated_tokens,
            cached_tokens=usage.kv.cached_tokens if usage else 0,
            kv=usage.baton_kv() if usage else {},
        )
        for callback in self._end_callbacks:
            callback()
        self._metrics.add_ended(self.report, self._trace_id)
        self._log(self.report, detail)
        if self._span is not None:
            self._span.end(self.report, self._start_s)

    def _log(self, report: FinishedRequest, detail: str) -> None:
        first_s = report.times.get("first")
        phases = report.phases()
        log.info(
            "%s %s key=%s prompt=%d first_ms=%s total_ms=%.1f %s%s",
            self._endpoint,
            report.outcome,
            self._key_name,
            report.prompt_tokens,
            "-" if first_s is None else f"{first_s * 1000:.1f}",
            report.times["end"] * 1000,
            detail,
            f" {phases_text(phases)}" if phases else "",
            extra=trace_extra(self._trace_id),
        )
