"""Every metric of every process, in one table, and a registry per application.

Metrics whose origin is "engine" are counted in the engine's process and arrive as EngineStats,
keyed by `stat_key`. docs/metrics.md has the table for those who read dashboards.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from protocol.process.output import num_dropped_lines
from protocol.version import VERSION

# What an engine has done since its start, as told by GET /ready: steps, tokens in them, those of
# prompts, seconds; and in steps with prompts.
ENGINE_TOTALS = (
    "engine_steps",
    "engine_step_tokens",
    "engine_step_prompt_tokens",
    "engine_step_seconds",
    "engine_mixed_steps",
    "engine_mixed_step_tokens",
    "engine_mixed_step_seconds",
)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FAST = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
)
_PULL = (
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    5.0,
    30.0,
)
_SLOW = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True)
class Spec:
    """One line of the table. Counters are exposed with the suffix `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    origin: Literal["server", "engine", "proxy", "any"]  # any: the server and the proxy
    help: str
    labels: tuple[str, ...] = ()
    buckets_s: tuple[float, ...] = _SLOW


TABLE = (
    Spec("baton_build_info", "gauge", "any", "1, with the version of Baton.", ("version",)),
    Spec("baton_key_requests", "counter", "any",
         "Requests by the name of their API key (-: none that is known) and outcome: accepted, "
         "limited (429), forbidden (403), unknown (401).", ("key", "outcome")),
    Spec("baton_log_lines_dropped", "counter", "any",
         "Lines of output of this process that were dropped: nothing read or stored them."),
    # Servers, counted in the HTTP process.
    Spec("baton_requests", "counter", "server",
         "Finished requests; outcome: stop, length, tool_calls, abort (client gone), rejected "
         "(4xx), error (5xx), moved (handed over to another server).", ("endpoint", "outcome")),
    Spec("baton_requests_in_progress", "gauge", "server",
         "Requests accepted and not yet answered in full."),
    Spec("baton_queue_tokens", "gauge", "server", "Tokens of prompts that wait for their turn."),
    Spec("baton_queue_seconds", "gauge", "server",
         "Predicted wait of a request that comes now; above --max-queue-s it is refused."),
    Spec("baton_grammar_trials_waiting", "gauge", "server",
         "Requests with new schemas or grammars in the trial queue."),
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
    Spec("baton_engine_step_prompt_tokens", "counter", "engine", "Tokens of prompts among these."),
    Spec("baton_engine_step_seconds", "counter", "engine", "Time spent in forward steps."),
    Spec("baton_engine_mixed_steps", "counter", "engine", "Forward steps with prompts."),
    Spec("baton_engine_mixed_step_tokens", "counter", "engine",
         "Tokens computed in these, streams' included."),
    Spec("baton_engine_mixed_step_seconds", "counter", "engine", "Time spent in these."),
    Spec("baton_kernels_loaded_late", "counter", "engine",
         "GPU kernels loaded, perhaps compiled, after the server was ready: should stay 0."),
    Spec("baton_engine_log_lines_dropped", "counter", "engine",
         "Lines of output of rank 0's process that were dropped."),
    # Engine: moving KV.
    Spec("baton_kv_transfers", "counter", "engine",
         "Pulls by outcome (done, failed) and path (direct, staged, mapped; mixed: several of "
         "these; none: failed, or nothing to read).", ("outcome", "path")),
    Spec("baton_kv_transfer_bytes", "counter", "engine", "Useful KV bytes pulled."),
    Spec("baton_kv_transfer_descriptors", "counter", "engine", "READ descriptors posted."),
    Spec("baton_kv_transfer_seconds", "histogram", "engine",
         "Time from the first READ of a pull to its fence.", buckets_s=_PULL),
    Spec("baton_kv_transfer_failures", "counter", "engine",
         "Failed pulls by the error's code.", ("code",)),
    Spec("baton_kv_verified_tokens", "counter", "engine",
         "Tokens pulled whose digests were compared with the lender's (--kv-verify)."),
    Spec("baton_kv_unverified_tokens", "counter", "engine",
         "Tokens pulled that could not be verified: KV that is converted on its way, or a peer "
         "that computes no such digests.", ("reason",)),
    Spec("baton_kv_verify_failures", "counter", "engine",
         "Pulls that brought something else than their lender holds: should stay 0."),
    Spec("baton_kv_params_rejected", "counter", "engine",
         "Offered kv_transfer_params that were not used."),
    Spec("baton_kv_first_tokens_redrawn", "counter", "engine",
         "First tokens not taken over with the KV: P had drawn them in another way."),
    Spec("baton_requests_locked_out", "counter", "engine",
         "Requests refused because hanging reads held the KV blocks they needed."),
    Spec("baton_kv_recoveries", "counter", "engine",
         "Requests that went on after a failed pull, by policy.", ("policy",)),
    Spec("baton_handshakes", "counter", "engine", "Handshakes by outcome.", ("outcome",)),
    Spec("baton_kv_lookups", "counter", "engine",
         "Hints by outcome: found, none, late (no answer in time), computed (that was quicker).",
         ("outcome",)),
    Spec("baton_kv_lookups_answered", "counter", "engine",
         "Lookups of other servers by outcome: found, none, full (enough is lent).", ("outcome",)),
    Spec("baton_leases", "counter", "engine",
         "Leases by event: granted, completed, expired, aborted.", ("event",)),
    Spec("baton_leases_held", "gauge", "engine", "Leases held now."),
    Spec("baton_lease_renewals", "counter", "engine", "Renewals of held leases."),
    Spec("baton_lease_gone", "counter", "engine",
         "Completions and renewals answered `gone`: the lease had ended or was never known."),
    # Proxy.
    Spec("baton_proxy_requests", "counter", "proxy",
         "Requests by path (pd; decode_only: D computed the prompt, with reason `placed` by "
         "choice; prefill: P's answer was the answer, as a score's or an error's) and why.",
         ("path", "reason")),
    Spec("baton_proxy_responses", "counter", "proxy",
         "Responses by HTTP status; broken: a stream that ended in an error.", ("status",)),
    Spec("baton_proxy_requests_in_progress", "gauge", "proxy", "Requests not yet answered."),
    Spec("baton_proxy_retries", "counter", "proxy", "Attempts after the first, by leg.", ("leg",)),
    Spec("baton_proxy_resumes", "counter", "proxy",
         "Decode servers lost in mid-answer, by reason (lost, timeout, died, busy, error; moved: "
         "it handed the stream over) and outcome: resumed (another one went on), lost_again (it "
         "was lost, too), failed (none could), spent (--max-resumes), unkept (the stream cannot go "
         "on elsewhere).", ("reason", "outcome")),
    Spec("baton_proxy_upstream_failures", "counter", "proxy",
         "Failed calls to a server by leg and reason: unreachable, lost, timeout, full (429), busy "
         "(503), died (503 as its engine died), error (other 5xx).", ("leg", "reason")),
    Spec("baton_proxy_upstream_ready", "gauge", "proxy",
         "1 while the server is ready.", ("role", "server")),
    Spec("baton_proxy_upstream_circuit", "gauge", "proxy",
         "0 closed, 1 half open (one request tries it), 2 open (the server comes last).",
         ("role", "server")),
    Spec("baton_proxy_upstream_in_flight", "gauge", "proxy",
         "Requests in flight to a server.", ("role", "server")),
    Spec("baton_proxy_stripped_kv_transfer_params", "counter", "proxy",
         "Requests whose client had sent kv_transfer_params, or what else proxies send, which were "
         "dropped."),
    Spec("baton_proxy_hints", "counter", "proxy",
         "Legs that were told of another server that may have the beginning of their prompt.",
         ("leg",)),
    Spec("baton_proxy_client_disconnects", "counter", "proxy",
         "Clients gone before their answer was complete."),
    Spec("baton_proxy_prefill_seconds", "histogram", "proxy", "Duration of the prefill leg."),
    Spec("baton_proxy_first_byte_seconds", "histogram", "proxy",
         "Request received to first byte of the answer, where it is a stream."),
    Spec("baton_proxy_request_seconds", "histogram", "proxy",
         "Request received to last byte of the answer."),
)  # fmt: skip

SPECS: Mapping[str, Spec] = {spec.name: spec for spec in TABLE}

# The times at which counters were made: a third of all series, and nobody plots them.
disable_created_metrics()  # type: ignore[no-untyped-call]


def stat_key(name: str, **labels: str) -> str:
    """The key of one series in EngineStats.values, e.g. `baton_kv_blocks{state=free}`. Raises
    KeyError for a name or a set of labels that the table does not have; our own bug."""
    spec = SPECS[name]
    if set(labels) != set(spec.labels):
        raise KeyError(f"{name} has the labels {spec.labels}, not {tuple(labels)}")
    return _key(name, {label: labels[label] for label in spec.labels})


def _key(name: str, labels: Mapping[str, str]) -> str:
    told = ",".join(f"{label}={value}" for label, value in labels.items())
    return f"{name}{{{told}}}" if told else name


class EngineHistogram(Histogram):
    """A histogram of the table that is counted in the engine's process."""

    def __init__(self, name: str) -> None:
        spec = SPECS[name]
        super().__init__(spec.name, spec.help, buckets=spec.buckets_s, registry=None)

    def values(self) -> dict[str, float]:
        """For EngineStats.values: for each bound how many were at most that, number and sum."""
        (family,) = self.collect()
        return {
            _key(sample.name, sample.labels): sample.value for sample in family.samples
        }


class _EngineCollector(Collector):
    """Exposes the newest values that the engine sent, whatever it counted before."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for key, value in dict(self.values).items():
            name, _, rest = key.removesuffix("}").partition("{")
            # Samples of a histogram have its name with _bucket, _count or _sum.
            spec = SPECS.get(name) or SPECS[name.rpartition("_")[0]]
            pairs = (pair.partition("=") for pair in rest.split(",") if pair)
            family = families.setdefault(
                spec.name, Metric(spec.name, spec.help, spec.kind)
            )
            sample = f"{name}_total" if spec.kind == "counter" else name
            family.add_sample(sample, {label: text for label, _, text in pairs}, value)
        return families.values()


class Metrics:
    """One application's metrics: those of the table that `origin` counts, and the engine's."""

    version = VERSION  # of Baton, which `baton_build_info` and GET /version report

    def __init__(self, origin: Literal["server", "proxy"]) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        ProcessCollector(
            registry=self._registry
        )  # memory, CPU time, file descriptors: process_*
        self._own = {
            one.name: self._make(one) for one in TABLE if one.origin in (origin, "any")
        }
        self.set("baton_build_info", 1, version=self.version)
        self._counted_lines = 0

    def _make(self, spec: Spec) -> Any:
        kind: Any = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[
            spec.kind
        ]
        options = {"buckets": spec.buckets_s} if spec.kind == "histogram" else {}
        return kind(
            spec.name, spec.help, spec.labels, registry=self._registry, **options
        )

    def begin(self, name: str, **labels: str) -> Any:
        """A series, which is exposed from now on: a counter or a gauge with 0 at first."""
        return self._own[name].labels(**labels) if labels else self._own[name]

    def end(self, name: str, **labels: str) -> None:
        """The series is not exposed any more."""
        with contextlib.suppress(KeyError):
            self._own[name].remove(*(labels[label] for label in SPECS[name].labels))

    def inc(self, name: str, amount: float = 1, **labels: str) -> None:
        """Adds to a counter or a gauge."""
        self.begin(name, **labels).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        self.begin(name, **labels).set(value)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Adds one observation to a histogram."""
        self.begin(name, **labels).observe(seconds)

    def update_engine(self, values: Mapping[str, float]) -> None:
        """Takes over EngineStats.values; see `stat_key` for the keys."""
        self._engine.values.update(values)

    def values(self, *names: str) -> dict[str, float]:
        """The current values of some metrics of this process, by the keys of `stat_key`."""
        families = (family for name in names for family in self._own[name].collect())
        return {
            _key(one.name, one.labels): one.value
            for each in families
            for one in each.samples
        }

    def expose(self) -> bytes:
        """The Prometheus text format, to be served as CONTENT_TYPE."""
        num_lines = num_dropped_lines()
        self.inc("baton_log_lines_dropped", num_lines - self._counted_lines)
        self._counted_lines = num_lines
        return generate_latest(self._registry)
