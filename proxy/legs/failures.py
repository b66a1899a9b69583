"""Failures of legs: which ones are retried, and which ones count against a server."""

from collections.abc import Sequence

from protocol.errors import EngineDied, GrammarQueueFull, QueueFull
from proxy.body import error_of
from proxy.membership import Kind
from proxy.upstream import Failure

MAX_DELIVERIES = 2  # servers that get a request which is not generated

_RETRIED = {
    # A prefill is repeatable: its only effect is a lease, which is given back.
    Kind.PREFILL: frozenset(Failure),
    # Another decode server may use the same lease. A timeout is not repeated, because
    # the client would wait for another one. A decode server's own error is not repeated
    # either, because the server has a failure policy.
    Kind.DECODE: frozenset(Failure) - {Failure.TIMEOUT, Failure.ERROR},
}
# Another decode server may continue after these.
LOSSES = frozenset({Failure.LOST, Failure.DIED})
# The server has received the request.
DELIVERED = frozenset({Failure.LOST, Failure.TIMEOUT, Failure.DIED, Failure.ERROR})
_FULL_PHASES = (QueueFull.phase, GrammarQueueFull.phase)


def failure_of(status: int, body: bytes | None = None) -> Failure | None:
    """Return the failure that an answer shows, or None if it is to be relayed."""
    if status < 500:
        is_full = (
            status == QueueFull.status
            and error_of(body or b"", "phase") in _FULL_PHASES
        )
        return Failure.FULL if is_full else None
    if status != 503:
        return Failure.ERROR
    return Failure.DIED if error_of(body or b"") == EngineDied.code else Failure.BUSY


def may_retry(
    kind: Kind, failures: Sequence[Failure], max_deliveries: int = MAX_DELIVERIES
) -> bool:
    """Return whether to try another server after these failures, the newest last."""
    delivered = sum(failure in DELIVERED for failure in failures)
    return failures[-1] in _RETRIED[kind] and delivered < max_deliveries


def trips_breaker(failure: Failure, status: int | None) -> bool:
    """Return whether the failure counts against the server.

    A refusal does not, because the server is well and full. Nor do 502 and 504, which
    are faults of its peer. A lost or refused connection instead takes the server out
    until its next health check.
    """
    return failure is Failure.TIMEOUT or (
        failure is Failure.ERROR and status not in (502, 504)
    )
