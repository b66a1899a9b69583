"""Runs the legs of a request and relays their answers to the client."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from protocol.errors import (
    BatonError,
    ContextLengthExceeded,
    NoServerAvailable,
    PayloadTooLarge,
)
from protocol.http.access import AccessGrant
from protocol.http.deadlines import Deadline
from proxy import body as bodies
from proxy.errors import DecodeServerLost, DecodeServerTimeout
from proxy.failover import FailoverState, UpstreamLost
from proxy.legs.call import Leg, LegFailed, UpstreamCall
from proxy.legs.outcome import DecodeOnly, DecodeOnlyReason
from proxy.legs.upstreams import Upstreams
from proxy.membership import Kind, Pool, Server
from proxy.placement.assignment import Assignment
from proxy.placement.request_profile import RequestProfile
from proxy.relay import Migrated, Reply
from proxy.upstream import Failure, Headers, Response, TimedOut, UpstreamError


@dataclass
class RequestLegs:
    """A client's request, with methods that run one leg and relay one answer.

    Attributes:
        data: the body as the client sent it.
        deadline: when the request is cancelled; Baton servers receive the time left.
    """

    upstreams: Upstreams
    method: str
    path: str
    headers: Headers
    reply: Reply
    grant: AccessGrant
    data: bytes
    deadline: Deadline | None
    # The body with a seed, and the same body without the seed that the proxy added.
    # Neither has kv_transfer_params of the client.
    _body: bodies.Body = field(default_factory=dict, init=False)
    _unseeded_body: bodies.Body = field(default_factory=dict, init=False)
    # Set only for requests that generate.
    _profile: RequestProfile | None = field(default=None, init=False)
    _reservation: Assignment | None = field(default=None, init=False)
    _transfer_id: str = field(default="", init=False)  # id of the newest prefill leg

    def __post_init__(self) -> None:
        self._fleet = self.upstreams.fleet
        self._model_pool: Pool = self._fleet  # the servers of the request's model
        self._trace = self.reply.trace
        self._failover = FailoverState(
            self.reply,
            self.upstreams.metrics,
            self.upstreams.max_resumes,
            self.upstreams.secret,
        )

    # running one leg

    async def _run_prefill(
        self, call: UpstreamCall, context: int | None
    ) -> Leg | DecodeOnly:
        """Return the answer of the first prefill server that can take the request.

        Args:
            context: the longest context, in tokens, of all servers that could serve the
                request.

        Returns:
            The answer, or why the request is served without a prefill server.
        """
        pool = call.pool
        reason = DecodeOnlyReason.PREFILL_CHOICES
        unfit = self._unfit(pool, Kind.PREFILL)
        while pool.ready(Kind.PREFILL, unfit) or not (
            unfit and pool.ready(Kind.PREFILL)
        ):
            try:
                leg = await self.upstreams.run(call, self._trace, unfit)
            except LegFailed as error:
                if error.failure is None:
                    return DecodeOnly(DecodeOnlyReason.NO_PREFILL_SERVER)
                return DecodeOnly(error.failure)
            is_too_large = leg.response.status == PayloadTooLarge.status
            if is_too_large and pool.ready(Kind.DECODE):
                return DecodeOnly(DecodeOnlyReason.PREFILL_BODY)
            server_context = leg.server.health.limits.max_model_len
            if not _fits_elsewhere(leg.response, server_context, context):
                return leg
            reason = DecodeOnlyReason.PREFILL_CONTEXT
            unfit = self._unfit(pool, Kind.PREFILL, (server_context or 0) + 1)
        return DecodeOnly(reason)

    def _foreign_prefill_body(self) -> bytes:
        return bodies.prefill_leg(self._unseeded_body, self.path, is_foreign=True)

    async def _decode(self, call: UpstreamCall, excluded: Sequence[Server]) -> None:
        """Run the decode leg and relay its answer, or the answer's rest after a loss.

        Servers in `excluded` receive the leg only if no other server is ready.
        """
        excluded = [*excluded, *self._failover.avoided]
        if self.reply.frame_history:
            # The request contains signed frames, which servers with an open trust
            # circuit would probably refuse.
            servers = call.pool.by_kind[Kind.DECODE]
            excluded += [server for server in servers if server.is_trust_circuit_open]
        await self._relay_decode(self.upstreams.run(call, self._trace, excluded))

    def _decode_call(self, pool: Pool, params: msgspec.Raw | None) -> UpstreamCall:
        failover = self._failover
        call = self._call(
            Kind.DECODE,
            bodies.decode_leg(self._body, params, failover.signed_frames()),
            pool,
            computes=params is None,
            min_read_status=500 if self.reply.status is None else 400,
            foreign_body=partial(
                bodies.decode_leg, self._unseeded_body, params, is_foreign=True
            ),
        )
        return replace(
            call,
            baton_headers=failover.headers(),
            max_deliveries=failover.max_deliveries(),
            can_fail_over=failover.is_enabled,
        )

    # relaying answers

    async def _relay_decode(self, pending_leg: Awaitable[Leg]) -> None:
        """Relay a decode server's answer, or the last failed server's response.

        Raises:
            UpstreamLost: the answer broke off, and another server may continue.
            BatonError: no server answered, or the answer broke off for good.
        """
        has_begun = self.reply.status is not None
        continues = has_begun or bool(self.reply.frame_history)
        try:
            leg = await pending_leg
        except LegFailed as error:
            may_be_restarted = (
                error.failure is Failure.DIED and self.upstreams.restart_wait_s > 0
            )
            if error.response is None or continues or may_be_restarted:
                raise _client_error(error) from None
            await self.reply.relay(error.response)
            return
        self._trace.decode = leg.server.url
        if has_begun:
            is_usable = self.reply.can_continue_with(leg.response)
        else:
            is_usable = leg.response.status < 400
        if continues and not is_usable:
            self.upstreams.close_leg(leg)
            code = bodies.error_of(leg.response.body or b"") or leg.response.status
            raise DecodeServerLost(f"no decode server continues this answer: {code}")
        self._failover.count_outcome("resumed")
        await self._relay(leg)

    async def _relay(self, leg: Leg) -> None:
        """Relay a response.

        Raises:
            UpstreamLost: the response broke off, and another server may continue.
            BatonError: the response broke off, and no other server may continue.
        """
        if not leg.is_open:
            await self.reply.relay(leg.response)
            return
        server = leg.server
        can_fail_over = self._failover.is_enabled
        try:
            relaying = self.reply.relay(leg.response)
            await self.upstreams.wait_for(server, relaying, can_fail_over=can_fail_over)
            self._fleet.succeeded(server)
            return
        except UpstreamError as error:
            loss = self._loss(server, error)
        finally:
            self.upstreams.close_leg(leg)
        if self.reply.finished:
            # The client has the last event; only the end of the HTTP body is missing.
            await self.reply.end()
            return
        if not can_fail_over:
            raise loss.error
        if loss.params is None:
            self._trace.num_lost += 1
        else:
            self._trace.num_moved += 1
        if loss.params is not None and not self.reply.frame_history:
            # No server can continue with this KV, because the frames that list its
            # tokens are missing.
            self.upstreams.release_kv(server, self.headers, loss.params)
            loss.params = None
        raise loss

    def _loss(self, server: Server, error: UpstreamError) -> UpstreamLost:
        """Return the loss for a server's error, and count the error as a failure.

        If the server lends its KV to another server, no failure is counted.
        """
        event: bytes | None = None
        params: msgspec.Raw | None = None
        if isinstance(error, Migrated):
            event = error.event
            params = error.params
        if params is None:
            self.upstreams.on_failure(server, error.failure, str(error), None)
        message = f"the {server.kind.value} server broke off its answer: {error}"
        client_error: BatonError = DecodeServerLost(message)
        if isinstance(error, TimedOut):
            client_error = DecodeServerTimeout(message)
        return UpstreamLost(
            error=client_error,
            reason=error.failure,
            server=server,
            event=event,
            has_begun=self.reply.status is not None,
            params=params,
        )

    def _call(
        self,
        kind: Kind,
        body: bytes,
        pool: Pool,
        *,
        computes: bool,
        min_read_status: int = 500,
        foreign_body: bodies.MakeBody | None = None,
    ) -> UpstreamCall:
        if foreign_body is None and self._unseeded_body:
            foreign_body = partial(
                bodies.decode_leg, self._unseeded_body, None, is_foreign=True
            )
        return UpstreamCall(
            kind=kind,
            method=self.method,
            path=self.path,
            headers=self.headers,
            body=body,
            pool=pool,
            profile=self._profile,
            min_read_status=min_read_status,
            computes=computes,
            foreign_body=foreign_body,
            deadline=self.deadline,
            priority=bodies.priority(self._unseeded_body) or 0,
            is_admitted=self._failover.num_losses > 0,
            reservation=self._reservation,
        )

    def _unfit(self, pool: Pool, kind: Kind, num_tokens: int = 0) -> list[Server]:
        """Return the servers that would refuse the request because of its size.

        The size is `num_tokens` tokens, and the request's number of choices.
        """
        return pool.unfit(kind, num_tokens, bodies.num_choices(self._body))

    def _count(self, path: str, reason: str) -> None:
        """Count the request by its path, but not again after the loss of a server."""
        if not self._failover.num_losses:
            self.upstreams.count_request(path, reason)


def _client_error(failed: LegFailed) -> BatonError:
    match failed.failure:
        case Failure.LOST | Failure.DIED:
            return DecodeServerLost(f"the decode server was lost: {failed}")
        case Failure.TIMEOUT:
            return DecodeServerTimeout(f"the decode server did not answer: {failed}")
    return NoServerAvailable(f"no decode server is available: {failed}")


def _fits_elsewhere(
    response: Response, server_context: int | None, context: int | None
) -> bool:
    """Return whether a prefill server refused a prompt that would fit another server.

    Args:
        response: the prefill server's response.
        server_context: the prefill server's context, in tokens.
        context: the longest context, in tokens, of all servers that could serve the
            request.
    """
    if bodies.error_of(response.body or b"") != ContextLengthExceeded.code:
        return False
    return (
        server_context is not None and context is not None and server_context < context
    )
