"""Every metric of every process in one table, and one registry per application.

Metrics with the origin "engine" are counted in the engine's process. The HTTP process
receives their values as EngineStats, with the keys of `stat_key`, and exposes them.
docs/metrics.md has the same table for readers of dashboards.
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
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from protocol.process.output import num_dropped_lines
from protocol.telemetry.exposition import LabelledCollector, encode
from protocol.telemetry.vllm_names import ALIASES_OF
from protocol.version import VERSION

Aliases = Literal["none", "vllm"]  # values of --metric-aliases
# Members of the response to GET /ready that count an engine's work since its start. The
# first four members count all steps. The last three count only mixed steps, which
# compute prompt tokens.
ENGINE_TOTALS = (
    "engine_steps",
    "engine_step_tokens",
    "engine_step_prompt_tokens",
    "engine_step_seconds",
    "engine_mixed_steps",
    "engine_mixed_step_tokens",
    "engine_mixed_step_seconds",
)
MODEL_LABEL = "model_name"  # a label of all metrics of a server, except process_*

# Upper bounds of histogram buckets: tokens in _TOKENS and _PROPOSALS, else seconds.
# fmt: off
_FAST = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0,
    5.0,
)
_PULL = (
    0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0,
    30.0,
)
# fmt: on
_SLOW = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
_TOKENS = tuple(float(2**exponent) for exponent in range(18))
_PROPOSALS = tuple(float(count) for count in range(17))  # tokens of a step and sequence


@dataclass(frozen=True)
class Spec:
    """A metric, one row of TABLE. Counters are exposed with the suffix `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    # "any": servers and proxies expose the metric, each for its own process.
    origin: Literal["server", "engine", "proxy", "any"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = _SLOW


TABLE = (
    Spec("baton_build_info", "gauge", "any",
         "Always 1; the label is the version of Baton.", ("version",)),
    Spec("baton_key_requests", "counter", "any",
         "Requests by the name of their API key (-: no known key) and outcome: "
         "accepted, limited (429), forbidden (403), unknown (401).",
         ("key", "outcome")),
    Spec("baton_log_lines_dropped", "counter", "any",
         "Output lines of this process that were dropped because nothing read or "
         "stored them in time."),
    # Servers, counted in the HTTP process.
    Spec("baton_requests", "counter", "server",
         "Finished requests by outcome: stop, length, tool_calls, cache_threshold (too "
         "little was cached), abort (the client disconnected), rejected (4xx), error "
         "(5xx), moved (migrated to another server).",
         ("endpoint", "outcome")),
    Spec("baton_requests_in_progress", "gauge", "server",
         "Accepted requests without a complete response."),
    Spec("baton_queue_tokens", "gauge", "server",
         "Prompt tokens in the waiting queue."),
    Spec("baton_queue_seconds", "gauge", "server",
         "Predicted queue time of a request that arrives now; the server refuses "
         "requests while this time is above --max-queue-s."),
    Spec("baton_grammar_trials_waiting", "gauge", "server",
         "Requests with a new schema or grammar that wait for its trial compilation."),
    Spec("baton_prompt_tokens", "counter", "server",
         "Prompt tokens of accepted requests."),
    Spec("baton_generation_tokens", "counter", "server",
         "Generated tokens of all requests."),
    Spec("baton_cached_prompt_tokens", "counter", "server",
         "Prompt tokens that no server had to compute."),
    Spec("baton_kv_tokens", "counter", "server",
         "Prompt tokens of finished requests by the source of their KV: transferred, "
         "recomputed, skipped (found in the prefix cache).", ("source",)),
    Spec("baton_time_to_first_token_seconds", "histogram", "server",
         "Time from receiving a request to its first token."),
    Spec("baton_inter_token_seconds", "histogram", "server",
         "Time between two deliveries of tokens to one request.", buckets=_FAST),
    Spec("baton_request_seconds", "histogram", "server",
         "Time from receiving a request to its last token."),
    Spec("baton_request_queue_seconds", "histogram", "server",
         "Time that a request waited in the engine for a place in the batch. A decode "
         "server counts it from the moment when it can pull KV."),
    Spec("baton_request_prefill_seconds", "histogram", "server",
         "Time in which this server computed the prompt of a request, or the part of "
         "it that was neither pulled nor cached."),
    Spec("baton_request_decode_seconds", "histogram", "server",
         "Time from the first to the last token of a request with several tokens."),
    Spec("baton_request_prompt_tokens", "histogram", "server",
         "Prompt tokens of a finished request.", buckets=_TOKENS),
    Spec("baton_request_generation_tokens", "histogram", "server",
         "Generated tokens of a finished request.", buckets=_TOKENS),
    Spec("baton_kv_usage_ratio", "gauge", "server",
         "Share of the KV blocks that requests, leases and pulls use, from 0 to 1."),
    # Engine: scheduling and memory.
    Spec("baton_requests_running", "gauge", "engine",
         "Sequences in the running batch."),
    Spec("baton_requests_waiting", "gauge", "engine",
         "Sequences that wait for admission to the batch."),
    Spec("baton_requests_receiving", "gauge", "engine",
         "Sequences that wait for the pull of their KV."),
    Spec("baton_kv_blocks", "gauge", "engine",
         "KV blocks by state: free, used, cached, leased, receiving, quarantined.",
         ("state",)),
    Spec("baton_kv_blocks_capacity", "gauge", "engine", "KV blocks in the pool."),
    Spec("baton_kv_blocks_pinned", "gauge", "engine",
         "Blocks in the prefix cache that requests asked to keep (soft pins)."),
    Spec("baton_kv_pins_refused", "counter", "engine",
         "Blocks that were not pinned, because their owner had pinned its share."),
    Spec("baton_kv_pinned_evicted", "counter", "engine",
         "Pinned blocks that were evicted before their time, because only pinned "
         "blocks were left."),
    Spec("baton_kv_block_size_tokens", "gauge", "engine", "Tokens in one KV block."),
    Spec("baton_prefix_cache_query_tokens", "counter", "engine",
         "Prompt tokens looked up in the prefix cache."),
    Spec("baton_prefix_cache_hit_tokens", "counter", "engine",
         "Prompt tokens found in the prefix cache."),
    Spec("baton_preemptions", "counter", "engine",
         "Sequences that were preempted and had to be computed again."),
    Spec("baton_engine_steps", "counter", "engine", "Forward steps."),
    Spec("baton_engine_step_tokens", "counter", "engine",
         "Tokens computed in forward steps."),
    Spec("baton_engine_step_prompt_tokens", "counter", "engine",
         "Prompt tokens computed in forward steps."),
    Spec("baton_engine_step_seconds", "counter", "engine",
         "Duration of forward steps."),
    Spec("baton_engine_mixed_steps", "counter", "engine",
         "Mixed steps: forward steps that compute prompt tokens."),
    Spec("baton_engine_mixed_step_tokens", "counter", "engine",
         "Tokens computed in mixed steps, including those of streams."),
    Spec("baton_engine_mixed_step_seconds", "counter", "engine",
         "Duration of mixed steps."),
    Spec("baton_speculative_proposed_tokens", "counter", "engine",
         "Tokens that a drafter proposed and a step verified.", ("drafter",)),
    Spec("baton_speculative_accepted_tokens", "counter", "engine",
         "Proposed tokens that were equal to the tokens that the step drew.",
         ("drafter",)),
    Spec("baton_speculative_accepted_length", "histogram", "engine",
         "Accepted tokens of one sequence in one step that verified proposals.",
         buckets=_PROPOSALS),
    Spec("baton_kernels_loaded_late", "counter", "engine",
         "GPU kernels that were loaded or compiled after the server was ready; should "
         "stay 0."),
    Spec("baton_engine_memory_used_bytes", "gauge", "engine",
         "Memory in use: of rank 0's GPU, by all processes; on a CPU, of rank 0's "
         "process."),
    Spec("baton_engine_memory_total_bytes", "gauge", "engine",
         "Memory of rank 0's GPU; on a CPU, of the machine."),
    Spec("baton_engine_log_lines_dropped", "counter", "engine",
         "Output lines of the rank 0 process that were dropped."),
    # Engine: moving KV.
    Spec("baton_kv_transfers", "counter", "engine",
         "KV pulls by outcome (done, failed) and path (direct, staged, mapped; mixed: "
         "several of these; none: the pull failed, or there was nothing to read).",
         ("outcome", "path")),
    Spec("baton_kv_transports", "counter", "engine",
         "KV pulls of rank 0 by transport: mapped, or UCX's name, such as cma/memory, "
         "tcp/eth0 or rc_mlx5/mlx5_0:1. A series begins with its first pull.",
         ("transport",)),
    Spec("baton_kv_transfer_bytes", "counter", "engine",
         "KV bytes pulled, not counting bytes that were read but not needed."),
    Spec("baton_kv_transfer_descriptors", "counter", "engine",
         "READ descriptors posted to the transport."),
    Spec("baton_kv_transfer_seconds", "histogram", "engine",
         "Time from the first READ of a pull to its fence.", buckets=_PULL),
    Spec("baton_kv_transfer_failures", "counter", "engine",
         "Failed KV pulls by error code.", ("code",)),
    Spec("baton_kv_verified_tokens", "counter", "engine",
         "Pulled tokens with digests that were compared with the lender's "
         "(--kv-verify)."),
    Spec("baton_kv_unverified_tokens", "counter", "engine",
         "Pulled tokens that could not be verified, because the KV was converted or "
         "the peer does not compute digests.", ("reason",)),
    Spec("baton_kv_verify_failures", "counter", "engine",
         "KV pulls with bytes that differ from the lender's; should stay 0."),
    Spec("baton_kv_params_rejected", "counter", "engine",
         "Received kv_transfer_params that were not used."),
    Spec("baton_kv_first_tokens_redrawn", "counter", "engine",
         "First tokens that the decode server sampled again, because the prefill "
         "server had used different sampling parameters."),
    Spec("baton_requests_locked_out", "counter", "engine",
         "Requests refused because hung reads had quarantined KV blocks that they "
         "needed."),
    Spec("baton_kv_recoveries", "counter", "engine",
         "Requests that continued after a failed KV pull, by policy.", ("policy",)),
    Spec("baton_handshakes", "counter", "engine",
         "Handshakes by outcome.", ("outcome",)),
    Spec("baton_kv_lookups", "counter", "engine",
         "Prefix hints by outcome: found, none, late (no reply in time), computed "
         "(computing was faster than pulling).", ("outcome",)),
    Spec("baton_kv_lookups_answered", "counter", "engine",
         "Lookups received from other servers, by outcome: found, none, full (too many "
         "blocks are leased).", ("outcome",)),
    Spec("baton_leases", "counter", "engine",
         "Leases by event: granted, completed, expired, aborted.", ("event",)),
    Spec("baton_leases_held", "gauge", "engine", "Leases that are active now."),
    Spec("baton_lease_renewals", "counter", "engine", "Renewals of active leases."),
    Spec("baton_lease_gone", "counter", "engine",
         "Fences and renewals that were refused because the lease had ended or was "
         "never known."),
    # Engine: the KV store of the host.
    Spec("baton_host_kv_demotions", "counter", "engine",
         "Offers of KV from this server to the KV store of its host, by outcome: "
         "stored, dropped (by this server or by the store, which had too much to do), "
         "lost (the store did not answer).", ("outcome",)),
    Spec("baton_host_kv_demotions_pending", "gauge", "engine",
         "Sequences with KV that is offered to the KV store of the host now or soon."),
    Spec("baton_host_kv_lookups", "counter", "engine",
         "Lookups of prompts in the KV store of the host, by outcome: found, none, "
         "late (no reply in time).", ("outcome",)),
    Spec("baton_host_kv_up", "gauge", "engine",
         "1 while this server can use the KV store of its host."),
    Spec("baton_kv_pulled_tokens", "counter", "engine",
         "Tokens with pulled KV, by source: prefill (the prefill server of the "
         "request), peer (another server that had the prefix cached), host (the KV "
         "store of the host).", ("source",)),
    # The KV store of the host. Every server of the host reports the same values.
    Spec("baton_host_kv_blocks", "gauge", "engine",
         "KV blocks of the host's store by state, as in baton_kv_blocks.", ("state",)),
    Spec("baton_host_kv_capacity_tokens", "gauge", "engine",
         "Tokens that the host's store can hold."),
    Spec("baton_host_kv_evicted_blocks", "counter", "engine",
         "KV blocks that the host's store has evicted."),
    Spec("baton_host_kv_demoted_bytes", "counter", "engine",
         "KV bytes that the host's store has pulled from servers."),
    Spec("baton_host_kv_offers", "counter", "engine",
         "Offers that the host's store has received, by outcome: stored, dropped, "
         "evicted (the beginning had been evicted), failed.", ("outcome",)),
    # Proxy.
    Spec("baton_proxy_requests", "counter", "proxy",
         "Requests by path and reason. Paths: pd (disaggregated), decode_only (the "
         "decode server computed the prompt; reason placed: the placement policy chose "
         "this), prefill (the client received the response of the prefill server, such "
         "as a score or an error).",
         ("path", "reason")),
    Spec("baton_proxy_responses", "counter", "proxy",
         "Responses by HTTP status; broken: a stream that ended in an error.",
         ("status",)),
    Spec("baton_proxy_requests_in_progress", "gauge", "proxy",
         "Requests without a complete response."),
    Spec("baton_proxy_retries", "counter", "proxy",
         "Attempts after the first one, by leg.", ("leg",)),
    Spec("baton_proxy_resumes", "counter", "proxy",
         "Streams that lost their decode server, by reason (lost, timeout, died, busy, "
         "error, moved: the server migrated the stream) and outcome: resumed (another "
         "server continued), lost_again (that server was lost too), failed (no server "
         "could continue), limit_reached (--max-resumes), not_resumable (the stream "
         "cannot move).", ("reason", "outcome")),
    Spec("baton_proxy_upstream_failures", "counter", "proxy",
         "Failed calls to a server by leg and reason: unreachable, lost, timeout, full "
         "(429), busy (503), died (503 because its engine died), error (other 5xx).",
         ("leg", "reason")),
    Spec("baton_proxy_upstream_ready", "gauge", "proxy",
         "1 while the server is ready.", ("role", "server")),
    Spec("baton_proxy_upstream_circuit", "gauge", "proxy",
         "Circuit breaker of the server: 0 closed, 1 half open (one request probes the "
         "server), 2 open (the server is used last).", ("role", "server")),
    Spec("baton_proxy_upstream_in_flight", "gauge", "proxy",
         "Requests in flight to the server.", ("role", "server")),
    Spec("baton_proxy_stripped_kv_transfer_params", "counter", "proxy",
         "Requests from which the proxy removed fields that only proxies may send, "
         "such as kv_transfer_params."),
    Spec("baton_proxy_hints", "counter", "proxy",
         "Legs sent with a hint that another server may hold the KV of the prompt's "
         "beginning.", ("leg",)),
    Spec("baton_proxy_client_disconnects", "counter", "proxy",
         "Clients that disconnected before their response was complete."),
    Spec("baton_proxy_prefill_seconds", "histogram", "proxy",
         "Duration of the prefill leg."),
    Spec("baton_proxy_first_byte_seconds", "histogram", "proxy",
         "Time from receiving a streaming request to the first byte of its response."),
    Spec("baton_proxy_request_seconds", "histogram", "proxy",
         "Time from receiving a request to the last byte of its response."),
)  # fmt: skip

SPECS: Mapping[str, Spec] = {spec.name: spec for spec in TABLE}

# Without this call, a third of all series would be creation times of counters, which no
# dashboard uses.
disable_created_metrics()  # type: ignore[no-untyped-call]


def stat_key(name: str, **labels: str) -> str:
    """Returns the key of one series, such as `baton_kv_blocks{state=free}`.

    Raises:
        KeyError: The table has no metric with this name and these labels, which is a
            bug in Baton.
    """
    spec = SPECS[name]
    if set(labels) != set(spec.labels):
        raise KeyError(f"{name} has the labels {spec.labels}, not {tuple(labels)}")
    return _series_key(name, {label: labels[label] for label in spec.labels})


def _series_key(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f"{label}={value}" for label, value in labels.items())
    return f"{name}{{{pairs}}}" if pairs else name


class EngineHistogram(Histogram):
    """A histogram that is filled in the engine's process."""

    def __init__(self, name: str) -> None:
        spec = SPECS[name]
        super().__init__(spec.name, spec.help, buckets=spec.buckets, registry=None)

    def values(self) -> dict[str, float]:
        """Returns the value of each series of the histogram. The keys are like those of
        EngineStats.values.
        """
        (family,) = self.collect()
        return {
            _series_key(sample.name, sample.labels): sample.value
            for sample in family.samples
        }


class _EngineCollector(Collector):
    """Exposes the newest values that the engine has sent."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for key, value in dict(self.values).items():
            name, _, label_text = key.removesuffix("}").partition("{")
            # The names of a histogram's samples end in _bucket, _count or _sum.
            spec = SPECS.get(name) or SPECS[name.rpartition("_")[0]]
            pairs = (pair.partition("=") for pair in label_text.split(",") if pair)
            family = families.setdefault(
                spec.name, Metric(spec.name, spec.help, spec.kind)
            )
            sample = f"{name}_total" if spec.kind == "counter" else name
            family.add_sample(sample, {label: text for label, _, text in pairs}, value)
        return families.values()


class Metrics:
    """The metrics of a proxy, or of a server's HTTP process and its engine.

    Args:
        origin: The kind of process that creates this object.
        model_name: The model of a server. All metrics of the server, except process_*,
            have it as a label.
        aliases: The system with names that are exposed in addition to Baton's names.

    Attributes:
        model_name: A proxy sets this name if all its servers have the same model. In a
            proxy, only aliases have the label.
    """

    version = VERSION  # in `baton_build_info` and GET /version

    def __init__(
        self,
        origin: Literal["server", "proxy"],
        model_name: str | None = None,
        aliases: Aliases = "none",
    ) -> None:
        self.model_name = model_name
        self._origin = origin
        self._aliases = aliases
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        # Exposes memory, CPU time and file descriptors of this process: process_*.
        ProcessCollector(registry=self._registry)
        self._metrics = {
            spec.name: self._make(spec)
            for spec in TABLE
            if spec.origin in (origin, "any")
        }
        self.set("baton_build_info", 1, version=self.version)
        # Number of dropped output lines that baton_log_lines_dropped already includes.
        self._num_counted_lines = 0

    def _make(self, spec: Spec) -> Any:
        kinds: dict[str, Any] = {
            "counter": Counter,
            "gauge": Gauge,
            "histogram": Histogram,
        }
        kind = kinds[spec.kind]
        options = {"buckets": spec.buckets} if spec.kind == "histogram" else {}
        return kind(
            spec.name, spec.help, spec.labels, registry=self._registry, **options
        )

    def expose_series(self, name: str, **labels: str) -> Any:
        """Exposes a series from now on, with the value 0 if it is new. Returns the
        series.
        """
        metric = self._metrics[name]
        return metric.labels(**labels) if labels else metric

    def remove_series(self, name: str, **labels: str) -> None:
        """Stops exposing a series."""
        with contextlib.suppress(KeyError):
            self._metrics[name].remove(*(labels[label] for label in SPECS[name].labels))

    def inc(self, name: str, amount: float = 1, **labels: str) -> None:
        """Adds to a counter or a gauge."""
        self.expose_series(name, **labels).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self.expose_series(name, **labels).set(value)

    def observe(
        self, name: str, value: float, *, trace_id: str | None = None, **labels: str
    ) -> None:
        """Adds one observation to a histogram.

        Args:
            trace_id: The recorded trace that the value belongs to, for an exemplar;
                None if there is no such trace.
        """
        exemplar = {"trace_id": trace_id} if trace_id else None
        self.expose_series(name, **labels).observe(value, exemplar)

    def update_engine(self, values: Mapping[str, float]) -> None:
        """Stores the newest EngineStats.values; see `stat_key` for the keys."""
        self._engine.values.update(values)

    def values(self, *names: str) -> dict[str, float]:
        """Returns the current value of each series of the metrics `names`.

        The keys are like those of `stat_key`, but with the names of samples: the name
        of a counter has the suffix `_total`. The metrics must be those of this
        process, not of its engine.
        """
        values: dict[str, float] = {}
        for name in names:
            for family in self._metrics[name].collect():
                for sample in family.samples:
                    values[_series_key(sample.name, sample.labels)] = sample.value
        return values

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Returns the metrics in a text format, and their content type.

        The call also adds newly dropped output lines to baton_log_lines_dropped.

        Args:
            accept: The scraper's Accept header.
        """
        num_lines = num_dropped_lines()
        self.inc("baton_log_lines_dropped", num_lines - self._num_counted_lines)
        self._num_counted_lines = num_lines
        labels = {MODEL_LABEL: self.model_name} if self.model_name else {}
        collector = LabelledCollector(
            self._registry,
            labels=labels,
            derive=ALIASES_OF[self._origin] if self._aliases == "vllm" else None,
            only_derived=self._origin == "proxy",
        )
        return encode(collector, accept)
