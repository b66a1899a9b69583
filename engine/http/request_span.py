"""The trace spans of one request at a server: one for the request, one for each phase.

The engine reports the times of the phases when the request ends.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protocol.process.logging import current_request_id
from protocol.server_stats import RequestReport
from protocol.telemetry.trace_context import TraceContext
from protocol.telemetry.tracer import Span, Tracer, Value

_FAILED_OUTCOMES = ("error", "rejected")


@dataclass(frozen=True)
class RequestSpan:
    """The span of a request in this server.

    Attributes:
        name: the server's role and the endpoint.
        parent: the caller's span; None if the request has no `traceparent`.
    """

    tracer: Tracer
    name: str
    model_name: str
    context: TraceContext
    parent: TraceContext | None

    @classmethod
    def start(
        cls,
        tracer: Tracer | None,
        name: str,
        model_name: str,
        headers: Iterable[tuple[bytes, bytes]],
    ) -> "RequestSpan | None":
        """Return the span of a request that has arrived; None if it is not sampled.

        Args:
            tracer: None if tracing is off.
            headers: the headers of the request.
        """
        if tracer is None:
            return None
        context, parent = tracer.start(headers, name)
        if not context.is_sampled:
            return None
        return cls(tracer, name, model_name, context, parent)

    @property
    def trace_id(self) -> str:
        return self.context.trace_id_text

    def end(self, report: RequestReport, start_s: float) -> None:
        """Send the spans of the request and of its phases.

        Args:
            report: the outcome, the tokens and the times of the request.
            start_s: when the request arrived, in monotonic seconds.
        """
        self.tracer.send(self._spans(report, start_s))

    def _spans(self, report: RequestReport, start_s: float) -> Iterator[Span]:
        attributes: dict[str, Value] = {
            "gen_ai.request.model": self.model_name,
            "gen_ai.usage.input_tokens": report.prompt_tokens,
            "gen_ai.usage.output_tokens": report.generated,
            "gen_ai.response.finish_reasons": report.outcome,
            "baton.request_id": current_request_id() or "",
            "baton.kv.cached": report.cached_tokens,
        }
        for source, count in report.kv.items():
            attributes[f"baton.kv.{source}"] = count
        error = ""
        if report.outcome in _FAILED_OUTCOMES:
            error = report.error or report.outcome
        yield Span(
            self.name,
            self.context,
            self.parent,
            start_s,
            start_s + report.times["end"],
            kind="SERVER",
            attributes=attributes,
            error=error,
        )
        for phase, (begin_s, end_s) in report.phases().items():
            yield Span(
                phase,
                self.context.child(),
                self.context,
                start_s + begin_s,
                start_s + end_s,
            )
