"""Records how the proxy served a request, for logs, spans, metrics and the page."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from protocol.server_stats import REPORT_HEADER, RequestReport, phases_text
from protocol.telemetry.trace_context import TraceContext
from protocol.telemetry.tracer import Span, Value
from proxy.upstream import Headers

_REPORT_HEADER = REPORT_HEADER.encode()
_decode_report = msgspec.json.Decoder(RequestReport).decode
# If there is a prefill leg, the log line takes these phases from its server's report.
_PROMPT_PHASES = ("queue", "prefill")


@dataclass(eq=False)
class Attempt:
    """One leg that was sent to a server.

    Attributes:
        kind: "prefill" or "decode".
        start_s: seconds from the trace's `started_at` until the leg was sent.
        context: the leg's span; None if the request is not traced.
        end_s: seconds from `started_at` until the leg ended; None while it runs.
        failure: how the leg failed; empty if it did not.
    """

    server: str
    kind: str
    start_s: float
    context: TraceContext | None = None
    end_s: float | None = None
    failure: str = ""


@dataclass
class RequestTrace:
    """The record of one request.

    Attributes:
        prefill, decode: URLs of the last prefill and decode server; "-" if none.
        decode_only: why a decode server served the request alone; "-" otherwise.
        model: the requested model; "-" if the request was refused before its model was
            known.
        received_at: when the head of the request had arrived, in monotonic seconds.
        started_at: when the request had been read completely, in monotonic seconds.
        prefill_s: seconds from `started_at` until the prefill server had answered.
        legs: for each leg, the server's name and the seconds from `started_at` until
            the leg was sent.
        attempts: one Attempt for each item of `legs`, in the same order.
        num_lost: number of decode servers that failed while they had the request.
        num_moved: how often a decode server handed the request over.
        first_byte_s: seconds from `started_at` until the first byte of the answer.
        reports: the servers' reports about the request, by the kind of the leg.
        context: the request's span; None if the request is not traced.
        parent: the caller's span; None if there is none.
    """

    prefill: str = "-"
    decode: str = "-"
    decode_only: str = "-"
    model: str = "-"
    received_at: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.monotonic)
    prefill_s: float | None = None
    legs: list[tuple[str, float]] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    num_lost: int = 0
    num_moved: int = 0
    first_byte_s: float | None = None
    reports: dict[str, RequestReport] = field(default_factory=dict)
    context: TraceContext | None = None
    parent: TraceContext | None = None

    def begin(self) -> None:
        """Set `started_at` to now. Call this when the request was read completely."""
        self.started_at = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    def on_bytes(self) -> None:
        """Record that bytes of the answer arrived; set `first_byte_s` if unset."""
        if self.first_byte_s is None:
            self.first_byte_s = self.elapsed_s()

    @property
    def stored_trace_id(self) -> str | None:
        """The id of the request's trace; None if its spans are not stored."""
        if self.context is None or not self.context.is_sampled:
            return None
        return self.context.trace_id_text

    # legs

    def add_attempt(self, server: str, kind: str) -> Attempt:
        """Record that a leg is sent to a server."""
        start_s = self.elapsed_s()
        self.legs.append((server, start_s))
        context = self.context.child() if self.context else None
        attempt = Attempt(server, kind, start_s, context)
        self.attempts.append(attempt)
        return attempt

    def end_attempt(self, attempt: Attempt, failure: str = "") -> None:
        """Record the end of a leg. Only the first call has an effect."""
        if attempt.end_s is None:
            attempt.end_s = self.elapsed_s()
            attempt.failure = failure

    def read_report(self, kind: str, headers: Headers) -> None:
        """Store the report in the headers of a server's response, if there is one."""
        for name, value in headers:
            if name == _REPORT_HEADER:
                self.add_report(kind, value)

    def add_report(self, kind: str, text: bytes) -> None:
        """Store a server's report. A malformed report is dropped."""
        try:
            self.reports[kind] = _decode_report(text)
        except msgspec.MsgspecError:
            return

    # the end

    def summary(self) -> str:
        """Return the part of the log line about servers, tokens and phases."""
        prefill = self.reports.get("prefill")
        decode = self.reports.get("decode")
        report = decode or prefill
        phases = decode.phases() if decode else {}
        if prefill is not None:
            prompt_phases = prefill.phases()
            for name in _PROMPT_PHASES:
                if name in prompt_phases:
                    phases[name] = prompt_phases[name]
        outcome = prompt = generated = kv = "-"
        if report is not None:
            outcome = report.outcome
            prompt = str(report.prompt_tokens)
            generated = str(report.generated)
            counts = [*report.kv.items(), ("cached", report.cached_tokens)]
            kv = ",".join(f"{name}={count}" for name, count in counts)
        return (
            f"prefill={self._server('prefill', self.prefill)} "
            f"decode={self._server('decode', self.decode)} "
            f"decode_only={self.decode_only} outcome={outcome} prompt={prompt} "
            f"generated={generated} kv={kv} {phases_text(phases)}"
        )

    def _server(self, kind: str, url: str) -> str:
        """Return the name and the URL of the last server of a kind; "-" if none."""
        names = [each.server for each in self.attempts if each.kind == kind]
        return f"{names[-1]}({url})" if names and url != "-" else url

    def spans(self, name: str, end_s: float, error: str) -> Iterator[Span]:
        """Yield the spans of a traced request and of its legs.

        Args:
            name: the name of the request's span.
            end_s: seconds from `started_at` to the end of the request.
            error: why the request failed; empty if it did not.
        """
        assert self.context is not None
        attributes: dict[str, Value] = {"gen_ai.request.model": self.model}
        if self.first_byte_s is not None:
            attributes["baton.first_byte_s"] = round(self.first_byte_s, 6)
        yield Span(
            name,
            self.context,
            self.parent,
            self.received_at,
            self.started_at + end_s,
            kind="SERVER",
            attributes=attributes,
            error=error,
        )
        for attempt in self.attempts:
            assert attempt.context is not None
            attempt_end_s = end_s if attempt.end_s is None else attempt.end_s
            yield Span(
                f"{attempt.kind} leg",
                attempt.context,
                self.context,
                self.started_at + attempt.start_s,
                self.started_at + max(attempt.start_s, attempt_end_s),
                kind="CLIENT",
                attributes={"baton.server": attempt.server},
                error=attempt.failure,
            )
