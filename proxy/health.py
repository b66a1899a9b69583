"""Whether a server can be sent requests: pure, with the clock as an argument.

Two independent judgements:
- *ready*: the server's own word at GET /ready, taken back at once by a connection error.
- *circuit*: what became of the requests it was given, for a server that says ready and is not.

    CLOSED --`FAILURES` in a row--> OPEN --cooldown--> HALF-OPEN --one trial succeeds--> CLOSED
                                      ^-----------------the trial fails-----'  (longer cooldown)

An open circuit only moves a server to the end of the queue: requests that make any server fail
must not be able to close the service for everybody.
"""

from dataclasses import dataclass, replace

from proxy.knowledge import Totals

SILENCES = 3  # health checks without an answer, in a row, that make a server not ready
LONG_SILENCE = 10  # so many of them: it will not answer what it was asked before either
MAX_PAUSE = (
    5.0  # of the usual interval, between checks of a server that answers nothing
)
FAILURES = 5  # in a row, that open the circuit
COOLDOWN_S = 5.0  # doubles with each failed trial
MAX_COOLDOWN_S = 60.0
_KEPT = ("room", "models", "kv_digest")  # where a server does not say
CIRCUITS = ("closed", "half_open", "open")  # by number in the metric


@dataclass(frozen=True)
class Room:
    """What one request may take of a server at most. None: it never said."""

    max_model_len: int | None = None  # tokens
    max_num_seqs: int | None = None

    def holds(self, num_tokens: int, num_choices: int) -> bool:
        """False where the server is known to refuse so much."""
        length, choices = self.max_model_len, self.max_num_seqs
        return (length is None or num_tokens <= length) and (
            choices is None or num_choices <= choices
        )


@dataclass(frozen=True)
class SideChannel:
    """Where a server's engine tells others of its KV."""

    engine_id: str
    incarnation: str
    host: str  # empty: that of its URL
    port: int


@dataclass(frozen=True)
class Said:
    """What a server answered to a health check."""

    ready: bool
    reason: str = ""  # why it is not
    room: Room | None = None  # None: it did not say, as while it starts
    capacity: int | None = None  # tokens of KV
    totals: Totals | None = None
    itl_target_s: float | None = None
    answered: bool = True  # False: no connection could be had
    models: tuple[str, ...] = ()  # names that it serves; none: it did not say
    kv_digest: str = ""  # what other servers' KV must agree in; see protocol.handshake
    is_foreign: bool = False  # it speaks vLLM's dialect
    is_bare: bool = False  # it has API keys, and says no more to who asks
    is_both: bool = False  # it takes either leg of a request
    side_channel: SideChannel | None = None  # None: it cannot be subscribed to
    subscribes: bool = False  # to the KV of a prompt that another server computes


@dataclass(frozen=True)
class Health(Said):
    """One server's state: what it said last, room, models and digest whenever that was. Times are
    seconds of the caller's monotonic clock."""

    ready: bool = False
    reason: str = "not checked yet"
    room: Room = Room()
    silences: int = 0  # health checks without an answer, in a row
    misses: int = 0  # those, and those that found no connection
    changed_at: float = float("-inf")  # when a connection error took readiness back
    failures: int = 0  # in a row
    openings: int = 0  # of the circuit, since it was last closed
    open_until: float | None = None  # None: the circuit is closed
    trial_until: float = float(
        "-inf"
    )  # a trial that has not reported by then is forgotten


def polled(health: Health, said: Said, started_at: float) -> Health:
    """The answer to a health check begun at `started_at`; one older than a failure is void."""
    if said.ready and started_at < health.changed_at:
        return health
    if not said.answered:
        new = replace(
            health, ready=said.ready, reason=said.reason, misses=health.misses + 1
        )
        return replace(new, silences=0)
    kept = {name: getattr(said, name) or getattr(health, name) for name in _KEPT}
    told = {**vars(said), **kept, "reason": "" if said.ready else said.reason}
    return replace(health, **told, silences=0, misses=0)


def silent(health: Health, reason: str) -> Health:
    """A health check got no answer in time: one that is merely busy stays ready for a while."""
    health = replace(health, silences=health.silences + 1, misses=health.misses + 1)
    if health.ready and health.silences < SILENCES:
        return health
    return replace(health, ready=False, reason=reason)


def unreachable(health: Health, reason: str, now: float) -> Health:
    """A connection failed or broke: not ready until a later health check says so."""
    return replace(health, ready=False, reason=reason, changed_at=now)


def failed(health: Health, now: float) -> Health:
    """A request that the server was given came to nothing through the server's fault."""
    failures = health.failures + 1
    is_open = health.open_until is not None and now < health.open_until
    if is_open or (health.open_until is None and failures < FAILURES):
        return replace(
            health, failures=failures
        )  # open: sent before that, or for want of others
    cooldown_s = min(COOLDOWN_S * 2**health.openings, MAX_COOLDOWN_S)
    return replace(
        health,
        failures=failures,
        openings=min(health.openings + 1, 32),
        open_until=now + cooldown_s,
        trial_until=float("-inf"),
    )


def succeeded(health: Health) -> Health:
    """A request that the server was given ended well."""
    if health.failures == 0 and health.open_until is None:
        return health
    return replace(
        health, failures=0, openings=0, open_until=None, trial_until=float("-inf")
    )


def admits(health: Health, now: float) -> bool:
    """Whether the circuit lets one more request through."""
    return health.open_until is None or now >= max(
        health.open_until, health.trial_until
    )


def circuit(health: Health, now: float) -> str:
    """One of CIRCUITS."""
    if health.open_until is None:
        return "closed"
    return "open" if now < health.open_until else "half_open"


def pause_s(health: Health, interval_s: float) -> float:
    """Until the next check: longer for a server that has answered none for a while."""
    beyond = min(max(health.misses - LONG_SILENCE, 0), 8)
    return interval_s * min(2.0**beyond, MAX_PAUSE)


def began(health: Health, now: float) -> Health:
    """A request goes to the server; in a half-open circuit it is the trial."""
    if health.open_until is None or now < health.open_until:
        return health
    return replace(health, trial_until=now + COOLDOWN_S)
