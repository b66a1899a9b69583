"""Sends the legs of requests: tries servers until one answers, and records failures.

A leg is tried on other servers only until its answer begins. PDRequest handles answers
that break off later.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from protocol.errors import QueueFull
from protocol.metrics import Metrics
from protocol.process.logging import get_logger
from proxy.body import error_of
from proxy.errors import queues_full
from proxy.legs.call import MAX_DELIVERIES, Leg, LegFailed, UpstreamCall
from proxy.legs.failures import (
    DELIVERED,
    UPSTREAM_LOSSES,
    failure_of,
    may_retry,
    trips_breaker,
)
from proxy.legs.full_servers import FullServers, Refusal
from proxy.legs.kv_release import KVReleaser
from proxy.legs.pull_hint import HINT_PARAM, pull_hint, with_hint
from proxy.membership import TRUST_COOLDOWN_S, Fleet, Kind, Server
from proxy.placement.assignment import Assignment
from proxy.placement.load_tracker import LoadTracker
from proxy.request_trace import RequestTrace
from proxy.upstream import (
    Failure,
    Headers,
    HttpUpstream,
    Lost,
    OutOfSockets,
    Response,
    Unreachable,
    UpstreamError,
)

logger = get_logger(__name__)

WARN_AFTER_DECODE_ONLY = 50  # number of requests in a row that were not disaggregated

ResultT = TypeVar("ResultT")


@dataclass
class _Attempts:
    """The servers that were tried for one leg, and how they failed."""

    tried: list[Server] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    message: str = ""
    response: Response | None = None

    def error(self, call: UpstreamCall) -> Exception:
        """Return the error of a leg for which no server is left to try."""
        last = self.failures[-1] if self.failures else None
        # A request that a server has already admitted does not need a prefill server.
        is_optional = call.is_admitted and call.kind is Kind.PREFILL
        if self.refusals and last not in DELIVERED and not is_optional:
            retry_at = min(refusal.retry_at for refusal in self.refusals)
            return queues_full(
                call.kind.value,
                retry_at - time.monotonic(),
                is_grammar_queue=all(each.is_grammar_queue for each in self.refusals),
            )
        return LegFailed(self.message, last, self.response)


@dataclass
class Upstreams:
    """Sends the legs of all requests to the fleet's servers.

    Attributes:
        max_queue_s: limit on the estimated wait at servers without admission control.
        max_resumes: how many servers may be lost during one request.
        resume_wait_s: how long a stream that lost its server waits for another one.
        restart_wait_s: how long a request waits for a decode server to become ready, if
            the client has received no part of the answer yet.
        secret: the cluster secret; empty if there is none.
    """

    fleet: Fleet
    upstream: HttpUpstream
    metrics: Metrics
    load_tracker: LoadTracker
    max_queue_s: float = 30.0
    max_resumes: int = 0
    resume_wait_s: float = 0.0
    restart_wait_s: float = 0.0
    secret: bytes = b""

    def __post_init__(self) -> None:
        self.full_servers = FullServers(self.load_tracker, self.max_queue_s)
        self._releaser = KVReleaser(self.upstream)
        # For each server, the timeouts of the requests that wait for the server. The
        # value of a timeout is whether another server could take over its request.
        self._waits = WeakKeyDictionary[Server, dict[asyncio.Timeout, bool]]()
        self.load_tracker.pulls = bool(self.secret)
        # Requests in a row that were not disaggregated. Requests with the reason
        # DecodeOnlyReason.PLACED do not count.
        self._num_decode_only = 0

    async def run(
        self, call: UpstreamCall, trace: RequestTrace, excluded: Sequence[Server] = ()
    ) -> Leg:
        """Return the first response that is not a server's failure.

        Call `close_leg` with the result, whether the response was read or not.

        Args:
            excluded: servers that would probably refuse this leg. They are tried only
                if no other server is ready when this method is called.

        Raises:
            LegFailed: no server is ready, or all servers that may be tried failed.
            QueueFull: the servers refused the request because their queues are full.
        """
        kind = call.kind
        excluded = self._with_full_servers(call, excluded)
        attempts = _Attempts(message=f"no {kind.value} server is ready")
        while server := self._choose(call, [*excluded, *attempts.tried]) or (
            call.untried_last_resort(attempts.tried)
        ):
            if attempts.tried:
                self.metrics.inc("baton_proxy_retries", leg=kind.value)
            attempts.tried.append(server)
            attempt = trace.add_attempt(server.name, kind.value)
            try:
                leg = await self._try_server(server, call.below(attempt), attempts)
            except BaseException:
                trace.end_attempt(attempt, "cancelled")
                raise
            if leg is not None:
                trace.read_report(kind.value, leg.response.headers)
                leg.end_attempt = partial(trace.end_attempt, attempt)
                if not leg.is_open:
                    leg.end_attempt()
                return leg
            trace.end_attempt(attempt, attempts.failures[-1].value)
            if attempts.failures[-1] in UPSTREAM_LOSSES and kind is Kind.DECODE:
                trace.num_lost += 1
            max_deliveries = call.max_deliveries
            if server.health.is_foreign:
                max_deliveries = MAX_DELIVERIES
            if not may_retry(kind, attempts.failures, max_deliveries):
                break
        raise attempts.error(call)

    def _with_full_servers(
        self, call: UpstreamCall, excluded: Sequence[Server]
    ) -> Sequence[Server]:
        """Return `excluded` and the full servers. Raises QueueFull if all are full."""
        if not call.pool.ready(call.kind, excluded):
            excluded = ()
        if call.profile is None or call.is_admitted:
            return excluded
        servers = call.pool.ready(call.kind, excluded)
        full = self.full_servers.check_capacity(
            call.kind, call.profile, call.priority, servers
        )
        return [*excluded, *full]

    def _choose(self, call: UpstreamCall, excluded: Sequence[Server]) -> Server | None:
        choose_server = partial(
            self.load_tracker.choose_server,
            profile=call.profile,
            computes=call.computes,
            generates=call.kind is Kind.DECODE,
            reservation=call.reservation,
        )
        turn_key = (call.profile is None, call.computes, call.transfer_id is None)
        return call.pool.choose(call.kind, excluded, turn_key, choose_server)

    async def _try_server(
        self, server: Server, call: UpstreamCall, attempts: _Attempts
    ) -> Leg | None:
        """Send a leg to one server; on failure, record the failure and return None."""
        failure: Failure | None
        try:
            leg = await self._attempt(server, call)
        except UpstreamError as error:
            attempts.response = None
            failure = error.failure
            detail = str(error)
            message = error.client_message
        else:
            response = leg.response
            attempts.response = response
            failure = failure_of(response.status, response.body)
            if failure is None:
                if response.body is not None:
                    self.fleet.succeeded(server)
                return leg
            detail = message = str(response.status)
        attempts.message = f"{server.name}: {message}"
        attempts.failures.append(failure)
        response_or_none = attempts.response
        status = response_or_none.status if response_or_none else None
        self.on_failure(server, failure, detail, status)
        if failure is Failure.FULL and response_or_none is not None:
            refusal = self.full_servers.record(
                server, response_or_none, call.profile, call.priority
            )
            attempts.refusals.append(refusal)
        return None

    def count_request(self, path: str, reason: str) -> None:
        """Count a request by the path that it takes.

        Warns if requests are not disaggregated although prefill servers are ready. The
        first warning follows WARN_AFTER_DECODE_ONLY such requests in a row, the next
        ones follow whenever that number has doubled.
        """
        self.metrics.inc("baton_proxy_requests", path=path, reason=reason)
        if path == "pd":
            self._num_decode_only = 0
        if path != "decode_only" or reason == "placed":
            return
        self._num_decode_only += 1
        multiple, remainder = divmod(self._num_decode_only, WARN_AFTER_DECODE_ONLY)
        is_power_of_two = multiple.bit_count() == 1
        ready = self.fleet.ready(Kind.PREFILL)
        if ready and remainder == 0 and is_power_of_two:
            logger.warning(
                "the last %d requests were not disaggregated (%s), though %d prefill "
                "servers are ready; see decode_only in docs/troubleshooting.md",
                self._num_decode_only,
                reason,
                len(ready),
            )

    async def _attempt(self, server: Server, call: UpstreamCall) -> Leg:
        """Send a leg to one server and wait for its response."""
        call.on_server_chosen(server)
        self.fleet.add_in_flight(server, 1)
        hint = None
        assignment: Assignment | None = None
        # A server that has left is not tracked, because nothing would remove its entry
        # from the load tracker.
        if call.profile is not None and not server.has_left:
            if call.computes and not server.is_trust_circuit_open:
                lenders = self.load_tracker.lenders(server, call.profile)
                hint = pull_hint(server, lenders)
            assignment = self.load_tracker.start(
                server,
                call.profile,
                computes=call.computes,
                generates=server.kind is Kind.DECODE,
                reservation=call.reservation,
            )
        leg: Leg | None = None
        try:
            if hint is None:
                sending = self._send(server, call)
            else:
                hinted_body = with_hint(call.body, hint, self.secret)
                sending = self._send_with_hint(server, call, hinted_body)
            response = await self.wait_for(
                server, sending, can_fail_over=call.can_fail_over
            )
            if assignment is not None and response.status == 200:
                self.load_tracker.on_answer(assignment)
            leg = Leg(server, response, assignment, is_open=response.body is None)
            return leg
        except (Unreachable, OutOfSockets):
            raise
        except BaseException:
            # The server may have finished the prefill, and may hold KV for the request.
            if call.transfer_id is not None:
                params = {"do_remote_decode": True, "transfer_id": call.transfer_id}
                self.release_kv(server, call.headers, params)
            raise
        finally:
            if leg is None or not leg.is_open:
                self._count_ended(server, assignment)

    async def _send_with_hint(
        self, server: Server, call: UpstreamCall, hinted_body: bytes
    ) -> Response:
        """Send a leg with a signed hint that names the server from which to pull KV.

        If the server rejects the signature, its trust circuit is opened, and the leg is
        sent again without the hint.
        """
        response = await self._send(server, replace(call, body=hinted_body))
        if response.status != 400:
            self.metrics.inc("baton_proxy_hints", leg=server.kind.value)
            return response
        if error_of(await response.read(), "param").startswith(HINT_PARAM):
            self.open_trust_circuit(server)
            return await self._send(server, call)
        return response

    async def _send(self, server: Server, call: UpstreamCall) -> Response:
        body = call.body
        headers = list(call.headers)
        if not server.health.is_foreign:
            if call.deadline is not None:
                headers.append(call.deadline.header())
            headers += call.baton_headers
        elif call.foreign_body is not None:
            body = call.foreign_body()
        response = await self.upstream.send(
            server.url, call.method, call.path, headers=headers, body=body
        )
        is_queue_full = response.status == QueueFull.status
        if response.status >= call.min_read_status or is_queue_full:
            await response.read()
        return response

    async def wait_for(
        self, server: Server, work: Awaitable[ResultT], *, can_fail_over: bool = False
    ) -> ResultT:
        """Await `work`, which depends on a server.

        Raises:
            Lost: the server does not answer health checks either; see `on_silence`.
        """
        waits = self._waits.setdefault(server, {})
        try:
            async with asyncio.timeout(None) as timeout:
                waits[timeout] = can_fail_over
                try:
                    return await work
                finally:
                    waits.pop(timeout, None)
        except TimeoutError:
            raise Lost("silent, and without an answer to health checks") from None

    def on_silence(self, server: Server, is_long: bool) -> None:
        """Give up requests of a server that does not answer its health checks.

        A prefill leg is retried at another server or skipped. A request that another
        decode server can continue fails over. Other requests stay at their decode
        server until the silence is long, because the server may still answer them.

        Args:
            is_long: the server has not answered LONG_SILENCE health checks in a row.
        """
        gives_up_all = is_long or server.kind is Kind.PREFILL
        has_others = any(other is not server for other in self.fleet.ready(server.kind))
        now = asyncio.get_running_loop().time()
        for timeout, can_fail_over in self._waits.get(server, {}).items():
            if gives_up_all or (can_fail_over and has_others):
                timeout.reschedule(now)

    def _count_ended(self, server: Server, assignment: Assignment | None) -> None:
        if assignment is not None:
            self.load_tracker.end(assignment)
        self.fleet.add_in_flight(server, -1)

    def close_leg(self, leg: Leg) -> None:
        """Close a leg's response and count the leg as ended, if it is still open."""
        if leg.is_open:
            leg.is_open = False
            leg.end_attempt()
            leg.response.close()
            self._count_ended(leg.server, leg.assignment)

    def open_trust_circuit(self, server: Server) -> None:
        """Stop sending signed hints and offers to a server that rejected a signature.

        The circuit closes after TRUST_COOLDOWN_S, or when the server restarts.
        """
        if not server.is_trust_circuit_open:
            logger.warning(
                "%s rejected this proxy's signature: its cluster secret or its clock "
                "differs from the proxy's. For %g s, its decode legs start after the "
                "prefill, and it gets no hints about cached KV. Give all servers "
                "the proxy's BATON_CLUSTER_SECRET, and synchronize the clocks.",
                server,
                TRUST_COOLDOWN_S,
            )
        until = time.monotonic() + TRUST_COOLDOWN_S
        server.trust_circuit = (until, server.health.side_channel)

    def on_failure(
        self, server: Server, failure: Failure, detail: str, status: int | None
    ) -> None:
        """Count a server's failure and update the server's health."""
        leg = server.kind.value
        message = f"{server}: {detail}"
        self.metrics.inc("baton_proxy_upstream_failures", leg=leg, reason=failure.value)
        # A full queue is not a fault.
        level = logging.DEBUG if failure is Failure.FULL else logging.WARNING
        logger.log(level, "%s leg failed (%s): %s", leg, failure.value, message)
        if failure in (Failure.UNREACHABLE, Failure.LOST, Failure.DIED):
            self.fleet.unreachable(server, message)
        elif trips_breaker(failure, status):
            self.fleet.failed(server)

    def release_kv(
        self, server: Server, headers: Headers, params: object, after_s: float = 0.0
    ) -> None:
        """Release the KV that a server holds for a request."""
        self._releaser.release(server, headers, params, after_s)

    async def close(self) -> None:
        """Wait for releases in flight."""
        await self._releaser.close()
