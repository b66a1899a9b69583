"""Whether a server can be sent requests: pure, with the clock as an argument.

Two independent judgements:
- *ready*: the server's own word at GET /ready, taken back at once by a connection error.
- *circuit*: what became of the requests it was given, for a server that says ready and is not.

    CLOSED --`failures` in a row--> OPEN --cooldown--> HALF_OPEN --one trial succeeds--> CLOSED
                                      ^-----------------the trial fails-----'  (longer cooldown)

An open circuit only moves a server to the end of the queue: requests that make any server fail
must not be able to close the service for everybody.
"""

from dataclasses import dataclass, replace
from enum import Enum

from proxy.knowledge import Totals


class Circuit(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True)
class HealthPolicy:
    silences: int = 3  # health checks without an answer, in a row, that make a server not ready
    long_silence: int = 10  # so many of them: it will not answer what it was asked before either
    failures: int = 5  # in a row
    cooldown_s: float = 5.0  # doubles with each failed trial
    max_cooldown_s: float = 60.0


POLICY = HealthPolicy()


@dataclass(frozen=True)
class Room:
    """What one request may take of a server at most. None: it never said."""

    max_model_len: int | None = None  # tokens
    max_num_seqs: int | None = None

    def holds(self, num_tokens: int, num_choices: int) -> bool:
        """False where the server is known to refuse so much."""
        wanted = ((num_tokens, self.max_model_len), (num_choices, self.max_num_seqs))
        return all(limit is None or amount <= limit for amount, limit in wanted)


@dataclass(frozen=True)
class Said:
    """What a server answered to a health check."""

    ready: bool
    reason: str = ""  # why it is not
    room: Room | None = None  # None: it did not say, as while it starts
    capacity: int | None = None  # tokens of KV
    totals: Totals | None = None


@dataclass(frozen=True)
class Health:
    """One server's state. Times are seconds of the caller's monotonic clock."""

    ready: bool = False
    reason: str = "not checked yet"  # why it is not ready
    room: Room = Room()
    silences: int = 0  # health checks without an answer, in a row
    changed_at: float = float("-inf")  # when a connection error took readiness back
    failures: int = 0  # in a row
    openings: int = 0  # of the circuit, since it was last closed
    open_until: float | None = None  # None: the circuit is closed
    trial_until: float = float("-inf")  # a trial that has not reported by then is forgotten


def polled(health: Health, said: Said, started_at: float) -> Health:
    """The answer to a health check begun at `started_at`; one older than a failure is void."""
    if said.ready and started_at < health.changed_at:
        return health
    reason, room = "" if said.ready else said.reason, said.room or health.room
    return replace(health, ready=said.ready, reason=reason, silences=0, room=room)


def silent(health: Health, reason: str, policy: HealthPolicy) -> Health:
    """A health check got no answer in time: one that is merely busy stays ready for a while."""
    silences = health.silences + 1
    if health.ready and silences < policy.silences:
        return replace(health, silences=silences)
    return replace(health, ready=False, reason=reason, silences=silences)


def unreachable(health: Health, reason: str, now: float) -> Health:
    """A connection failed or broke: not ready until a later health check says so."""
    return replace(health, ready=False, reason=reason, changed_at=now)


def failed(health: Health, now: float, policy: HealthPolicy) -> Health:
    """A request that the server was given came to nothing through the server's fault."""
    failures = health.failures + 1
    if health.open_until is None and failures < policy.failures:
        return replace(health, failures=failures)
    if circuit(health, now) is Circuit.OPEN:
        return replace(health, failures=failures)  # sent before it opened, or for want of others
    cooldown_s = min(policy.cooldown_s * 2**health.openings, policy.max_cooldown_s)
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
    return replace(health, failures=0, openings=0, open_until=None, trial_until=float("-inf"))


def circuit(health: Health, now: float) -> Circuit:
    if health.open_until is None:
        return Circuit.CLOSED
    return Circuit.OPEN if now < health.open_until else Circuit.HALF_OPEN


def admits(health: Health, now: float) -> bool:
    """Whether the circuit lets one more request through."""
    state = circuit(health, now)
    return state is Circuit.CLOSED or (state is Circuit.HALF_OPEN and now >= health.trial_until)


def began(health: Health, now: float, policy: HealthPolicy) -> Health:
    """A request goes to the server; in a half-open circuit it is the trial."""
    if circuit(health, now) is not Circuit.HALF_OPEN:
        return health
    return replace(health, trial_until=now + policy.cooldown_s)
