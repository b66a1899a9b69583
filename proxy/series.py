"""The series with labels that are known before anything happens.

They are exposed from the start, with 0: `rate()` and `increase()` do not see the event with which a
series appears, and what alerts wait for may happen once.
"""

from collections.abc import Iterable, Iterator

from protocol.errors import BatonError, RequestError
from protocol.metrics import Metrics
from proxy.errors import MethodNotAllowed
from proxy.membership import Server
from proxy.retry import Failure, Kind

_SUCCESS = 200


def expose_from_start(metrics: Metrics, servers: Iterable[Server]) -> None:
    """Exposes what requests and `servers` may add to."""
    for path, reason in _ways():
        metrics.begin("baton_proxy_requests", path=path, reason=reason)
    for status in (*sorted({_SUCCESS, *_statuses(BatonError)}), "broken", "none"):
        metrics.begin("baton_proxy_responses", status=str(status))
    for kind in Kind:
        metrics.begin("baton_proxy_retries", leg=kind.value)
        for failure in Failure:
            metrics.begin("baton_proxy_upstream_failures", leg=kind.value, reason=failure.value)
    for server in servers:
        metrics.begin("baton_proxy_upstream_in_flight", **server.labels)


def _ways() -> Iterator[tuple[str, str]]:
    """Path and reason of requests, as flow.py counts them."""
    yield "pd", "routed"
    yield "prefill", "scored"
    refusals = _statuses(RequestError) - {MethodNotAllowed.status}
    yield from (("prefill", f"status_{status}") for status in sorted(refusals))
    limits = ("prefill_body", "prefill_context", "prefill_choices", "decode_choices")
    reasons = ("no_prefill_server", "no_kv_params", *limits)
    yield from (("decode_only", reason) for reason in reasons)
    yield from (("decode_only", failure.value) for failure in Failure)


def _statuses(root: type[BatonError]) -> set[int]:
    """HTTP statuses of the errors below `root`, the proxy's own among them."""
    below = [_statuses(kind) for kind in root.__subclasses__()]
    return {root.status}.union(*below)
