"""Pure functions for the health of a server; the current time is an argument.

The health decides which requests a server gets. It has two independent states:
- *ready*: whether the last answer to GET /ready reported that the server is ready. A
  connection error makes the server not ready until a later health check succeeds.
- *circuit*: a circuit breaker, which opens when requests to the server fail. A ready
  server may still fail requests.

    CLOSED --`FAILURES` in a row--> OPEN --cooldown--> HALF-OPEN --trial ok--> CLOSED
                                      ^--------trial fails------'
                                         (longer cooldown)

A server with an open circuit still gets requests if there is no other server. Otherwise
requests that make any server fail could take the service down for all clients.
"""

from dataclasses import dataclass, replace

from protocol.messages import HostTierReport
from proxy.placement.speed import StepTotals

SILENCES = 3  # unanswered health checks in a row that make a server not ready
# After this many unanswered health checks in a row, the proxy assumes that the server
# will not answer the requests that it already has.
LONG_SILENCE = 10
MAX_PAUSE = 5.0  # longest pause between checks, as a multiple of the usual interval
FAILURES = 5  # failed requests in a row that open the circuit
COOLDOWN_S = 5.0  # doubles with each failed trial
MAX_COOLDOWN_S = 60.0
# If a report lacks one of these fields, the earlier value stays.
_STICKY_FIELDS = ("limits", "models", "kv_digest")
CIRCUITS = ("closed", "half_open", "open")  # the metric reports the index in this tuple


@dataclass(frozen=True)
class RequestLimits:
    """The largest request that a server accepts.

    A field is None if the server did not report the limit.

    Attributes:
        max_model_len: tokens of one sequence.
        max_num_seqs: sequences of one request.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None

    def accepts(self, num_tokens: int, num_choices: int) -> bool:
        """Return False if the server is known to refuse a request of this size."""
        if self.max_model_len is not None and num_tokens > self.max_model_len:
            return False
        return self.max_num_seqs is None or num_choices <= self.max_num_seqs


@dataclass(frozen=True)
class SideChannel:
    """The address at which a server's engine answers other engines' KV requests.

    Attributes:
        host: empty if it is the host of the server's URL.
    """

    engine_id: str
    incarnation: str
    host: str
    port: int


@dataclass(frozen=True)
class HealthReport:
    """A server's answer to a health check.

    Attributes:
        reason: why the server is not ready.
        limits: None if not reported, for example while the server starts.
        capacity: size of the KV cache in tokens.
        totals: counters of the engine's steps; None if not reported.
        itl_target_s: target duration of a step with running streams, in seconds.
        answered: False if the connection failed.
        models: names of the models that the server serves; empty if not reported.
        kv_digest: a digest by which the proxy decides which servers' KV this server can
            read; see protocol.pairing.
        is_foreign: the server speaks vLLM's dialect.
        is_bare: the server requires API keys, and reports no details without a key.
        is_both: the server takes either leg of a request.
        side_channel: None if other servers cannot subscribe to this server's KV.
        subscribes: the server can subscribe to the KV of a prompt while another server
            computes the prompt.
        host_tier: the KV store of the server's host; None if it uses none.
    """

    ready: bool
    reason: str = ""
    limits: RequestLimits | None = None
    capacity: int | None = None
    totals: StepTotals | None = None
    itl_target_s: float | None = None
    answered: bool = True
    models: tuple[str, ...] = ()
    kv_digest: str = ""
    is_foreign: bool = False
    is_bare: bool = False
    is_both: bool = False
    side_channel: SideChannel | None = None
    subscribes: bool = False
    host_tier: HostTierReport | None = None


@dataclass(frozen=True)
class Health(HealthReport):
    """The health of one server: its last report, and how its requests ended.

    Times are seconds of the caller's monotonic clock.

    Attributes:
        num_silences: unanswered health checks in a row.
        num_misses: health checks in a row that were unanswered or found no connection.
        unreachable_at: when a connection error last made the server not ready.
        num_failures: failed requests in a row.
        num_openings: how often the circuit was opened since it was last closed.
        open_until: when the circuit becomes half-open; None if it is closed.
        trial_until: when a trial request without a result is forgotten, so that the
            half-open circuit admits another trial.
    """

    ready: bool = False
    reason: str = "not checked yet"
    limits: RequestLimits = RequestLimits()
    num_silences: int = 0
    num_misses: int = 0
    unreachable_at: float = float("-inf")
    num_failures: int = 0
    num_openings: int = 0
    open_until: float | None = None
    trial_until: float = float("-inf")


def polled(health: Health, report: HealthReport, started_at: float) -> Health:
    """Return the server's health after a health check that did not time out.

    The answer "ready" to a check that started before the last connection error changes
    nothing.
    """
    if report.ready and started_at < health.unreachable_at:
        return health
    if not report.answered:
        return replace(
            health,
            ready=report.ready,
            reason=report.reason,
            num_misses=health.num_misses + 1,
            num_silences=0,
        )
    changes = dict(vars(report))
    for name in _STICKY_FIELDS:
        changes[name] = getattr(report, name) or getattr(health, name)
    if report.ready:
        changes["reason"] = ""
    return replace(health, **changes, num_silences=0, num_misses=0)


def silent(health: Health, reason: str) -> Health:
    """Return the server's health after a health check without an answer.

    A ready server may only be busy, so it stays ready for the first SILENCES - 1 checks
    without an answer.
    """
    health = replace(
        health,
        num_silences=health.num_silences + 1,
        num_misses=health.num_misses + 1,
    )
    if health.ready and health.num_silences < SILENCES:
        return health
    return replace(health, ready=False, reason=reason)


def unreachable(health: Health, reason: str, now: float) -> Health:
    """Return the server's health after a connection error.

    The server is not ready until a later health check succeeds.
    """
    return replace(health, ready=False, reason=reason, unreachable_at=now)


def failed(health: Health, now: float) -> Health:
    """Return the server's health after a request failed through the server's fault."""
    num_failures = health.num_failures + 1
    is_open = health.open_until is not None and now < health.open_until
    if is_open or (health.open_until is None and num_failures < FAILURES):
        # An open circuit stays open: the failed request was sent before the circuit
        # opened, or there was no other server.
        return replace(health, num_failures=num_failures)
    cooldown_s = min(COOLDOWN_S * 2**health.num_openings, MAX_COOLDOWN_S)
    return replace(
        health,
        num_failures=num_failures,
        num_openings=min(health.num_openings + 1, 32),
        open_until=now + cooldown_s,
        trial_until=float("-inf"),
    )


def succeeded(health: Health) -> Health:
    """Return the server's health after a request that was answered."""
    if health.num_failures == 0 and health.open_until is None:
        return health
    return replace(
        health,
        num_failures=0,
        num_openings=0,
        open_until=None,
        trial_until=float("-inf"),
    )


def admits(health: Health, now: float) -> bool:
    """Return whether the circuit admits one more request."""
    if health.open_until is None:
        return True
    return now >= max(health.open_until, health.trial_until)


def circuit(health: Health, now: float) -> str:
    """Return the state of the circuit, one of CIRCUITS."""
    if health.open_until is None:
        return "closed"
    return "open" if now < health.open_until else "half_open"


def pause_s(health: Health, interval_s: float) -> float:
    """Return the time until the next health check.

    After LONG_SILENCE checks in a row without an answer or a connection, the time
    doubles with each such check, up to MAX_PAUSE intervals.
    """
    num_doublings = min(max(health.num_misses - LONG_SILENCE, 0), 8)
    return interval_s * min(2.0**num_doublings, MAX_PAUSE)


def began(health: Health, now: float) -> Health:
    """Return the server's health when the next request is about to be sent.

    In a half-open circuit this request is the trial.
    """
    if health.open_until is None or now < health.open_until:
        return health
    return replace(health, trial_until=now + COOLDOWN_S)
