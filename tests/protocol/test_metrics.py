"""The table of metrics, and the registry that exposes them."""

import os
import tomllib
from pathlib import Path

import pytest

from protocol.metrics import SPECS, TABLE, EngineHistogram, Metrics, stat_key
from protocol.process import output
from protocol.process.output import OutputQueue
from protocol.version import VERSION, system_fingerprint
from tests.rigs.metric import metric


def test_table_has_one_row_per_name_in_prometheus_style():
    assert len(SPECS) == len(TABLE)
    for spec in TABLE:
        assert spec.name.startswith("baton_") and not spec.name.endswith("_total")
        assert spec.help.endswith(".")
        if spec.kind == "histogram":
            assert list(spec.buckets) == sorted(spec.buckets)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("baton_nothing", {}),
        ("baton_kv_blocks", {}),
        ("baton_engine_steps", {"state": "free"}),
    ],
)
def test_unknown_metric_name_or_label_raises(name, labels):
    with pytest.raises(KeyError):
        stat_key(name, **labels)


def test_newest_values_of_the_engine_are_exposed_and_missing_values_stay():
    metrics = Metrics("server")
    granted = stat_key("baton_leases", event="granted")
    metrics.update_engine({"baton_requests_running": 3, granted: 1})
    metrics.update_engine({"baton_requests_running": 2})
    text = metrics.expose()[0].decode()
    assert "baton_requests_running 2.0" in text
    assert 'baton_leases_total{event="granted"} 1.0' in text
    assert "# TYPE baton_leases_total counter" in text


def test_engine_histogram_counts_values_up_to_each_bound():
    histogram = EngineHistogram("baton_kv_transfer_seconds")
    metrics = Metrics("server")
    for seconds in (0.0001, 0.001, 0.0011, 99.0):
        histogram.observe(seconds)
        metrics.update_engine(histogram.values())
    lines = metrics.expose()[0].decode().splitlines()
    assert "# TYPE baton_kv_transfer_seconds histogram" in lines
    samples = {}
    for line in lines:
        if line.startswith("baton_kv_transfer_seconds"):
            series, value = line.rsplit(" ", 1)
            samples[series.removeprefix("baton_kv_transfer_seconds_")] = float(value)
    bounds = [*SPECS["baton_kv_transfer_seconds"].buckets, float("inf")]
    counts = [samples.pop(f'bucket{{le="{b if b < 1e9 else "+Inf"}"}}') for b in bounds]
    assert counts == [1, 1, 2] + [3] * (len(bounds) - 4) + [4]
    assert samples == {"count": 4, "sum": pytest.approx(99.0022)}


@pytest.mark.parametrize("origin", ["server", "proxy"])
def test_every_process_exposes_version_and_memory_but_no_creation_times(origin):
    text = Metrics(origin).expose()[0].decode()
    assert f'baton_build_info{{version="{VERSION}"}}' in text
    assert "\nprocess_resident_memory_bytes " in text
    assert "_created" not in text


def test_label_order_does_not_matter_and_wrong_labels_are_refused():
    metrics = Metrics("proxy")
    metrics.inc("baton_proxy_requests", path="pd", reason="routed")
    metrics.inc("baton_proxy_requests", 2, reason="routed", path="pd")
    assert metric(metrics, "baton_proxy_requests", path="pd", reason="routed") == 3
    with pytest.raises(ValueError, match="label"):
        metrics.inc("baton_proxy_requests", path="pd")
    with pytest.raises(KeyError):
        metrics.inc("baton_prompt_tokens")  # a proxy has no such metric


def test_package_takes_this_version_and_fingerprint_depends_on_the_model():
    pyproject = tomllib.loads(
        (Path(__file__).parents[2] / "pyproject.toml").read_text()
    )
    assert pyproject["project"]["dynamic"] == ["version"]
    version = pyproject["tool"]["setuptools"]["dynamic"]["version"]
    assert version == {"attr": "protocol.version.VERSION"}
    assert system_fingerprint("a") == system_fingerprint("a") != system_fingerprint("b")


def test_metric_counts_dropped_lines_of_output(monkeypatch):
    reader, writer = os.pipe()
    queue = OutputQueue(writer, str, max_queued_bytes=1000)
    monkeypatch.setattr(output, "_queues", [queue])
    for _ in range(2000):
        queue.put(b"x" * 99 + b"\n")
    text = Metrics("proxy").expose()[0].decode()
    os.close(reader)
    assert queue.num_dropped > 0
    assert f"baton_log_lines_dropped_total {float(queue.num_dropped)}" in text
