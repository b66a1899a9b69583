"""Decides what a server's failure means for that server and for the request."""

from collections.abc import Sequence

from protocol.errors import EngineDied, GrammarQueueFull, QueueFull
from proxy.body import error_of
from proxy.legs.call import MAX_DELIVERIES
from proxy.membership import Kind
from proxy.upstream import Failure

# A decode server that fails in one of these ways counts as lost.
UPSTREAM_LOSSES = frozenset({Failure.LOST, Failure.DIED})
# Failures of a server after it received the request. The request may be the cause.
DELIVERED = frozenset({Failure.LOST, Failure.TIMEOUT, Failure.DIED, Failure.ERROR})
_RETRIED = {
    # A prefill is repeatable: its only effect is a lease, which the proxy releases.
    Kind.PREFILL: frozenset(Failure),
    # Another decode server may use the same lease. A TIMEOUT is not retried, because
    # the client would wait for a second timeout. An ERROR is not retried either: it may
    # be the result of a failed pull with --kv-load-failure-policy fail. With the policy
    # recompute, the server would have computed the prompt itself.
    Kind.DECODE: frozenset(Failure) - {Failure.TIMEOUT, Failure.ERROR},
}
_QUEUE_PHASES = (QueueFull.phase, GrammarQueueFull.phase)


def failure_of(status: int, body: bytes | None = None) -> Failure | None:
    """Return the failure that a response reports; None to relay the response."""
    if status < 500:
        if status != QueueFull.status:
            return None
        is_queue_full = error_of(body or b"", "phase") in _QUEUE_PHASES
        return Failure.FULL if is_queue_full else None
    if status != 503:
        return Failure.ERROR
    has_died = error_of(body or b"") == EngineDied.code
    return Failure.DIED if has_died else Failure.BUSY


def may_retry(
    kind: Kind, failures: Sequence[Failure], max_deliveries: int = MAX_DELIVERIES
) -> bool:
    """Return whether another server may be tried after these failures.

    A request that was delivered and not answered may have crashed the server. After
    `max_deliveries` such failures, no further server is tried.
    """
    num_deliveries = sum(failure in DELIVERED for failure in failures)
    return failures[-1] in _RETRIED[kind] and num_deliveries < max_deliveries


def trips_breaker(failure: Failure, status: int | None) -> bool:
    """Return whether a failure counts towards opening the server's circuit.

    These failures do not count:
    - a refusal with 429 or 503, because the server works;
    - 502 and 504, because they report the failure of another server;
    - a lost or refused connection, because it makes the server not ready anyway, until
      a health check succeeds.
    """
    if failure is Failure.TIMEOUT:
        return True
    return failure is Failure.ERROR and status not in (502, 504)
