"""Metric series of legs that exist before their first event."""

from collections.abc import Iterator

from protocol.errors import BatonError, RequestError
from proxy.errors import MethodNotAllowed
from proxy.membership import Kind
from proxy.relay import LOSS_REASONS
from proxy.upstream import Failure

# All reasons for which a server fails. A stream that was migrated is no failure.
_FAILURES = [failure for failure in Failure if failure.value != "moved"]


def known_series() -> Iterator[tuple[str, dict[str, str]]]:
    """Return the series with labels that are exposed from the start, with the value 0.

    `rate()` and `increase()` do not see the event with which a series appears, and an
    event that alerts wait for may happen only once.
    """
    refusals = sorted(_statuses(RequestError) - {MethodNotAllowed.status})
    alone = ["placed", "incompatible", "no_prefill_server", "no_kv_params"]
    unfit = ["prefill_body", "prefill_context", "prefill_choices", "decode_choices"]
    ways = {
        "pd": ["routed"],
        "prefill": ["scored", *(f"status_{status}" for status in refusals)],
        "decode_only": [*alone, *unfit, *(failure.value for failure in _FAILURES)],
    }
    for path, reasons in ways.items():
        for reason in reasons:
            yield "baton_proxy_requests", {"path": path, "reason": reason}
    for status in (*sorted({200, *_statuses(BatonError)}), "broken", "none"):
        yield "baton_proxy_responses", {"status": str(status)}
    for kind in Kind:
        yield "baton_proxy_retries", {"leg": kind.value}
        yield "baton_proxy_hints", {"leg": kind.value}
        for failure in _FAILURES:
            labels = {"leg": kind.value, "reason": failure.value}
            yield "baton_proxy_upstream_failures", labels
    for failure in LOSS_REASONS:
        for outcome in (
            "resumed",
            "lost_again",
            "failed",
            "limit_reached",
            "not_resumable",
        ):
            yield "baton_proxy_resumes", {"reason": failure.value, "outcome": outcome}


def _statuses(root: type[BatonError]) -> set[int]:
    """Return the HTTP statuses of the errors below `root`, including the proxy's."""
    below = [_statuses(kind) for kind in root.__subclasses__()]
    return {root.status}.union(*below)
