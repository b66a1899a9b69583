"""One leg of a request: servers are tried until one answers, and what happened is remembered.

A leg is tried on another server only while nothing has been sent to the client. A request that was
delivered and not answered may be what killed the server, so few get it (`max_deliveries`).
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec

from protocol.errors import (
    MAX_RETRY_AFTER_S,
    GrammarQueueFull,
    QueueFull,
)
from protocol.http.deadlines import Deadline
from protocol.kv_params import HINT, RELEASE_PATH
from protocol.messages import KVHint
from protocol.metrics import Metrics
from protocol.process.logging import get_logger
from proxy.body import error_of, hinted
from proxy.errors import queues_full
from proxy.knowledge import Knowledge, Refusal, Work
from proxy.legs.failures import (
    DELIVERED,
    LOSSES,
    MAX_DELIVERIES,
    failure_of,
    may_retry,
    trips_breaker,
)
from proxy.legs.series import known_series
from proxy.membership import DOUBTED_S, Fleet, Kind, Pool, Server, hint
from proxy.placement import Ask
from proxy.relay import RequestTrace
from proxy.upstream import (
    Exhausted,
    Failure,
    Headers,
    HttpUpstream,
    Lost,
    Response,
    Unreachable,
    UpstreamError,
)

logger = get_logger(__name__)

MANY_ALONE = 50
GIVE_BACK_TIMEOUT_S = (
    30.0  # a prefill server that is silent frees the KV when its lease ends
)
MAX_GIVING_BACK = 1024  # at once; beyond, the lease's end frees KV
CLOSE_TIMEOUT_S = 2.0
MAX_HELD_S = 1.0  # for which a server that is full is believed to be


_HINT = f"kv_transfer_params.{HINT}"  # what a server names that refuses one

WorkT = TypeVar("WorkT")


@dataclass(frozen=True)
class UpstreamCall:
    """What a server is asked.

    Args:
        whole_from: an answer with this status or above is read whole; any other is to be relayed.
        transfer_id: of a prefill, which is called off when its answer does not come.
        ask: its prompt, where one is computed or generated from.
        computes: the server computes the prompt.
        pool: whom to ask.
        foreign_body: makes the body for a server that speaks vLLM's dialect, if it differs.
        deadline: of all legs together; servers are told what is left.
        priority: the smaller, the more urgent.
        own_headers: for servers of ours alone.
        max_deliveries: that may be lost.
        goes_on: another server may take over at any time; nobody waits for one that is silent.
        is_admitted: it had begun elsewhere: it is refused for no queue.
        back_to: asked where no other server is ready, though it may not be, either.
        on_ask: called with each server before it is asked.
    """

    kind: Kind
    method: str
    path: str
    headers: Headers
    body: bytes
    pool: Pool
    ask: Ask | None
    whole_from: int = 500
    transfer_id: str | None = None
    computes: bool = False
    foreign_body: Callable[[], bytes] | None = None
    deadline: Deadline | None = None
    priority: int = 0
    own_headers: Headers = ()
    max_deliveries: int = MAX_DELIVERIES
    goes_on: bool = False
    is_admitted: bool = False
    back_to: Server | None = None
    on_ask: Callable[[Server], None] = lambda server: None

    def last(self, tried: Sequence[Server]) -> Server | None:
        return None if self.back_to in tried else self.back_to


class LegFailed(Exception):
    """No server of a kind did the work. The message is for the client, without addresses.

    Args:
        failure: the last one, if any server was asked.
        answer: the error response of the last one, if any.
    """

    def __init__(
        self, message: str, failure: Failure | None, answer: Response | None
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.answer = answer


@dataclass
class Leg:
    """An answer, whose it is, and the server's work on it: `is_open` until nobody reads more."""

    server: Server
    response: Response
    work: Work | None
    is_open: bool = True


@dataclass
class Upstreams:
    """Sends legs to the fleet's servers, tells the fleet how they did, and gives KV back."""

    fleet: Fleet
    upstream: HttpUpstream
    metrics: Metrics
    knowledge: Knowledge
    max_queue_s: float = 30.0
    max_resumes: int = 0
    secret: bytes = b""  # of the cluster; empty: none is known

    def __post_init__(self) -> None:
        self._full = WeakKeyDictionary[Server, Refusal]()
        # Of those that keep waiting for it, and whether another server would do.
        self._patience = WeakKeyDictionary[Server, dict[asyncio.Timeout, bool]]()
        self._giving_back: set[asyncio.Task[None]] = set()
        self.knowledge.pulls = bool(self.secret)
        for name, labels in known_series():
            self.metrics.begin(name, **labels)
        self._num_alone = (
            0  # requests in a row that found no prefill server to take them
        )

    async def run(
        self, call: UpstreamCall, trace: RequestTrace, unfit: Sequence[Server] = ()
    ) -> Leg:
        """The first answer that is not a server's failure: `end` it, read or not.

        Args:
            unfit: servers that cannot do this; asked only where no other is ready.

        Raises:
            LegFailed: no server is ready, or those that may be tried failed.
        """
        kind = call.kind
        tried: list[Server] = []
        failures: list[Failure] = []
        message = f"no {kind.value} server is ready"
        answer: Response | None = None
        if not call.pool.ready(kind, unfit):
            unfit = ()
        if call.ask is not None and not call.is_admitted:
            servers = call.pool.ready(kind, unfit)
            unfit = [*unfit, *self.check_room(kind, call.ask, call.priority, servers)]
        full: list[Refusal] = []
        choose = self._server_choice(call)
        while server := choose([*unfit, *tried]) or call.last(tried):
            if tried:
                self.metrics.inc("baton_proxy_retries", leg=kind.value)
            tried.append(server)
            trace.legs.append((server.name, trace.elapsed_s()))
            failure: Failure | None
            try:
                leg = await self._attempt(server, call)
            except UpstreamError as error:
                answer = None
                failure = error.failure
                detail = str(error)
                told = error.told
            else:
                answer = leg.response
                failure = failure_of(answer.status, answer.body)
                detail = told = str(answer.status)
                if failure is None:
                    if answer.body is not None:
                        self.fleet.succeeded(server)
                    return leg
            message = f"{server.name}: {told}"
            failures.append(failure)
            trace.num_lost += kind is Kind.DECODE and failure in LOSSES
            self.failed(server, failure, detail, answer.status if answer else None)
            if failure is Failure.FULL and answer is not None:
                full.append(self._refused(server, answer, call))
            own = (
                call.max_deliveries if not server.health.is_foreign else MAX_DELIVERIES
            )
            if not may_retry(kind, failures, own):
                break
        if not (call.is_admitted and kind is Kind.PREFILL):
            _raise_if_full(kind, full, failures)
        raise LegFailed(message, failures[-1] if failures else None, answer)

    def _server_choice(
        self, call: UpstreamCall
    ) -> Callable[[Sequence[Server]], Server | None]:
        """Return a function that chooses the server of a call, except from some."""
        cheapest = partial(
            self.knowledge.first,
            ask=call.ask,
            computes=call.computes,
            generates=call.kind is Kind.DECODE,
        )
        alike = (call.ask is None, call.computes, call.transfer_id is None)
        return partial(call.pool.choose, call.kind, alike=alike, first=cheapest)

    def check_room(
        self, kind: Kind, ask: Ask, priority: int, servers: Sequence[Server]
    ) -> list[Server]:
        """Those of some servers that are full: they answered so just now, or they have no admission
        of their own, as vLLM's, and as much to compute as this proxy estimates. A server of ours
        knows its queue by true lengths and refuses by itself. Raises QueueFull where all are."""
        now, limit_s = time.monotonic(), self.max_queue_s
        if not any(now < refused.until for refused in self._full.values()):
            self._full.clear()
        waits: dict[Server, float] = {}
        for server in servers if self._full else ():
            refused = self._full.get(server)
            if refused is not None and refused.speaks_of(ask, priority, now):
                waits[server] = refused.retry_at - now
        others = [server for server in servers if server not in waits]
        estimated = {s: self.knowledge.wait_s(s) for s in others if s.health.is_foreign}
        is_busy = (
            len(estimated) == len(others)
            and min(estimated.values(), default=0.0) > limit_s
        )
        if kind is Kind.PREFILL and priority >= 0 and is_busy:
            waits |= {
                server: wait_s - limit_s / 2 for server, wait_s in estimated.items()
            }
        if servers and len(waits) == len(servers):
            raise queues_full(kind.value, min(waits.values()))
        return list(waits)

    def _refused(self, server: Server, answer: Response, call: UpstreamCall) -> Refusal:
        """Remembers a server's 429 for requests like this one. One of its trial queue is not
        remembered, as it says nothing of requests without a new schema."""
        given = dict(answer.headers).get(b"retry-after", b"")
        wait_s = min(float(given[:6]), MAX_RETRY_AFTER_S) if given.isdigit() else 1.0
        now = time.monotonic()
        priority = call.priority
        tokens = call.ask.tokens if call.ask else sys.maxsize
        if error_of(answer.body or b"", "phase") == GrammarQueueFull.phase:
            return Refusal(now, now + wait_s, priority, tokens, is_of_grammars=True)
        before = self._full.get(server)
        if (
            before is not None and now < before.until
        ):  # it cannot have more room than that
            priority = min(priority, before.priority)
            tokens = min(tokens, before.tokens)
        held_s = min(MAX_HELD_S, wait_s, self.max_queue_s / 4)
        self._full[server] = Refusal(now + held_s, now + wait_s, priority, tokens)
        return self._full[server]

    def count(self, path: str, reason: str) -> None:
        """Counts a request by the way it takes; warns when none is disaggregated any more, the
        first time after `MANY_ALONE`, then each time after twice as many."""
        self.metrics.inc("baton_proxy_requests", path=path, reason=reason)
        if path == "pd":
            self._num_alone = 0
        if path != "decode_only" or reason == "placed":
            return
        self._num_alone += 1
        times, rest = divmod(self._num_alone, MANY_ALONE)
        ready = self.fleet.ready(Kind.PREFILL)
        if ready and not rest and times.bit_count() == 1:
            logger.warning(
                "the last %d requests were not disaggregated (%s) though %d prefill servers are "
                "ready; see decode_only in docs/troubleshooting.md",
                self._num_alone, reason, len(ready),
            )  # fmt: skip

    async def _attempt(self, server: Server, call: UpstreamCall) -> Leg:
        call.on_ask(server)
        self.fleet.works(server, 1)
        work = told = None
        if (
            call.ask is not None and not server.has_left
        ):  # nobody would forget what it has
            if call.computes and not server.is_doubted:
                told = hint(server, self.knowledge.lenders(server, call.ask))
            work = self.knowledge.begin(
                server,
                call.ask,
                computes=call.computes,
                generates=server.kind is Kind.DECODE,
            )
        leg = None
        try:
            sending = (
                self._send_hinted(server, call, told)
                if told
                else self._send(server, call)
            )
            response = await self.unless_given_up(server, sending, goes_on=call.goes_on)
            if work is not None and response.status == 200:
                self.knowledge.answered(work)
            leg = Leg(server, response, work, is_open=response.body is None)
            return leg
        except (Unreachable, Exhausted):
            raise
        except (
            BaseException
        ):  # the answer may be on its way, and KV kept for who reads it
            if call.transfer_id is not None:
                unanswered = {"do_remote_decode": True, "transfer_id": call.transfer_id}
                self.give_back(server, call.headers, unanswered)
            raise
        finally:
            if leg is None or not leg.is_open:
                self._release(server, work)

    async def _send_hinted(
        self, server: Server, call: UpstreamCall, told: KVHint
    ) -> Response:
        """Without it once more, if the server does not believe it."""
        told = msgspec.structs.replace(told, issued_s=int(time.time()))
        body = hinted(call.body, told, self.secret)
        response = await self._send(server, replace(call, body=body))
        if response.status == 400:
            if error_of(await response.read(), "param").startswith(_HINT):
                self.distrust(server)
                return await self._send(server, call)
            return response
        self.metrics.inc("baton_proxy_hints", leg=server.kind.value)
        return response

    async def _send(self, server: Server, call: UpstreamCall) -> Response:
        make = call.foreign_body if server.health.is_foreign else None
        body = call.body if make is None else make()
        own: Headers = ()
        if not server.health.is_foreign:
            left = [] if call.deadline is None else [call.deadline.header()]
            own = [*left, *call.own_headers]
        response = await self.upstream.send(
            server.url, call.method, call.path, headers=[*call.headers, *own], body=body
        )
        if response.status >= call.whole_from or response.status == QueueFull.status:
            await response.read()
        return response

    async def unless_given_up(
        self, server: Server, work: Awaitable[WorkT], *, goes_on: bool = False
    ) -> WorkT:
        """What the server is waited for. Raises Lost once it is given up."""
        waiting = self._patience.setdefault(server, {})
        try:
            async with asyncio.timeout(None) as patience:
                waiting[patience] = goes_on
                try:
                    return await work
                finally:
                    waiting.pop(patience, None)
        except TimeoutError:
            raise Lost("silent, to health checks as well") from None

    def on_silence(self, server: Server, is_long: bool) -> None:
        """A server does not even answer health checks: nothing waits for it any longer.

        Prefill legs go elsewhere, or are done without, and what can go on at another decode server
        does. A decode server keeps its other requests for longer, as a client may get an error for
        one that may still be answered.
        """
        everything = is_long or server.kind is Kind.PREFILL
        has_others = any(other is not server for other in self.fleet.ready(server.kind))
        for patience, goes_on in self._patience.get(server, {}).items():
            if everything or (goes_on and has_others):
                patience.reschedule(asyncio.get_running_loop().time())

    def _release(self, server: Server, work: Work | None) -> None:
        if work is not None:
            self.knowledge.ended(work)
        self.fleet.works(server, -1)

    def end(self, leg: Leg) -> None:
        """Nobody reads more of its answer: the server has nothing more to do for it."""
        if leg.is_open:
            leg.is_open = False
            leg.response.close()
            self._release(leg.server, leg.work)

    def distrust(self, server: Server) -> None:
        """It does not believe what this proxy signs."""
        if not server.is_doubted:
            logger.warning(
                "%s has another cluster secret than this proxy, or another time (give all of them "
                "BATON_CLUSTER_SECRET, see to their clocks): it is asked when a prefill "
                "is done, not at once, and not told whose KV to pull, for a while", server
            )  # fmt: skip
        server.doubted = time.monotonic() + DOUBTED_S, server.health.side_channel

    def failed(
        self, server: Server, failure: Failure, detail: str, status: int | None
    ) -> None:
        """Counts a failure and lets the fleet know."""
        leg, message = server.kind.value, f"{server}: {detail}"
        self.metrics.inc("baton_proxy_upstream_failures", leg=leg, reason=failure.value)
        level = (
            logging.DEBUG if failure is Failure.FULL else logging.WARNING
        )  # that is no fault
        logger.log(level, "%s leg: %s: %s", leg, failure.value, message)
        if failure in (Failure.UNREACHABLE, Failure.LOST, Failure.DIED):
            self.fleet.unreachable(server, message)
        elif trips_breaker(failure, status):
            self.fleet.failed(server)

    def give_back(
        self, server: Server, headers: Headers, params: object, after_s: float = 0.0
    ) -> None:
        """Tells a prefill server that nobody will come for its KV, which its lease frees anyway, by
        a task of its own: neither the client nor its absence delays it. vLLM's takes none."""
        if server.health.is_foreign or len(self._giving_back) >= MAX_GIVING_BACK:
            return
        url, body = server.url, msgspec.json.encode({"kv_transfer_params": params})
        task = asyncio.create_task(self._give_back(url, headers, body, after_s))
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)

    async def _give_back(
        self, url: str, headers: Headers, body: bytes, after_s: float
    ) -> None:
        await asyncio.sleep(after_s)
        try:
            async with asyncio.timeout(GIVE_BACK_TIMEOUT_S):
                response = await self.upstream.send(
                    url, "POST", RELEASE_PATH, headers=headers, body=body
                )
                await response.read()
        except (UpstreamError, TimeoutError) as error:
            logger.info("KV was not given back to %s: %r", url, error)

    async def close(self) -> None:
        """Waits for what is still being given back, for `CLOSE_TIMEOUT_S` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*self._giving_back, return_exceptions=True)


def _raise_if_full(
    kind: Kind, refusals: Sequence[Refusal], failures: Sequence[Failure]
) -> None:
    """Raise QueueFull if servers refused a leg and the last failure delivered nothing.

    The client is told the shortest wait of all refusals.
    """
    if not refusals or failures[-1] in DELIVERED:
        return
    wait_s = min(refusal.retry_at for refusal in refusals) - time.monotonic()
    is_of_grammars = all(refusal.is_of_grammars for refusal in refusals)
    raise queues_full(kind.value, wait_s, is_of_grammars=is_of_grammars)
