"""Exposes Baton's metrics under vLLM's metric names, too (`--metric-aliases vllm`).

Dashboards, autoscalers and endpoint pickers for vLLM read these names. Most aliases
have the values of one of Baton's metrics; functions in this module compute the other
aliases. The names are those of several versions of vllm/v1/metrics/loggers.py. The
buckets of histograms are Baton's.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

# Baton has one engine per server, so the label `engine` is constant.
_ENGINE_LABELS = {"engine": "0"}

# The name of the alias -> the name of Baton's metric.
SERVER_ALIASES: Mapping[str, str] = {
    "vllm:num_requests_running": "baton_requests_running",
    "vllm:kv_cache_usage_perc": "baton_kv_usage_ratio",
    "vllm:gpu_cache_usage_perc": "baton_kv_usage_ratio",
    "vllm:prefix_cache_queries": "baton_prefix_cache_query_tokens",
    "vllm:prefix_cache_hits": "baton_prefix_cache_hit_tokens",
    "vllm:gpu_prefix_cache_queries": "baton_prefix_cache_query_tokens",
    "vllm:gpu_prefix_cache_hits": "baton_prefix_cache_hit_tokens",
    "vllm:num_preemptions": "baton_preemptions",
    "vllm:prompt_tokens": "baton_prompt_tokens",
    "vllm:generation_tokens": "baton_generation_tokens",
    "vllm:time_to_first_token_seconds": "baton_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "baton_inter_token_seconds",
    "vllm:time_per_output_token_seconds": "baton_inter_token_seconds",
    "vllm:e2e_request_latency_seconds": "baton_request_seconds",
    "vllm:request_queue_time_seconds": "baton_request_queue_seconds",
    "vllm:request_prefill_time_seconds": "baton_request_prefill_seconds",
    "vllm:request_decode_time_seconds": "baton_request_decode_seconds",
    "vllm:request_prompt_tokens": "baton_request_prompt_tokens",
    "vllm:request_generation_tokens": "baton_request_generation_tokens",
    "vllm:spec_decode_num_draft_tokens": "baton_speculative_proposed_tokens",
    "vllm:spec_decode_num_accepted_tokens": "baton_speculative_accepted_tokens",
}
PROXY_ALIASES: Mapping[str, str] = {
    "vllm:num_requests_running": "baton_proxy_requests_in_progress",
    "vllm:time_to_first_token_seconds": "baton_proxy_first_byte_seconds",
    "vllm:e2e_request_latency_seconds": "baton_proxy_request_seconds",
}
# The label `finished_reason` of the alias for each outcome in baton_requests. The
# outcomes of refused and migrated requests have no counterpart in vLLM.
_FINISHED_REASONS = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
    "cache_threshold": "cache_threshold",
    "abort": "abort",
    "error": "error",
}


def server_aliases(
    families: Mapping[str, Metric], labels: Mapping[str, str]
) -> Iterator[Metric]:
    """Yields those of vLLM's families for which a server has values.

    Args:
        families: Baton's families by name.
        labels: The labels that all series of Baton have in common.
    """
    shared = {**labels, **_ENGINE_LABELS}
    yield from _copies(SERVER_ALIASES, families, shared)
    yield from _num_requests_waiting(families, shared)
    yield _request_success(families["baton_requests"], shared)
    yield from _cache_config_info(families, shared)
    yield from _drafts(families, shared)


def proxy_aliases(
    families: Mapping[str, Metric], labels: Mapping[str, str]
) -> Iterator[Metric]:
    """Yields those of vLLM's families for which a proxy has values.

    The arguments are those of `server_aliases`.
    """
    yield from _copies(PROXY_ALIASES, families, {**labels, **_ENGINE_LABELS})


def _copies(
    sources: Mapping[str, str],
    families: Mapping[str, Metric],
    labels: Mapping[str, str],
) -> Iterator[Metric]:
    for name, source_name in sources.items():
        source = families.get(source_name)
        if source is None:  # the engine is not ready yet
            continue
        alias = Metric(name, f"Alias of {source_name}.", source.type)
        for sample in source.samples:
            suffix = sample.name.removeprefix(source_name)
            alias.samples.append(
                sample._replace(name=name + suffix, labels={**sample.labels, **labels})
            )
        yield alias


def _num_requests_waiting(
    families: Mapping[str, Metric], labels: dict[str, str]
) -> Iterator[Metric]:
    """Yields the number of waiting requests. As in vLLM, it includes requests that wait
    for remote KV.
    """
    name = "vllm:num_requests_waiting"
    parts = ("baton_requests_waiting", "baton_requests_receiving")
    values = [families[part].samples[0].value for part in parts if part in families]
    if values:
        alias = Metric(name, f"Sum of {' and '.join(parts)}.", "gauge")
        alias.add_sample(name, labels, sum(values))
        yield alias


def _request_success(source: Metric, labels: dict[str, str]) -> Metric:
    name = "vllm:request_success"
    counts = dict.fromkeys(_FINISHED_REASONS.values(), 0.0)
    for sample in source.samples:
        reason = _FINISHED_REASONS.get(sample.labels["outcome"])
        if reason is not None:
            counts[reason] += sample.value
    alias = Metric(name, "Sum of baton_requests by outcome.", "counter")
    for reason, count in counts.items():
        alias.add_sample(f"{name}_total", {**labels, "finished_reason": reason}, count)
    return alias


def _cache_config_info(
    families: Mapping[str, Metric], labels: dict[str, str]
) -> Iterator[Metric]:
    """Yields the size of the KV cache, as the labels of a constant gauge."""
    name = "vllm:cache_config_info"
    sources = {
        "block_size": "baton_kv_block_size_tokens",
        "num_gpu_blocks": "baton_kv_blocks_capacity",
    }
    if not families.keys() >= set(sources.values()):
        return
    sizes = {
        label: f"{families[source].samples[0].value:.0f}"
        for label, source in sources.items()
    }
    alias = Metric(name, f"Values of {' and '.join(sources.values())}.", "gauge")
    alias.add_sample(name, {**labels, **sizes}, 1)
    yield alias


def _drafts(families: Mapping[str, Metric], labels: dict[str, str]) -> Iterator[Metric]:
    """Yields the number of verified drafts, and of accepted tokens by draft position.

    Positions at which no token was accepted have no series.
    """
    source_name = "baton_speculative_accepted_length"
    if source_name not in families:
        return
    samples = {
        (sample.name.removeprefix(source_name), sample.labels.get("le")): sample.value
        for sample in families[source_name].samples
    }
    num_drafts = samples["_count", None]
    name = "vllm:spec_decode_num_drafts"
    drafts = Metric(name, f"Alias of {source_name}_count.", "counter")
    drafts.add_sample(f"{name}_total", labels, num_drafts)
    yield drafts
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    accepted = Metric(name, f"Counts of {source_name} above each bound.", "counter")
    for (suffix, bound), count in samples.items():
        if suffix == "_bucket" and num_drafts > count:
            position = {"position": f"{float(bound or 0):.0f}"}
            accepted.add_sample(
                f"{name}_total", {**labels, **position}, num_drafts - count
            )
    yield accepted


ALIASES_OF = {"server": server_aliases, "proxy": proxy_aliases}
