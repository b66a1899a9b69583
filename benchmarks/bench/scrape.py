"""Reads counters of /metrics before and after a run, for KV moved and cache hits."""

import asyncio
from collections.abc import Mapping, Sequence

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.bench.endpoint import open_session

_TIMEOUT_S = 10.0
Counters = Mapping[str, float]
# Pairs of counters (hits, queries) of the prefix caches of Baton, vLLM and SGLang.
_HIT_COUNTERS = (
    ("baton_prefix_cache_hit_tokens_total", "baton_prefix_cache_query_tokens_total"),
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
)
_KV_BYTES_COUNTER = "baton_kv_transfer_bytes_total"


def parse_samples(text: str, kind: str) -> dict[str, float]:
    """Return the sum of all samples of each metric name on a page of /metrics.

    Args:
        kind: the type of the metrics, such as "counter" or "gauge".

    Raises:
        ValueError: the text is not in Prometheus' format.
    """
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type != kind:
            continue
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples


async def scrape(url: str, api_key: str | None) -> Counters | None:
    """Return the counters of a server, or None if its /metrics cannot be read."""
    try:
        async with open_session(url, _TIMEOUT_S, api_key) as session:
            async with session.get("/metrics") as response:
                if response.status != 200:
                    return None
                return parse_samples(await response.text(), "counter")
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


async def scrape_all(
    urls: Sequence[str], api_key: str | None
) -> dict[str, Counters | None]:
    """Return the result of `scrape` for each URL."""
    pages = await asyncio.gather(*(scrape(url, api_key) for url in urls))
    return dict(zip(urls, pages, strict=True))


def increases(before: Counters | None, after: Counters | None) -> dict[str, float]:
    """Return the increase of each counter. Counters without an increase are left out.

    A counter that is smaller than before was reset by a restart of the server, so its
    increase counts from 0.
    """
    if before is None or after is None:
        return {}
    grown = {}
    for name, value in after.items():
        earlier = before.get(name, 0.0)
        increase = value - earlier if value >= earlier else value
        if increase:
            grown[name] = round(increase, 6)
    return grown


def kv_figures(increases_by_url: Mapping[str, Counters]) -> dict[str, float | None]:
    """Return the KV that servers moved, and the hit rate of their prefix caches.

    A figure is None if no server has its counters.
    """
    totals: dict[str, float] = {}
    for counters in increases_by_url.values():
        for name, value in counters.items():
            totals[name] = totals.get(name, 0.0) + value
    hit_rate = None
    for hits, queries in _HIT_COUNTERS:
        if totals.get(queries):
            hit_rate = round(totals.get(hits, 0.0) / totals[queries], 4)
    return {
        "kv_bytes_moved": totals.get(_KV_BYTES_COUNTER),
        "cache_hit_rate": hit_rate,
    }
