"""Whether a server can be sent requests: pure, with the clock as an argument.

Two judgements are independent of each other:
- *ready*: what the server answers at GET /ready. A connection error takes it back.
- *circuit*: how requests to the server ended. A server may report ready and still fail.

    CLOSED --`FAILURES` in a row--> OPEN --cooldown--> HALF-OPEN --trial ok--> CLOSED
                                      ^--------trial fails------'
                                         (longer cooldown)

An open circuit only moves a server to the end of the queue. Requests that make any
server fail must not be able to take the service down for everybody.
"""

from dataclasses import dataclass, replace

from proxy.placement.speed import StepTotals

SILENCES = 3  # unanswered health checks in a row that make a server not ready
# After this many, the server will not answer its earlier requests either.
LONG_SILENCE = 10
MAX_PAUSE = 5.0  # times the usual interval, between checks of a silent server
FAILURES = 5  # in a row, that open the circuit
COOLDOWN_S = 5.0  # doubles with each failed trial
MAX_COOLDOWN_S = 60.0
# A report without these leaves the earlier values in place.
_STICKY_FIELDS = ("room", "models", "kv_digest")
CIRCUITS = ("closed", "half_open", "open")  # the metric's values are the positions


@dataclass(frozen=True)
class Room:
    """The largest request that a server accepts. None: not reported.

    Attributes:
        max_model_len: tokens of one sequence.
        max_num_seqs: sequences of one request.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None

    def holds(self, num_tokens: int, num_choices: int) -> bool:
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
        room: None if not reported, as while the server starts.
        capacity: tokens of KV.
        itl_target_s: limit for a step with streams.
        answered: False if no connection could be opened.
        models: names of the models that it serves; empty if not reported.
        kv_digest: decides whose KV the server can read; see protocol.handshake.
        is_foreign: it speaks vLLM's dialect.
        is_bare: it requires API keys, and reports no details without one.
        is_both: it takes either leg of a request.
        side_channel: None if other servers cannot subscribe to its KV.
        subscribes: it can subscribe to the KV of a prompt that another server computes.
    """

    ready: bool
    reason: str = ""
    room: Room | None = None
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


@dataclass(frozen=True)
class Health(HealthReport):
    """The state of one server: its last report, and how its requests ended.

    Times are seconds of the caller's monotonic clock.

    Attributes:
        silences: unanswered health checks in a row.
        misses: these, and those that found no connection.
        changed_at: when a connection error last took readiness back.
        failures: failed requests in a row.
        openings: how often the circuit was opened since it was last closed.
        open_until: None if the circuit is closed.
        trial_until: a trial without a result by then is forgotten.
    """

    ready: bool = False
    reason: str = "not checked yet"
    room: Room = Room()
    silences: int = 0
    misses: int = 0
    changed_at: float = float("-inf")
    failures: int = 0
    openings: int = 0
    open_until: float | None = None
    trial_until: float = float("-inf")


def polled(health: Health, report: HealthReport, started_at: float) -> Health:
    """Apply the answer to a health check.

    An answer to a check that started before the last failure is void.
    """
    if report.ready and started_at < health.changed_at:
        return health
    if not report.answered:
        return replace(
            health,
            ready=report.ready,
            reason=report.reason,
            misses=health.misses + 1,
            silences=0,
        )
    changes = dict(vars(report))
    for name in _STICKY_FIELDS:
        changes[name] = getattr(report, name) or getattr(health, name)
    if report.ready:
        changes["reason"] = ""
    return replace(health, **changes, silences=0, misses=0)


def silent(health: Health, reason: str) -> Health:
    """Apply a health check without an answer.

    A server that is merely busy stays ready for a while.
    """
    health = replace(health, silences=health.silences + 1, misses=health.misses + 1)
    if health.ready and health.silences < SILENCES:
        return health
    return replace(health, ready=False, reason=reason)


def unreachable(health: Health, reason: str, now: float) -> Health:
    """Apply a connection error: not ready until a later health check succeeds."""
    return replace(health, ready=False, reason=reason, changed_at=now)


def failed(health: Health, now: float) -> Health:
    """Apply a request that failed through the server's fault."""
    failures = health.failures + 1
    is_open = health.open_until is not None and now < health.open_until
    if is_open or (health.open_until is None and failures < FAILURES):
        # If the circuit is open, the request was sent before that, or there was no
        # other server.
        return replace(health, failures=failures)
    cooldown_s = min(COOLDOWN_S * 2**health.openings, MAX_COOLDOWN_S)
    return replace(
        health,
        failures=failures,
        openings=min(health.openings + 1, 32),
        open_until=now + cooldown_s,
        trial_until=float("-inf"),
    )


def succeeded(health: Health) -> Health:
    """Apply a request that ended well."""
    if health.failures == 0 and health.open_until is None:
        return health
    return replace(
        health, failures=0, openings=0, open_until=None, trial_until=float("-inf")
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
    """Return the time until the next check.

    It is longer for a server that has not answered for a while.
    """
    beyond = min(max(health.misses - LONG_SILENCE, 0), 8)
    return interval_s * min(2.0**beyond, MAX_PAUSE)


def began(health: Health, now: float) -> Health:
    """Apply a request that is sent to the server.

    In a half-open circuit this request is the trial.
    """
    if health.open_until is None or now < health.open_until:
        return health
    return replace(health, trial_until=now + COOLDOWN_S)
