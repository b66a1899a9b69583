"""Spans, log line and exemplars of a request through a prefill and a decode server."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.rigs.cluster import Cluster, cluster, running, start_proxy, wait_until
from tests.rigs.collector import Collector
from tests.rigs.plain_http import http
from tests.rigs.programs import BATON, launched

PROMPT = "The prefill server computes this prompt, and the decode server pulls it."
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
OPEN_METRICS = {"accept": "application/openmetrics-text; version=1.0.0"}
BODY = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def traced(tiny_model: Path, collector: Collector) -> Iterator[Cluster]:
    """A cluster that sends traces. The proxy is configured by an option, and the
    servers by OTEL_* variables.
    """
    options = ["--otlp-traces-endpoint", collector.url, "--log-format", "json"]
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with cluster(
            tiny_model,
            prefill_argv=("--log-format", "json"),
            decode_argv=("--log-format", "json"),
            env=env,
        ) as untraced:
            proxy = start_proxy(untraced.prefill, untraced.decode, *options)
            with running(proxy):
                yield Cluster(untraced.prefill, untraced.decode, proxy, tiny_model)


def complete(cluster: Cluster, flags: str, stream: bool) -> str:
    """Send a request with a traceparent of the client; return its id."""
    request_id = f"request-{flags}-{stream}-{time.monotonic_ns()}"
    headers = {
        "traceparent": f"00-{TRACE_ID}-{PARENT}-{flags}",
        "x-request-id": request_id,
    }
    url = f"{cluster.url}/v1/completions"
    answer = http.post(
        url,
        json={**BODY, "prompt": f"{request_id} {PROMPT}", "stream": stream},
        headers=headers,
        timeout=60,
    )
    assert answer.status_code == 200
    assert "x-baton-report" not in answer.headers and ":baton" not in answer.text
    return request_id


def tree(spans: list[tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    """Return (name of the parent span, span) for each span. The key is the service and
    name of the span.
    """
    names = {span.span_id.hex(): f"{service} {span.name}" for service, span in spans}
    return {
        names[span.span_id.hex()]: (
            names.get(span.parent_span_id.hex(), "client"),
            span,
        )
        for _, span in spans
    }


@pytest.mark.parametrize("stream", [False, True])
def test_spans_of_all_processes_are_one_tree_below_the_client(
    traced, collector, stream
):
    collector.spans.clear()
    request_id = complete(traced, "01", stream)
    wait_until(lambda: len(collector.spans) >= 10)
    spans = tree(collector.spans)
    assert {span.trace_id.hex() for _, span in spans.values()} == {TRACE_ID}
    root = "baton-proxy POST /v1/completions"
    assert spans[root][1].parent_span_id.hex() == PARENT
    prefill = "baton-prefill prefill completions"
    decode = "baton-decode decode completions"
    assert {name: parent for name, (parent, _) in spans.items()} == {
        root: "client",
        "baton-proxy prefill leg": root,
        "baton-proxy decode leg": root,
        prefill: "baton-proxy prefill leg",
        "baton-prefill queue": prefill,
        "baton-prefill prefill": prefill,
        decode: "baton-proxy decode leg",
        "baton-decode queue": decode,
        "baton-decode transfer": decode,
        "baton-decode fence": decode,
        "baton-decode decode": decode,
    }
    ordered = [
        spans[name][1].start_time_unix_nano
        for name in (
            root,
            "baton-proxy prefill leg",
            prefill,
            "baton-prefill queue",
            "baton-prefill prefill",
            "baton-decode transfer",
            "baton-decode fence",
            "baton-decode decode",
        )
    ]
    assert ordered == sorted(ordered)
    margin_ns = 2_000_000  # tolerance, because each process reads its own clock
    for parent, span in spans.values():
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if parent != "client":
            outer = spans[parent][1]
            assert outer.start_time_unix_nano <= span.start_time_unix_nano + margin_ns
            assert span.end_time_unix_nano <= outer.end_time_unix_nano + margin_ns
    attributes = {a.key: a.value for a in spans[decode][1].attributes}
    assert attributes["baton.request_id"].string_value == request_id
    assert attributes["baton.kv.transferred"].int_value > 0
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    check_lines(traced, request_id)


def check_lines(traced: Cluster, request_id: str) -> None:
    """Check the proxy's log line of a request. All log lines must be JSON objects."""
    lines = [
        json.loads(line) for server in traced.servers() for line in server.child.tail
    ]
    (line,) = [
        each["message"]
        for each in lines
        if each.get("request_id") == request_id and each["part"] == "proxy"
    ]
    for pattern in (
        r"status=200 model=test-model key=- prefill=prefill-0\(http://\S+\) "
        r"decode=decode-0\(http://\S+\) decode_only=- outcome=length",
        r"generated=4 kv=transferred=\d+,recomputed=0,skipped=0,cached=0 ",
        r"queue_ms=[\d.]+ transfer_ms=[\d.]+ fence_ms=[\d.]+ prefill_ms=[\d.]+ "
        r"decode_ms=[\d.]+ prefill_leg_ms=[\d.]+ first_byte_ms=[\d.]+ total_ms=[\d.]+",
    ):
        assert re.search(pattern, line), line
    traces = {each.get("trace_id") for each in lines if each["level"] == "INFO"}
    assert TRACE_ID in traces


def test_histograms_have_exemplars_with_the_trace(traced):
    complete(traced, "01", True)
    for server, name in (
        (traced.proxy, "baton_proxy_first_byte_seconds"),
        (traced.prefill[0], "baton_request_prefill_seconds"),
        (traced.decode[0], "baton_request_decode_seconds"),
        (traced.decode[0], "baton_time_to_first_token_seconds"),
    ):
        text = http.get(f"{server.url}/metrics", headers=OPEN_METRICS, timeout=10).text
        traces = {
            sample.exemplar.labels["trace_id"]
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if family.name == name and sample.exemplar
        }
        assert traces == {TRACE_ID}, name


def test_trace_that_the_client_does_not_sample_has_no_spans(traced, collector):
    unsampled = complete(traced, "00", False)
    sampled = complete(traced, "01", False)
    # The sampled request is sent last. When its spans have arrived, any spans of the
    # unsampled request would have arrived, too.
    wait_until(lambda: len(spans_of(collector, sampled)) >= 2)
    assert spans_of(collector, unsampled) == []


def spans_of(collector, request_id):
    """Return the spans that name a request."""
    return [
        span
        for _, span in list(collector.spans)
        for attribute in span.attributes
        if attribute.key == "baton.request_id"
        and attribute.value.string_value == request_id
    ]


def test_dead_collector_changes_nothing_but_one_warning(tiny_model):
    """The cluster starts, serves and ends in time. Every log line is a JSON object."""
    dead = Collector()
    dead.close()
    argv = [*BATON, "up", "--model", str(tiny_model), "--device", "cpu", "--port", "0"]
    argv += ["--log-format", "json", "--otlp-traces-endpoint", dead.url]
    with launched(argv) as program:
        ready = json.loads(program.read_until("ready http://"))
        url = re.search(r"http://[^/]+", ready["message"])
        assert url is not None
        for _ in range(3):
            answer = http.post(f"{url[0]}/v1/completions", json=BODY, timeout=60)
            assert answer.status_code == 200
        for part in ("proxy", "prefill", "decode"):
            while not any(warns(line, part) for line in program.lines):
                program.read_until("WARNING")
        started = time.monotonic()
        program.stop()
        assert time.monotonic() - started < 30
    lines = [json.loads(line) for line in program.lines]
    for part in ("proxy", "prefill", "decode"):
        assert sum(warns(line, part) for line in program.lines) == 1
    assert {"prefill-0", "decode-0", "proxy"} <= {each.get("process") for each in lines}
    assert all({"time", "level", "part", "logger", "message"} <= set(e) for e in lines)


def warns(line: str, part: str) -> bool:
    members = json.loads(line)
    return members["part"] == part and "collector of traces" in members["message"]
