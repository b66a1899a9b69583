"""Labeled metric series that the proxy exposes from the start, before any event."""

from collections.abc import Iterator

from protocol.errors import BatonError, RequestError
from proxy.errors import MethodNotAllowed
from proxy.failover import LOSS_REASONS, OUTCOMES
from proxy.legs.outcome import DecodeOnlyReason
from proxy.membership import Kind
from proxy.upstream import Failure

_SERVER_FAILURES = [failure for failure in Failure if failure is not Failure.MOVED]


def initial_series() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name and labels of each series that is exposed with 0 from the start.

    Prometheus's `rate()` and `increase()` miss the first event of a series that did not
    exist before. Some alerts depend on an event that may happen only once.
    """
    refusal_statuses = sorted(_statuses(RequestError) - {MethodNotAllowed.status})
    reasons_by_path = {
        "pd": ["routed"],
        "prefill": ["scored", *(f"status_{status}" for status in refusal_statuses)],
        "decode_only": [
            *(reason.value for reason in DecodeOnlyReason),
            *(failure.value for failure in _SERVER_FAILURES),
        ],
    }
    for path, reasons in reasons_by_path.items():
        for reason in reasons:
            yield "baton_proxy_requests", {"path": path, "reason": reason}
    for status in (*sorted({200, *_statuses(BatonError)}), "broken", "none"):
        yield "baton_proxy_responses", {"status": str(status)}
    for kind in Kind:
        yield "baton_proxy_retries", {"leg": kind.value}
        yield "baton_proxy_hints", {"leg": kind.value}
        for failure in _SERVER_FAILURES:
            labels = {"leg": kind.value, "reason": failure.value}
            yield "baton_proxy_upstream_failures", labels
    for reason in LOSS_REASONS:
        for outcome in OUTCOMES:
            labels = {"reason": reason.value, "outcome": outcome}
            yield "baton_proxy_resumes", labels


def _statuses(root: type[BatonError]) -> set[int]:
    """Return the HTTP statuses of `root` and of all errors derived from it."""
    derived = [_statuses(error) for error in root.__subclasses__()]
    return {root.status}.union(*derived)
