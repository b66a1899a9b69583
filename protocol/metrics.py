"""Every metric of every process, in one table, and a registry per application.

Two applications in one process share nothing: each makes a `Metrics`. Metrics whose origin is
"engine" are counted in the engine's process and arrive as EngineStats, keyed by `stat_key`; the
others are counted where they are exposed. The engine core may also use the short keys of
`ENGINE_KEYS`; a key that neither knows is exposed as the gauge `baton_engine_<key>`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0)
_SLOW = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True)
class Spec:
    """One line of the table. Counters are exposed with the suffix `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    origin: Literal["server", "engine", "proxy"]
    help: str
    labels: tuple[str, ...] = ()
    buckets_s: tuple[float, ...] = _SLOW


TABLE = (
    # Servers, counted in the HTTP process.
    Spec("baton_requests", "counter", "server",
         "Finished requests; outcome: stop, length, abort (client gone), rejected (4xx), error "
         "(5xx).", ("endpoint", "outcome")),
    Spec("baton_requests_in_progress", "gauge", "server",
         "Requests accepted and not yet answered in full."),
    Spec("baton_prompt_tokens", "counter", "server", "Prompt tokens of accepted requests."),
    Spec("baton_generation_tokens", "counter", "server", "Generated tokens of all requests."),
    Spec("baton_cached_prompt_tokens", "counter", "server",
         "Prompt tokens that no server had to compute."),
    Spec("baton_kv_tokens", "counter", "server",
         "Prompt tokens of finished requests by where their KV came from: transferred, "
         "recomputed, skipped (prefix cache).", ("source",)),
    Spec("baton_time_to_first_token_seconds", "histogram", "server",
         "Request received to first token."),
    Spec("baton_inter_token_seconds", "histogram", "server",
         "Between two deliveries of tokens to one request.", buckets_s=_FAST),
    Spec("baton_request_seconds", "histogram", "server", "Request received to last token."),
    # Engine: scheduling and memory.
    Spec("baton_requests_running", "gauge", "engine", "Sequences in the running batch."),
    Spec("baton_requests_waiting", "gauge", "engine", "Sequences that wait for admission."),
    Spec("baton_requests_receiving", "gauge", "engine", "Sequences whose KV is being pulled."),
    Spec("baton_kv_blocks", "gauge", "engine",
         "KV blocks by state: free, used, cached, leased, receiving, quarantined.", ("state",)),
    Spec("baton_kv_blocks_capacity", "gauge", "engine", "KV blocks in the pool."),
    Spec("baton_kv_block_size_tokens", "gauge", "engine", "Tokens in one KV block."),
    Spec("baton_prefix_cache_query_tokens", "counter", "engine",
         "Prompt tokens looked up in the prefix cache."),
    Spec("baton_prefix_cache_hit_tokens", "counter", "engine",
         "Prompt tokens found in the prefix cache."),
    Spec("baton_preemptions", "counter", "engine", "Sequences preempted and computed again."),
    Spec("baton_engine_steps", "counter", "engine", "Forward steps."),
    Spec("baton_engine_step_tokens", "counter", "engine", "Tokens computed in forward steps."),
    Spec("baton_engine_step_seconds", "counter", "engine", "Time spent in forward steps."),
    # Engine: moving KV.
    Spec("baton_kv_transfers", "counter", "engine",
         "Pulls by outcome (done, failed, cancelled) and path (direct, staged, mapped, none).",
         ("outcome", "path")),
    Spec("baton_kv_transfer_bytes", "counter", "engine", "Useful KV bytes pulled."),
    Spec("baton_kv_transfer_descriptors", "counter", "engine", "READ descriptors posted."),
    Spec("baton_kv_transfer_seconds", "counter", "engine",
         "Time from the first READ of a pull to its fence."),
    Spec("baton_kv_transfer_failures", "counter", "engine",
         "Failed pulls by the error's code.", ("code",)),
    Spec("baton_kv_params_rejected", "counter", "engine",
         "Offered kv_transfer_params that were not used."),
    Spec("baton_requests_locked_out", "counter", "engine",
         "Requests refused because hanging reads held the KV blocks they needed."),
    Spec("baton_kv_recoveries", "counter", "engine",
         "Requests that went on after a failed pull, by policy.", ("policy",)),
    Spec("baton_handshakes", "counter", "engine", "Handshakes by outcome.", ("outcome",)),
    Spec("baton_leases", "counter", "engine",
         "Leases by event: granted, completed, expired, aborted.", ("event",)),
    Spec("baton_leases_held", "gauge", "engine", "Leases held now."),
    Spec("baton_lease_renewals", "counter", "engine", "Renewals of held leases."),
    Spec("baton_lease_gone", "counter", "engine",
         "Completions and renewals answered `gone`: the lease had ended or was never known."),
    # Proxy.
    Spec("baton_proxy_requests", "counter", "proxy",
         "Requests by path (pd, decode_only) and why (routed, no_prefill_server, "
         "prefill_failed, ...).", ("path", "reason")),
    Spec("baton_proxy_responses", "counter", "proxy", "Responses by HTTP status.", ("status",)),
    Spec("baton_proxy_requests_in_progress", "gauge", "proxy", "Requests not yet answered."),
    Spec("baton_proxy_retries", "counter", "proxy", "Attempts after the first, by leg.", ("leg",)),
    Spec("baton_proxy_upstream_failures", "counter", "proxy",
         "Failed calls to a server by leg and reason.", ("leg", "reason")),
    Spec("baton_proxy_upstream_ready", "gauge", "proxy",
         "1 while the server is ready.", ("role", "url")),
    Spec("baton_proxy_upstream_in_flight", "gauge", "proxy",
         "Requests in flight to a server.", ("role", "url")),
    Spec("baton_proxy_stripped_kv_transfer_params", "counter", "proxy",
         "Requests whose client had sent kv_transfer_params, which were dropped."),
    Spec("baton_proxy_client_disconnects", "counter", "proxy",
         "Clients gone before their answer was complete."),
    Spec("baton_proxy_prefill_seconds", "histogram", "proxy", "Duration of the prefill leg."),
    Spec("baton_proxy_first_byte_seconds", "histogram", "proxy",
         "Request received to first byte of the answer."),
    Spec("baton_proxy_request_seconds", "histogram", "proxy",
         "Request received to last byte of the answer."),
)  # fmt: skip

SPECS: Mapping[str, Spec] = {spec.name: spec for spec in TABLE}


def stat_key(name: str, **labels: str) -> str:
    """The key of one series in EngineStats.values, e.g. `baton_kv_blocks{state=free}`.

    Raises:
        KeyError: a name or a set of labels that the table does not have; our own bug.
    """
    spec = SPECS[name]
    if set(labels) != set(spec.labels):
        raise KeyError(f"{name} has the labels {spec.labels}, not {tuple(labels)}")
    if not labels:
        return name
    return name + "{" + ",".join(f"{label}={labels[label]}" for label in spec.labels) + "}"


# Short names that the engine core sends, by the series they stand for.
ENGINE_KEYS: Mapping[str, str] = {
    "running": "baton_requests_running",
    "waiting": "baton_requests_waiting",
    "receiving": "baton_requests_receiving",
    "preemptions": "baton_preemptions",
    "steps": "baton_engine_steps",
    "prefix_query_tokens": "baton_prefix_cache_query_tokens",
    "prefix_hit_tokens": "baton_prefix_cache_hit_tokens",
    **{
        f"blocks_{state}": stat_key("baton_kv_blocks", state=state)
        for state in ("free", "used", "cached", "leased", "receiving", "quarantined")
    },
}

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


def _parse_key(key: str) -> tuple[Spec, list[str]]:
    """The spec and the label values of an engine's key; an unknown key gets a spec of its own."""
    name, _, rest = ENGINE_KEYS.get(key, key).partition("{")
    labels = [pair.partition("=")[2] for pair in rest.removesuffix("}").split(",") if pair]
    spec = SPECS.get(name)
    if spec is not None and spec.origin == "engine" and len(labels) == len(spec.labels):
        return spec, labels
    unknown = "baton_engine_" + _NOT_IN_NAMES.sub("_", key.removeprefix("baton_"))
    return Spec(unknown, "gauge", "engine", "A value that only the engine knows about."), []


class _EngineCollector(Collector):
    """Exposes the newest values that the engine sent, whatever it counted before."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def collect(self) -> Iterable[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for key, value in list(self.values.items()):
            spec, labels = _parse_key(key)
            if spec.name not in families:
                family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
                families[spec.name] = family(spec.name, spec.help, labels=spec.labels)
            families[spec.name].add_metric(labels, value)
        return families.values()


class Metrics:
    """One application's metrics.

    Args:
        origin: which lines of the table this process counts itself: "server" or "proxy".
    """

    def __init__(self, origin: Literal["server", "proxy"]) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._own: dict[str, Any] = {
            spec.name: self._make(spec) for spec in TABLE if spec.origin == origin
        }

    def _make(self, spec: Spec) -> Counter | Gauge | Histogram:
        if spec.kind == "histogram":
            return Histogram(
                spec.name, spec.help, spec.labels, buckets=spec.buckets_s, registry=self._registry
            )
        kind = Counter if spec.kind == "counter" else Gauge
        return kind(spec.name, spec.help, spec.labels, registry=self._registry)

    def inc(self, name: str, amount: float = 1, **labels: str) -> None:
        """Adds to a counter or a gauge."""
        self._child(name, labels).inc(amount)

    def dec(self, name: str, amount: float = 1, **labels: str) -> None:
        """Takes from a gauge."""
        self._child(name, labels).dec(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self._child(name, labels).set(value)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Adds one observation to a histogram."""
        self._child(name, labels).observe(seconds)

    def update_engine(self, values: Mapping[str, float]) -> None:
        """Takes over EngineStats.values; see `stat_key` for the keys."""
        self._engine.values.update({ENGINE_KEYS.get(key, key): values[key] for key in values})

    def value(self, name: str, **labels: str) -> float:
        """The current value of a counter or gauge, 0 when it was never touched (for tests)."""
        spec = SPECS[name]
        if spec.origin == "engine":
            return self._engine.values.get(stat_key(name, **labels), 0.0)
        suffix = "_total" if spec.kind == "counter" else ""
        return self._registry.get_sample_value(name + suffix, labels) or 0.0

    def expose(self) -> bytes:
        """The Prometheus text format, to be served as CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _child(self, name: str, labels: dict[str, str]) -> Any:
        metric = self._own[name]
        return metric.labels(**labels) if labels else metric
