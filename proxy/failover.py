"""Failover of a request: which decode server may continue an answer that broke off."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from protocol.errors import BatonError
from protocol.metrics import Metrics
from protocol.process.logging import get_logger
from protocol.resume import HEADER as FRAMES_HEADER
from protocol.resume import frames_request
from protocol.settings.machine import cluster_secret
from protocol.settings.settings import ProxySettings
from proxy.membership import Server
from proxy.relay import Reply
from proxy.upstream import Failure, Headers, as_text

logger = get_logger(__name__)

MAX_MOVES = 16  # servers hand one stream over at most this many times
LOSS_REASONS = [
    failure for failure in Failure if failure not in (Failure.UNREACHABLE, Failure.FULL)
]
# Values of the label `outcome` of the metric baton_proxy_resumes.
OUTCOMES = ("resumed", "lost_again", "failed", "limit_reached", "not_resumable")


@dataclass(eq=False)
class UpstreamLost(Exception):
    """A decode server did not complete an answer: it failed, or handed the answer over.

    Attributes:
        error: the client gets this error if no other server continues.
        event: the server's own error event. A client with part of the answer gets this
            event instead of `error`. None: the server sent no error event.
        has_begun: the client has part of the answer.
        params: kv_transfer_params of the KV that the server lends to the server that
            continues; None if it lends none.
    """

    error: BatonError
    reason: Failure
    server: Server
    event: bytes | None
    has_begun: bool
    params: msgspec.Raw | None


class FailoverState:
    """The servers that failed one request, and whether another may continue the answer.

    Args:
        limit: how many servers may fail during the request. Servers that hand the
            request over do not count.
        secret: secret of the cluster; if empty, a stream that has begun cannot continue
            at another server.

    Attributes:
        avoided: servers that get the request only if no other server is ready.
        is_enabled: True if another server may continue the answer: the request
            generates tokens, and `max_resumes` is above 0.
    """

    def __init__(
        self, reply: Reply, metrics: Metrics, limit: int, secret: bytes
    ) -> None:
        self._reply = reply
        self._metrics = metrics
        self._limit = limit
        self._secret = secret
        self.avoided: list[Server] = []
        self.is_enabled = False
        # Reason of the last loss, until its outcome is counted.
        self._uncounted_reason: str | None = None
        # Number of servers that received the request and failed without being lost.
        self._num_failures = 0

    @property
    def num_losses(self) -> int:
        """Number of servers that were lost, or that handed the request over."""
        return self._reply.trace.num_lost + self._reply.trace.num_moved

    def max_deliveries(self) -> int:
        """Return how many more servers may receive the request and fail to answer."""
        num_used = self._reply.trace.num_lost + self._num_failures
        return max(1, 1 + self._limit - num_used)

    def count_and_check_retry(self, failure: Failure | None) -> bool:
        """Return whether the request may be retried after a server's failure.

        The method counts a Failure.ERROR towards the limit. RequestTrace.num_lost
        already counts lost servers.
        """
        if failure is Failure.ERROR:
            self._num_failures += 1
        if failure is Failure.TIMEOUT:
            return False
        return self._reply.trace.num_lost + self._num_failures <= self._limit

    def headers(self) -> Headers:
        """Return the header that requests the answer as a stream in frames.

        Only a stream in frames can fail over. Without failover, there is no header.
        """
        if not (self._secret and self.is_enabled):
            return ()
        # The signature covers the bytes of the request id that the server receives.
        request_id = as_text(self._reply.request_id).encode()
        return [(FRAMES_HEADER.encode(), frames_request(self._secret, request_id))]

    def signed_frames(self) -> bytes | None:
        """Return the signed frames of the stream so far; None if there are none."""
        return (
            self._reply.frame_history.sign(self._secret)
            if self._reply.frame_history
            else None
        )

    def count_and_check_failover(
        self, loss: UpstreamLost, servers: Iterable[Server]
    ) -> bool:
        """Count a loss; return whether another server may continue.

        The server that did not complete the answer, and those of `servers` that would
        refuse to continue, are added to `avoided`.
        """
        self.count_outcome("lost_again")
        self._uncounted_reason = loss.reason.value
        health = loss.server.health
        trace = self._reply.trace
        if trace.num_lost > self._limit or trace.num_moved > MAX_MOVES:
            self.count_outcome("limit_reached")
            return False
        is_incomplete = loss.has_begun and not self._reply.frame_history.is_complete
        if health.is_foreign or is_incomplete:
            self.count_outcome("not_resumable")
            return False
        # Servers of another model or dtype would refuse to continue the stream.
        self.avoided += [
            server
            for server in servers
            if server is loss.server or server.health.kv_digest != health.kv_digest
        ]
        return True

    def count_outcome(self, outcome: str) -> None:
        """Count the outcome of the last loss, unless it is counted already."""
        reason = self._uncounted_reason
        self._uncounted_reason = None
        if reason is not None:
            self._metrics.inc("baton_proxy_resumes", reason=reason, outcome=outcome)


def signing_secret(settings: ProxySettings) -> bytes:
    """Return the cluster secret; if there is none, log a warning and return b"".

    The proxy uses the secret to sign the hints that name servers to each other, and the
    requests for streams that can continue at another server.
    """
    try:
        return cluster_secret(settings.cluster_secret)
    except (OSError, ValueError) as error:
        logger.warning(
            "No cluster secret: prefill and decode run one after the other, and "
            "streams cannot fail over: %s",
            error,
        )
        return b""
