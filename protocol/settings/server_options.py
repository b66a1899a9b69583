"""Options of processes that serve HTTP: access, limits, queues and routing."""

from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from protocol.registration import MAX_TTL_S, MIN_TTL_S, check_advertised, http_url
from protocol.settings import sources
from protocol.settings.machine import MIN_SECRET_BYTES, check_is_local
from protocol.settings.options import ApiKey, Options, Seconds, Threads
from protocol.short_repr import short_repr

RESUME_WAIT_S = 3.0  # the default of --resume-wait-s, for streams only
# The default of --resume-wait-s if dead decode servers are restarted. The time includes
# loading the model.
RESTART_WAIT_S = 300.0


class TelemetryOptions(Options):
    """Metrics and traces of a process."""

    topic: ClassVar[str] = "telemetry"

    public_metrics: bool = False
    """serve /metrics to clients without an API key, for scrapers that have none"""
    metric_aliases: Literal["none", "vllm"] = "none"
    """expose metrics under additional names. vllm: the metric names of vLLM, for
    dashboards, autoscalers and endpoint pickers that read these names
    """
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector that receives traces by OTLP over HTTP, such as
    http://collector:4318/v1/traces. Needs the extra `otel` (None: the variables OTEL_*
    of OpenTelemetry name the collector, else there are no traces)
    """

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check_endpoint(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{short_repr(url)} is not an http:// or https:// URL; write for "
                "example http://collector:4318/v1/traces"
            )
        return url


class AccessOptions(Options):
    """Access control and TLS of a process."""

    topic: ClassVar[str] = "access"
    api_key: sources.Listed[ApiKey] = ()
    """API key of clients (repeatable; without API keys and admin keys, every client may
    call). Prefer the variable BATON_API_KEY, because other users can read command lines
    """
    admin_key: sources.Listed[ApiKey] = ()
    """API key that may also use /metrics, /stats, /ui/state, /drain, /migrate and
    /admin, and read all of /ready (repeatable). Prefer the variable BATON_ADMIN_KEY
    """
    cache_salt_by_key: bool = False
    """share cached KV only among requests with the same API key. Otherwise a client
    could find out, by cached_tokens or response times, which prompts clients with a
    different key have sent
    """
    insecure: bool = False
    """serve other machines without API keys and without a warning"""
    tls_cert: str | None = Field(None, min_length=1)
    """PEM file with the certificate chain for HTTPS; the file is reloaded every minute
    (None: plain HTTP)
    """
    tls_key: str | None = Field(None, min_length=1)
    """PEM file with the unencrypted private key of --tls-cert"""
    tls_ca: str | None = Field(None, min_length=1)
    """PEM file with the certificate authorities of https:// servers that this process
    calls (None: the authorities of the system)
    """

    @property
    def has_keys(self) -> bool:
        return bool(
            self.api_key or self.admin_key or getattr(self, "api_keys_file", None)
        )

    @field_validator("insecure", "tls_key")
    @classmethod
    def _check_consistent(cls, value: Any, info: ValidationInfo) -> Any:
        given = [
            name
            for name in ("api_key", "admin_key", "api_keys_file")
            if info.data.get(name)
        ]
        if info.field_name == "insecure" and value and given:
            raise ValueError(
                f"every client may call, but {sources.option_name(given[:1])} "
                "restricts access: leave out one of the two"
            )
        if info.field_name == "tls_key" and (value is None) != (
            info.data.get("tls_cert") is None
        ):
            raise ValueError(
                "a certificate needs its key: give both --tls-cert and --tls-key"
            )
        return value


class ListenOptions(TelemetryOptions, AccessOptions):
    """The address that a process listens on, its limits for clients, and its shutdown
    timeout.
    """

    topic: ClassVar[str] = "http"
    host: str = Field("127.0.0.1", min_length=1)
    """IP address or host name to listen on"""
    max_body_bytes: int = Field(10_000_000, ge=1)
    """maximum size of a request body (bytes)"""
    max_unfinished_bytes: int = Field(2**28, ge=1)
    """maximum sum of all request bodies that are still arriving (bytes). Beyond this
    sum, the body that began first is refused
    """
    max_held_bytes: int = Field(2**30, ge=1)
    """maximum sum of the bodies of all requests in progress (bytes). Beyond this sum,
    new requests are refused with 429
    """
    client_timeout_s: Seconds = 60.0
    """timeout of a client that stops sending its request or reading its response (s)"""
    request_timeout_s: Seconds | None = None
    """timeout of a request without the header x-request-timeout-s (s; None: no limit)
    """
    shutdown_grace_s: Seconds = 5.0
    """timeout of the shutdown, after which processes are killed (s)"""
    cors_origin: sources.Listed[sources.Origin] = ()
    """origin of web pages that may call this server (repeatable; *: any origin; none:
    no page)
    """

    @field_validator("max_unfinished_bytes")
    @classmethod
    def _check_holds_one_body(cls, num_bytes: int, info: ValidationInfo) -> int:
        body_bytes = info.data.get("max_body_bytes", 0)
        if num_bytes < body_bytes:
            raise ValueError(
                f"{num_bytes} is less than --max-body-bytes {body_bytes}, the maximum "
                "of one body; give at least that number"
            )
        return num_bytes


class WaitOptions(Options):
    """Limits on the time in the waiting queue."""

    topic: ClassVar[str] = "http"
    max_queue_s: Seconds = 30.0
    """maximum predicted time until a new request is served (s). Beyond this time, new
    requests are refused with 429
    """


class QueueOptions(WaitOptions):
    topic: ClassVar[str] = "http"
    max_queued_tokens: int = Field(2**20, ge=1, le=2**40)
    """maximum number of prompt tokens in the waiting queue. A prompt counts as at least
    64 tokens per choice (tokens)
    """


class ServerOptions(QueueOptions, ListenOptions):
    """The options of a prefill or decode server that concern neither its model nor its
    KV.
    """

    topic: ClassVar[str] = "members"
    cluster_secret: SecretStr | None = Field(None, min_length=MIN_SECRET_BYTES)
    """secret that the servers of a cluster share. Prefer the variable
    BATON_CLUSTER_SECRET (None: the file ~/.cache/baton/cluster-secret, which is created
    at first use; only possible on a single machine)"""
    threads: Threads | None = None
    """CPU threads of one rank (threads; None: the number of cores divided by --tp)"""
    hang_timeout_s: Seconds = 300.0
    """how long an engine that has work may report no progress (s). After this time the
    server exits
    """

    @field_validator("cluster_secret")
    @classmethod
    def _check_is_configured(
        cls, secret: SecretStr | None, info: ValidationInfo
    ) -> SecretStr | None:
        if secret is None and (host := info.data.get("host")):
            check_is_local(host, f"--host {host}")
        return secret


class RegisterOptions(ServerOptions):
    """Registration of a server with proxies."""

    topic: ClassVar[str] = "members"
    advertise_url: sources.Url | None = None
    """URL at which proxies reach this server (None: derived from --host and --port)"""
    # The field is not called `register`, because pydantic models have a method of this
    # name.
    register_with: sources.Listed[sources.Url] = Field((), alias="register")
    """URL of a proxy to register with. If its host name has several addresses, the
    server registers with a proxy at each address (repeatable)
    """
    register_ttl_s: float = Field(30.0, ge=MIN_TTL_S, le=MAX_TTL_S)
    """how long a proxy keeps this server without a new registration (s). The server
    registers again after a third of this time
    """

    @field_validator("register_with")
    @classmethod
    def _check_can_register(
        cls, urls: tuple[str, ...], info: ValidationInfo
    ) -> tuple[str, ...]:
        if (
            not urls
            or not {"host", "cluster_secret", "advertise_url"} <= info.data.keys()
        ):
            return urls
        if info.data["cluster_secret"] is None:
            raise ValueError(
                f"{urls[0]} accepts signed registrations only: give this server and "
                "the proxy the same BATON_CLUSTER_SECRET (openssl rand -hex 32)"
            )
        check_advertised(info.data["advertise_url"] or http_url(info.data["host"], 1))
        return urls


class RoutingOptions(WaitOptions):
    topic: ClassVar[str] = "routing"
    api_keys_file: str | None = Field(None, min_length=1)
    """file of API keys with one JSON object per line (docs/deployment.md). The file is
    read again when it changes
    """
    routing: Literal["auto", "least_loaded", "round_robin"] = "auto"
    """how the proxy chooses servers. auto: by cached prefixes and load; least_loaded:
    by load; round_robin: in turn
    """
    prefix_blocks: int = Field(250_000, ge=0, le=100_000_000)
    """number of blocks of prompt text, 512 bytes each, that the proxy remembers to find
    cached prefixes. A block takes about 200 bytes of memory
    """
    max_resumes: int = Field(3, ge=0, le=100)
    """how many times a stream may lose its decode server and continue on another decode
    server (0: the stream ends)
    """
    resume_wait_s: Seconds | None = None
    """how long a request that has lost its decode server waits until a decode server is
    ready. A new request waits, too, but at most --max-queue-s (s; None: streams wait 3,
    and other requests do not; with the restarts of `baton up` or `baton serve` 300)
    """
    ui: bool = True
    """serve a web page with the state of the cluster at / of the proxy"""
    max_in_flight: int = Field(4096, ge=1, le=2**20)
    """maximum number of requests that the proxy has in flight. Beyond this number, new
    requests are refused with 429
    """


class DisaggregationOptions(Options):
    """Options that decide when prefill servers compute prompts for decode servers."""

    topic: ClassVar[str] = "routing"
    disaggregate: Literal["always", "auto", "never"] = "always"
    """when prefill servers compute prompts. always: for every request; auto: unless the
    decode server would be faster; never: decode servers compute all prompts
    """
    itl_target_s: Seconds = 0.025
    """target time between the tokens of a stream while its decode server computes
    prompts, for servers that do not report a target (s)
    """
