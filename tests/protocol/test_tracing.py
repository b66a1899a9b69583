"""Trace contexts of requests, sampling, and the errors of a wrong configuration."""

import pytest

from protocol.settings.server_options import TelemetryOptions
from protocol.settings.settings import ConfigError, DecodeSettings, load
from protocol.telemetry import tracer as tracer_module
from protocol.telemetry.trace_context import context_from
from protocol.telemetry.tracer import Span, Tracer, create_tracer
from tests.rigs.cluster import wait_until
from tests.rigs.collector import Collector

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


def headers(traceparent: str, state: str = "a=b") -> list[tuple[bytes, bytes]]:
    pairs = {"traceparent": traceparent, "tracestate": state}
    return [(name.encode(), text.encode()) for name, text in pairs.items()]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("SERVICE_NAME", "TRACES_SAMPLER", "EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


@pytest.mark.parametrize("flags", ["01", "00", "03"])
def test_context_is_passed_on_with_its_flags_and_state(flags):
    context = context_from(headers(f"00-{TRACE}-{SPAN}-{flags}"))
    assert context is not None and context.is_sampled is (flags != "00")
    child = context.child()
    (_, traceparent), (_, state) = child.headers()
    sampled = "00" if flags == "00" else "01"
    assert traceparent.decode() == f"00-{TRACE}-{child.span_id:016x}-{sampled}"
    assert state == b"a=b" and child.span_id != context.span_id


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
    ],
)
def test_invalid_traceparent_begins_a_new_trace(traceparent):
    assert context_from(headers(traceparent)) is None


def test_later_version_of_traceparent_is_read():
    context = context_from(headers(f"01-{TRACE}-{SPAN}-01-more", state="x" * 513))
    assert context is not None and context.trace_id_text == TRACE
    assert context.state == "", "a tracestate that is too long is dropped"


@pytest.mark.parametrize(
    ("sampler", "flags", "is_sampled"),
    [
        (None, None, True),
        (None, "00", False),
        ("always_off", "01", False),
        ("parentbased_always_off", None, False),
        ("parentbased_always_off", "01", True),
    ],
)
def test_sampler_of_the_environment_decides(sampler, flags, is_sampled, monkeypatch):
    if sampler is not None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    tracer = Tracer("http://127.0.0.1:9/v1/traces", "baton-test")
    parent_headers = headers(f"00-{TRACE}-{SPAN}-{flags}") if flags else []
    context, parent = tracer.start(parent_headers, "name")
    assert context.is_sampled is is_sampled
    assert (parent is not None) is (flags is not None)
    assert (context.trace_id_text == TRACE) is (flags is not None)
    tracer.close()


def test_spans_reach_the_collector_when_the_process_ends():
    collector = Collector()
    options = TelemetryOptions(otlp_traces_endpoint=collector.url)
    tracer = create_tracer(options, "baton-test")
    assert tracer is not None
    context, parent = tracer.start([], "request")
    tracer.send([Span("request", context, parent, 1.0, 2.5, error="status 500")])
    tracer.close()
    wait_until(lambda: len(collector.spans) == 1)
    ((service, span),) = collector.spans
    assert service == "baton-test" and span.name == "request"
    assert span.end_time_unix_nano - span.start_time_unix_nano == 1_500_000_000
    assert (span.status.code, span.status.message) == (2, "status 500")
    collector.close()


def test_no_traces_unless_an_option_or_a_variable_names_a_collector(monkeypatch):
    assert create_tracer(TelemetryOptions(), "x") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracer = create_tracer(TelemetryOptions(), "x")
    assert tracer is not None
    tracer.close()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert create_tracer(TelemetryOptions(), "x") is None


@pytest.mark.parametrize("url", ["collector:4318", "grpc://a:4317", "http://"])
def test_endpoint_that_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint.*http://collector"):
        load(DecodeSettings, [f"--otlp-traces-endpoint={url}"])


def test_missing_packages_are_named_for_the_option_only(monkeypatch, caplog):
    monkeypatch.setattr(tracer_module, "_has_exporter", lambda: False)
    options = TelemetryOptions(otlp_traces_endpoint="http://a:1")
    with pytest.raises(ValueError, match=r"pip install 'baton-pd\[otel\]'"):
        create_tracer(options, "x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert create_tracer(TelemetryOptions(), "x") is None
    assert "baton-pd[otel]" in caplog.text


def test_unsupported_protocol_is_named(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    options = TelemetryOptions(otlp_traces_endpoint="http://a:4317")
    with pytest.raises(ValueError, match="4318"):
        create_tracer(options, "x")
