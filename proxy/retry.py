"""Whether a failed leg is tried on another server: pure.

Asked only while nothing has been sent to the client. A request that was delivered and not answered
may be what killed the server, so it goes to at most `max_deliveries` servers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from protocol.errors import EngineDied


class Kind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Failure(Enum):
    UNREACHABLE = "unreachable"  # nothing was delivered
    LOST = "lost"  # delivered; the connection ended before the answer's head
    TIMEOUT = "timeout"  # delivered; silent for too long
    BUSY = "busy"  # 503: refused, or handed back
    DIED = "died"  # 503: delivered; the server's engine ended before there was an answer
    ERROR = "error"  # any other 5xx


@dataclass(frozen=True)
class RetryPolicy:
    max_deliveries: int = 2


_RETRIED = {
    # A prefill is repeatable: its only effect is a lease, which is given back.
    Kind.PREFILL: frozenset(Failure),
    # Another decode server may use the same lease. A timeout is not repeated: the client would
    # wait for another one. Nor is a decode server's own error: it has its failure policy.
    Kind.DECODE: frozenset({Failure.UNREACHABLE, Failure.LOST, Failure.BUSY, Failure.DIED}),
}
_DELIVERED = frozenset({Failure.LOST, Failure.TIMEOUT, Failure.DIED, Failure.ERROR})


def failure_of_status(status: int, code: str = "") -> Failure | None:
    """What an HTTP status, and the code of a 503, say about the server; None: it is an answer, to
    be relayed."""
    if status < 500:
        return None
    if status != 503:
        return Failure.ERROR
    return Failure.DIED if code == EngineDied.code else Failure.BUSY


def may_retry(kind: Kind, failures: Sequence[Failure], policy: RetryPolicy) -> bool:
    """Whether to try another server after `failures`, the last of which is new."""
    delivered = sum(failure in _DELIVERED for failure in failures)
    return failures[-1] in _RETRIED[kind] and delivered < policy.max_deliveries


def trips_breaker(failure: Failure, status: int | None) -> bool:
    """Whether the failure counts against the server.

    Not: a refusal (the server is well and full), nor 502 and 504 (its peer's fault). A lost or
    refused connection takes the server out until its next health check instead.
    """
    return failure is Failure.TIMEOUT or (failure is Failure.ERROR and status not in (502, 504))
