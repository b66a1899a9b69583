"""The text that scrapers get: labels, OpenMetrics with exemplars, and vLLM's names."""

import shutil
import subprocess

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from protocol.metrics import EngineHistogram, Metrics, stat_key
from protocol.telemetry.kv_usage import kv_usage
from protocol.telemetry.vllm_names import PROXY_ALIASES, SERVER_ALIASES

OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# Accept headers that Prometheus 2.42 and 3.0 send.
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,*/*;q=0.2"
)
# Names and types that other programs read, with the source of each.
NAMES_OF_VLLM = {
    # gateway-api-inference-extension and llm-d: --total-queued-requests-metric,
    # --total-running-requests-metric, --kv-cache-usage-percentage-metric and
    # --cache-info-metric of the endpoint picker.
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    # production-stack's router and HPA, which were written for older versions of vLLM.
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:gpu_prefix_cache_queries": "counter",
    "vllm:gpu_prefix_cache_hits": "counter",
    "vllm:time_per_output_token_seconds": "histogram",
    # vLLM's examples/online_serving/prometheus_grafana/grafana.json, and
    # vllm/v1/metrics/loggers.py.
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    # vllm/v1/spec_decode/metrics.py.
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
}


def accepted_lengths(*lengths: int) -> dict[str, float]:
    histogram = EngineHistogram("baton_speculative_accepted_length")
    for length in lengths:
        histogram.observe(length)
    return histogram.values()


ENGINE_VALUES = {
    "baton_requests_running": 3.0,
    "baton_requests_waiting": 2.0,
    "baton_requests_receiving": 1.0,
    stat_key("baton_kv_blocks", state="free"): 5.0,
    stat_key("baton_kv_blocks", state="cached"): 1.0,
    stat_key("baton_kv_blocks", state="used"): 2.0,
    "baton_kv_blocks_capacity": 8.0,
    "baton_kv_block_size_tokens": 64.0,
    "baton_prefix_cache_query_tokens": 9.0,
    "baton_prefix_cache_hit_tokens": 4.0,
    "baton_preemptions": 0.0,
    stat_key("baton_speculative_proposed_tokens", drafter="ngram"): 16.0,
    stat_key("baton_speculative_accepted_tokens", drafter="ngram"): 7.0,
    **accepted_lengths(0, 0, 3, 4),
}


def server_metrics(**options) -> Metrics:
    metrics = Metrics("server", model_name="m", **options)
    metrics.update_engine(ENGINE_VALUES)
    metrics.set("baton_kv_usage_ratio", kv_usage(ENGINE_VALUES))
    metrics.inc("baton_requests", 2, endpoint="chat", outcome="stop")
    metrics.inc("baton_requests", endpoint="completions", outcome="tool_calls")
    metrics.inc("baton_requests", endpoint="chat", outcome="rejected")
    metrics.observe("baton_time_to_first_token_seconds", 0.3, trace_id="ab" * 16)
    return metrics


def samples(text: str) -> set[str]:
    return {line for line in text.splitlines() if not line.startswith("#")}


def test_all_metrics_of_a_server_have_its_model_and_processes_metrics_do_not():
    text, content_type = server_metrics().expose()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    for line in samples(text.decode()):
        assert ('model_name="m"' in line) is line.startswith("baton_")
    assert 'baton_kv_usage_ratio{model_name="m"} 0.25' in text.decode()
    assert "vllm:" not in text.decode()


def test_kv_usage_is_0_before_the_engine_is_ready():
    assert kv_usage({}) == 0


@pytest.mark.parametrize("accept", [OPEN_METRICS, PROMETHEUS_2, PROMETHEUS_3])
@pytest.mark.parametrize("aliases", ["none", "vllm"])
def test_open_metrics_is_valid_and_has_exemplars(accept, aliases):
    metrics = server_metrics(aliases=aliases)
    text, content_type = metrics.expose(accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = list(text_string_to_metric_families(text.decode()))
    exemplars = {
        (family.name, sample.labels["le"]): sample.exemplar.labels
        for family in families
        for sample in family.samples
        if sample.exemplar
    }
    trace = {"trace_id": "ab" * 16}
    assert exemplars.pop(("baton_time_to_first_token_seconds", "0.5")) == trace
    assert set(exemplars) == (
        {("vllm:time_to_first_token_seconds", "0.5")} if aliases == "vllm" else set()
    )
    # The Prometheus text format has no exemplars. Unlike in OpenMetrics, the names of
    # counters in its type lines have the suffix _total.
    plain = metrics.expose()[0].decode()
    assert "trace_id" not in plain and "# TYPE baton_requests_total counter" in plain
    assert "# TYPE baton_requests counter" in text.decode()


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "application/openmetrics-text;version=x",
        ";;,=,\x00",
        "text/plain, application/openmetrics-text",
    ],
)
def test_other_accept_headers_get_the_text_format(accept):
    text, content_type = server_metrics().expose(accept)
    assert content_type.startswith("text/plain") and b"baton_build_info" in text


def test_aliases_have_the_names_types_and_labels_that_programs_for_vllm_read():
    text, _ = server_metrics(aliases="vllm").expose(OPEN_METRICS)
    families = {
        family.name: family for family in text_string_to_metric_families(text.decode())
    }
    types = {name: each.type for name, each in families.items() if "vllm:" in name}
    assert types == NAMES_OF_VLLM
    for name in NAMES_OF_VLLM:
        for sample in families[name].samples:
            assert sample.labels["model_name"] == "m" and sample.labels["engine"] == "0"


def test_aliases_have_the_values_of_the_metrics():
    lines = samples(server_metrics(aliases="vllm").expose()[0].decode())
    labels = 'engine="0",model_name="m"'
    expected = {
        f"vllm:num_requests_running{{{labels}}} 3.0",
        f"vllm:num_requests_waiting{{{labels}}} 3.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
        f"vllm:prefix_cache_hits_total{{{labels}}} 4.0",
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0",
        'vllm:request_success_total{engine="0",finished_reason="stop",'
        'model_name="m"} 3.0',
        'vllm:cache_config_info{block_size="64",engine="0",model_name="m",'
        'num_gpu_blocks="8"} 1.0',
        'vllm:spec_decode_num_draft_tokens_total{drafter="ngram",engine="0",'
        'model_name="m"} 16.0',
        f"vllm:spec_decode_num_drafts_total{{{labels}}} 4.0",
        *(
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",'
            f'model_name="m",position="{position}"}} {count}.0'
            for position, count in enumerate((2, 2, 2, 1))
        ),
    }
    assert expected - lines == set()


def test_server_without_an_engine_has_only_the_aliases_of_its_http_process():
    metrics = Metrics("server", model_name="m", aliases="vllm")
    metrics.inc("baton_requests", endpoint="chat", outcome="stop")
    text = metrics.expose()[0].decode()
    assert "vllm:request_success_total" in text
    assert "vllm:num_requests_waiting" not in text and "cache_config" not in text


def test_proxy_has_aliases_of_its_metrics_labelled_with_the_only_model():
    metrics = Metrics("proxy", aliases="vllm")
    metrics.inc("baton_proxy_requests_in_progress", 2)
    running = 'vllm:num_requests_running{engine="0"} 2.0'
    assert running in samples(metrics.expose()[0].decode())
    metrics.model_name = "m"
    lines = samples(metrics.expose()[0].decode())
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 2.0' in lines
    assert "baton_proxy_requests_in_progress 2.0" in lines


def test_every_alias_has_a_source():
    for origin, aliases in (("server", SERVER_ALIASES), ("proxy", PROXY_ALIASES)):
        text = Metrics(origin).expose(OPEN_METRICS)[0].decode()
        engine = {key.partition("{")[0] for key in ENGINE_VALUES}
        names = {line.split()[2] for line in text.splitlines() if "# TYPE" in line}
        assert set(aliases.values()) <= names | engine


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Prometheus' promtool")
@pytest.mark.parametrize("origin", ["server", "proxy"])
def test_promtool_accepts_the_text(origin):
    metrics = server_metrics() if origin == "server" else Metrics("proxy")
    text, _ = metrics.expose()
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
