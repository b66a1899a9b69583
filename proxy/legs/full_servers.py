"""Remembers which servers have full queues, so that they are sent fewer requests."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from protocol.errors import MAX_RETRY_AFTER_S, GrammarQueueFull
from proxy.body import error_of
from proxy.errors import queues_full
from proxy.membership import Kind, Server
from proxy.placement.load_tracker import LoadTracker
from proxy.placement.request_profile import RequestProfile
from proxy.upstream import Response

MAX_REFUSAL_S = 1.0  # a refusal is remembered for at most this long
_DEFAULT_RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class Refusal:
    """A server's 429. Times are seconds of time.monotonic.

    Attributes:
        until: before this time the server gets no request that is at least as long as
            the refused request and not more urgent.
        retry_at: when the server should have capacity again.
        priority: priority of the refused request; smaller is more urgent.
        tokens: prompt tokens of the refused request.
        is_grammar_queue: only the queue for trial compilations of new schemas is full,
            so requests without a new schema are not refused.
    """

    until: float
    retry_at: float
    priority: int
    tokens: int
    is_grammar_queue: bool = False

    def applies_to(self, profile: RequestProfile, priority: int, now: float) -> bool:
        """Return whether the server would probably refuse this request now."""
        if now >= self.until:
            return False
        return priority >= self.priority and profile.tokens >= self.tokens


class FullServers:
    """The recent refusals of all servers.

    Args:
        max_queue_s: servers without admission control count as full if all their
            estimated waits are longer than this.
    """

    def __init__(self, load_tracker: LoadTracker, max_queue_s: float) -> None:
        self._load_tracker = load_tracker
        self._max_queue_s = max_queue_s
        self._refusals = WeakKeyDictionary[Server, Refusal]()

    def check_capacity(
        self,
        kind: Kind,
        profile: RequestProfile,
        priority: int,
        servers: Sequence[Server],
    ) -> list[Server]:
        """Return those of `servers` that are full.

        A server is full if it recently refused a similar request. Servers without
        admission control, such as vLLM's, are full if no other server is left and the
        proxy estimates a long queue at each of them. A Baton server has admission
        control: it measures its queue and refuses requests itself.

        Raises:
            QueueFull: all of `servers` are full.
        """
        now = time.monotonic()
        if not any(now < refusal.until for refusal in self._refusals.values()):
            self._refusals.clear()
        waits_s: dict[Server, float] = {}
        for server in servers if self._refusals else ():
            refusal = self._refusals.get(server)
            if refusal is not None and refusal.applies_to(profile, priority, now):
                waits_s[server] = refusal.retry_at - now
        if kind is Kind.PREFILL and priority >= 0:
            others = [server for server in servers if server not in waits_s]
            waits_s |= self._estimated_waits(others)
        if servers and len(waits_s) == len(servers):
            raise queues_full(kind.value, min(waits_s.values()))
        return list(waits_s)

    def _estimated_waits(self, servers: Sequence[Server]) -> dict[Server, float]:
        """Return the seconds after which each server may be tried again.

        The result is empty unless all servers have long queues by this proxy's
        estimate. It is also empty if one of them is a Baton server, because such a
        server measures its queue and refuses requests itself.
        """
        estimates_s = {
            server: self._load_tracker.wait_s(server)
            for server in servers
            if server.health.is_foreign
        }
        if len(estimates_s) < len(servers):
            return {}
        if min(estimates_s.values(), default=0.0) <= self._max_queue_s:
            return {}
        return {
            server: wait_s - self._max_queue_s / 2
            for server, wait_s in estimates_s.items()
        }

    def record(
        self,
        server: Server,
        response: Response,
        profile: RequestProfile | None,
        priority: int,
    ) -> Refusal:
        """Return a server's 429 as a Refusal, and remember it for similar requests.

        A full queue for trial compilations is not remembered, because it does not
        concern requests without a new schema.
        """
        retry_after = dict(response.headers).get(b"retry-after", b"")
        wait_s = _DEFAULT_RETRY_AFTER_S
        if retry_after.isdigit():
            wait_s = min(float(retry_after[:6]), MAX_RETRY_AFTER_S)
        now = time.monotonic()
        tokens = profile.tokens if profile else sys.maxsize
        if error_of(response.body or b"", "phase") == GrammarQueueFull.phase:
            return Refusal(now, now + wait_s, priority, tokens, is_grammar_queue=True)
        before = self._refusals.get(server)
        if before is not None and now < before.until:
            # The earlier refusal is still valid, so both refusals apply.
            priority = min(priority, before.priority)
            tokens = min(tokens, before.tokens)
        until = now + min(MAX_REFUSAL_S, wait_s, self._max_queue_s / 4)
        refusal = Refusal(until, now + wait_s, priority, tokens)
        self._refusals[server] = refusal
        return refusal
