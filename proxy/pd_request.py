"""One request through a prefill and a decode server.

prefill leg --params--> decode leg --> the client gets the decode server's bytes
    |- 4xx -----------> the client gets that; no decode server is asked
    `- nothing usable-> decode leg without params: it does all the work, and is counted

Where both servers can do that, the legs are opened together: see early_decode.py. A request that
only scores its prompt is the prefill server's alone; no KV moves. A decode server that is lost on
the way is replaced: see `_generate`.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from protocol.errors import (
    BatonError,
    Forbidden,
    NoServerAvailable,
    PayloadTooLarge,
)
from protocol.http.access import AccessGrant
from protocol.http.deadlines import Deadline
from protocol.kv_offers import Offer
from protocol.resume import FrameHistory
from proxy import body as bodies
from proxy.early_decode import EarlyDecode, lender_of
from proxy.errors import DecodeServerLost, DecodeServerTimeout
from proxy.legs.charge import charged
from proxy.legs.outcome import decode_error, may_fit_elsewhere
from proxy.legs.request_profile import Ask, within_context
from proxy.membership import Kind, Pool, Server
from proxy.relay import HandedBack, Loss, Losses, Reply
from proxy.upstream import Headers, TimedOut, UpstreamError
from proxy.upstream_call import Leg, LegFailed, UpstreamCall, Upstreams

# A decode server hears of a client that left by the end of its connection, a busy one within half a
# second, and ends the lease itself. A release that overtook it would count as a lost lease there.
_LEFT_S = 1.0
# A stream whose server is lost waits so long for another one to be ready: one that only broke a
# connection is back after the next health check.
_READY_WITHIN_S = 3.0
_READY_LOOK_S = 0.02


@dataclass
class PDRequest:
    """A client's request on its way through the fleet. Being cancelled aborts the leg in flight.

    Attributes:
        data: the body as it came.
        deadline: at which it is cancelled, for servers to know; None: there is none.
    """

    upstreams: Upstreams
    method: str
    path: str
    headers: Headers
    reply: Reply
    visit: AccessGrant
    data: bytes
    deadline: Deadline | None
    _body: bodies.Body = field(default_factory=dict, init=False)
    _ask: Ask | None = field(default=None, init=False)  # of a request that generates

    def __post_init__(self) -> None:
        self._fleet = self.upstreams.fleet
        self._pool: Pool = self._fleet
        self._own: Pool = self._fleet  # of its model; `_pool` may be less of it
        self._plain: bodies.Body = {}  # as the client sent it, but for kv_transfer_params
        self._trace = self.reply.trace
        ups = self.upstreams
        self._losses = Losses(self.reply, ups.metrics, ups.max_resumes, ups.secret)
        self._transfer_id = ""  # of the latest prefill leg

    async def pass_on(self, model: str | None = None) -> None:
        """Answers as a decode server does: one of `model`, else of the body's, where it matters.
        Raises BatonError as `run`."""
        num_tokens = 0
        if self.data:
            body = await bodies.read_body(self.data)
            num_tokens = bodies.num_text_tokens(body)
            if len(self._fleet.models) > 1:
                self._pool = self._fleet.pool(bodies.model_of(body))
        elif model is not None:
            self._pool = self._fleet.pool(model)
        with charged(self.visit, self.reply, num_tokens):
            asked = self.upstreams.run(self._call(Kind.DECODE, self.data), self._trace)
            await self._have_answered(asked)

    async def run(self) -> None:
        """Serves a request that generates.

        Raises:
            BatonError: what the client is to be told; the reply has not ended.
        """
        least = self.visit.min_priority
        self._plain, stripped = bodies.sanitize(
            await bodies.read_body(self.data), least
        )
        if self.visit.salting_key:
            secret = self.upstreams.secret
            self._plain = bodies.salted(self._plain, self.visit.salting_key, secret)
        self._plain = bodies.with_prompt_limit(
            self._plain, self.path, self._shortest_context
        )
        self._body = bodies.seeded(self._plain)
        asked = bodies.priority(self._plain)
        if least is not None and (asked is None or asked < least):
            said = "no number of 32 bits" if asked is None else asked
            told = f"priority is {said}; {self.visit.name} may ask for {least} or more"
            raise Forbidden(told, param="priority")
        if stripped:
            self.upstreams.metrics.inc("baton_proxy_stripped_kv_transfer_params")
        ask = self._ask = bodies.ask(self._body)
        num_answers = bodies.num_prompts(self._body) * bodies.num_choices(self._body)
        num_reserved = ask.answer * num_answers
        with charged(self.visit, self.reply, ask.tokens, num_reserved):
            await self._have_generated(ask)

    async def _have_generated(self, ask: Ask) -> None:
        self._trace.begin()
        self.upstreams.metrics.inc("baton_proxy_requests_in_progress")
        try:
            self._pool = self._own = self._fleet.pool(bodies.model_of(self._plain))
            ask = self._ask = within_context(ask, self._longest_context())
            alone = await self._score() if bodies.is_scoring(self._body) else ""
            if alone is not None:
                await self._generate(alone)
        finally:
            self.upstreams.knowledge.unplaced(ask)
            self.upstreams.metrics.inc("baton_proxy_requests_in_progress", -1)

    def _shortest_context(self) -> int | None:
        pool = self._fleet.pool(bodies.model_of(self._plain))
        return pool.shortest_context(Kind.DECODE)

    def _longest_context(self) -> int | None:
        """Tokens of the longest context of its model's servers; None unless all report theirs."""
        contexts = [self._pool.context(kind) for kind in Kind if self._pool.ready(kind)]
        known = [context for context in contexts if context is not None]
        return max(known) if known and len(known) == len(contexts) else None

    async def _generate(self, alone: str) -> None:
        """Has the answer generated; where a decode server is lost on the way, the rest of it by
        another one, as nothing but the request and the tokens so far decides what follows.

        Args:
            alone: why no prefill server is asked, if none is.
        """
        self._losses.may_go_on = self.upstreams.max_resumes > 0
        loss: Loss | None = None
        while loss is None or self._losses.take(loss, self._fleet.of[Kind.DECODE]):
            try:
                if loss is None:
                    await self._generate_once(alone)
                else:
                    await self._generate_again(loss, alone)
                return
            except Loss as another:
                loss = another
            except BatonError:
                if loss is None:
                    raise
                self._losses.count("failed")
                loss.params = None
                if loss.has_begun or not self.reply.kept:
                    break
                self.reply.kept = FrameHistory()  # it begins anew
                if self.reply.meter is not None:
                    self.reply.meter.reset()
        if loss.params is not None:
            self.upstreams.give_back(loss.server, self.headers, loss.params)
        if loss.event is None or not loss.has_begun:
            raise loss.told
        await self.reply.break_off(loss.event)

    async def _generate_again(self, loss: Loss, alone: str) -> None:
        self._trace.decode_only = "-"
        self._pool, like = self._own, loss.server.health.kv_digest
        if loss.params is not None:
            # Without another server that one itself does, as long as it lives.
            readers = self._pool.readers_of(like)
            await self._decode_prefilled(
                loss.server, loss.params, readers, back_to=loss.server
            )
            return
        avoided, servers = self._losses.avoided, self._fleet.of[Kind.DECODE]
        if loss.has_begun:  # all but its own model's would refuse the rest
            avoided = [s for s in servers if s.health.kv_digest != like]
        elif all(server in avoided for server in servers):
            avoided = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_WITHIN_S):
                while not self._pool.ready(Kind.DECODE, avoided):
                    await asyncio.sleep(_READY_LOOK_S)
        await self._generate_once(alone)

    async def _generate_once(self, alone: str) -> None:
        if not self._pool.ready(Kind.DECODE):
            raise NoServerAvailable("no decode server is ready; see /ready")
        if self._ask is not None and not self._losses.num:  # or P would work in vain
            urgency, decodes = (
                bodies.priority(self._plain) or 0,
                self._pool.ready(Kind.DECODE),
            )
            self.upstreams.check_room(Kind.DECODE, self._ask, urgency, decodes)
        leg = alone or await self._prefill_or_both()
        if isinstance(leg, Leg):
            if (status := leg.response.status) != 200 and not self._losses.num:
                self.upstreams.count("prefill", f"status_{status}")
                await self._relay(leg)
                return
            params = bodies.params_of(leg.response.body or b"")
            readers = self._pool.readers_of(leg.server.health.kv_digest)
            if params is not None and readers.ready(Kind.DECODE):
                self._count("pd", "routed")
                await self._decode_prefilled(leg.server, params, readers)
                return
            if params is not None:  # who could read it has gone
                self.upstreams.give_back(leg.server, self.headers, params)
            leg = "no_kv_params" if params is None else "incompatible"
        if leg is None:
            return
        self._trace.decode_only = leg
        self._count("decode_only", leg)
        is_long = leg == "prefill_context"  # then for the longest context
        length = self._pool.context(Kind.DECODE) if is_long else None
        unfit = self._unfit(Kind.DECODE, length or 0)
        if not self._pool.ready(Kind.DECODE, unfit):  # a shorter one may be enough
            unfit = self._unfit(Kind.DECODE)
        await self._decode(None, unfit)

    async def _open_early(self, prefill: Server) -> Leg:
        """The decode leg beside a prefill at this server, whose bytes go first. Raises LegFailed
        where it has to come after it."""
        await asyncio.sleep(0)
        late = LegFailed("not beside its prefill", None, None)
        channel, secret = prefill.health.side_channel, self.upstreams.secret
        is_late = self._losses.num > 0 or bodies.tells_of_prompt(self._plain)
        if channel is None or not channel.host or not secret or is_late:
            raise late
        pool, unfit = (
            self._pool.readers_of(prefill.health.kv_digest),
            self._unfit(Kind.DECODE),
        )
        decodes = pool.ready(Kind.DECODE)
        unfit += [s for s in decodes if s.is_doubted or s.url == prefill.url]
        unfit += [s for s in decodes if not s.health.subscribes]
        if not pool.ready(Kind.DECODE, unfit):
            raise late
        told = {
            "transfer_id": self._transfer_id,
            "issued_s": int(time.time()),
            **asdict(channel),
        }
        self._trace.prefill = prefill.url
        params = msgspec.Raw(msgspec.json.encode(Offer(**told).to_json(secret)))
        call = replace(self._decode_call(params, whole_from=400), pool=pool)
        return await self.upstreams.run(call, self._trace, unfit)

    async def _prefill_or_both(self) -> Leg | str | None:
        """What `_prefill` returns; or None, when a decode leg that was opened together with the
        prefill leg has been relayed. Either of them ends with the other."""
        early = EarlyDecode(self.upstreams, self._open_early, self._losses)
        prefill, leg = asyncio.ensure_future(self._prefill(early)), None
        try:
            decode = await early.take(prefill)
            if decode is None:
                leg = await prefill
                return leg
            self._count("pd", "routed")
            await self._have_answered(decode)
            return None
        finally:
            early.end()
            is_over = leg is not None or self.reply.has_succeeded
            if not is_over and (lender := lender_of(prefill)):
                named = {"do_remote_decode": True, "transfer_id": self._transfer_id}
                self.upstreams.give_back(lender, self.headers, named, _LEFT_S)
            prefill.cancel()  # which tells its server, if it has not answered

    async def _decode_prefilled(
        self, lender: Server, params: msgspec.Raw, readers: Pool, **options: Any
    ) -> None:
        """The decode leg; unless it ends well, the lender is told to take its KV back."""
        after_s = 0.0
        self._pool = readers
        try:
            unfit = self._unfit(Kind.DECODE, bodies.num_tokens(self._body, params))
            await self._decode(params, unfit, **options)
        except asyncio.CancelledError:
            after_s = _LEFT_S
            raise
        finally:
            if not self.reply.has_succeeded:
                self.upstreams.give_back(lender, self.headers, params, after_s)

    async def _score(self) -> str | None:
        """Has a prefill server answer the request; or says why none can be had."""
        call = self._call(
            Kind.PREFILL, bodies.decode_leg(self._body, None), whole_from=400
        )
        contexts = [
            self._pool.context(kind) or 0 for kind in Kind
        ]  # here one of P is enough
        asked = await self._ask_prefill(call, max(contexts))
        if isinstance(asked, str):
            return asked
        self._trace.prefill = asked.server.url
        outcome = "scored" if asked.is_open else f"status_{asked.response.status}"
        self.upstreams.count("prefill", outcome)
        await self._relay(asked)
        return None

    async def _prefill(self, early: EarlyDecode) -> Leg | str:
        """A prefill server's whole answer; or why the request is to do without."""
        context, everyone = self._pool.context(Kind.DECODE), self._pool
        transfer_id = self._transfer_id = uuid.uuid4().hex
        leg = bodies.prefill_leg(self._body, self.path, transfer_id)
        if not self._pool.ready(
            Kind.DECODE, self._unfit(Kind.DECODE)
        ):  # will be refused
            return "decode_choices"
        self._pool = everyone.paired()
        if everyone.ready(Kind.PREFILL) and not self._pool.ready(Kind.PREFILL):
            return "incompatible"
        prefills, decodes = (self._pool.ready(kind, self._unfit(kind)) for kind in Kind)
        knowledge, ask = self.upstreams.knowledge, self._ask
        if (
            ask is not None
            and prefills
            and knowledge.goes_alone(ask, prefills, decodes)
        ):
            return "placed"
        call = self._call(
            Kind.PREFILL,
            leg,
            whole_from=0,
            transfer_id=transfer_id,
            on_ask=early.follow,
            foreign_body=lambda: bodies.prefill_leg(
                self._plain, self.path, foreign=True
            ),
        )
        asked = await self._ask_prefill(call, context)
        if isinstance(asked, str):
            return asked
        trace = self._trace
        trace.prefill, trace.prefill_s = asked.server.url, trace.elapsed_s()
        self.upstreams.metrics.observe("baton_proxy_prefill_seconds", trace.prefill_s)
        return asked

    async def _ask_prefill(self, call: UpstreamCall, context: int | None) -> Leg | str:
        """What the first prefill server says that has room for the request; or why none did.

        Args:
            context: the longest of the servers that may be asked instead.
        """
        reason, unfit = "prefill_choices", self._unfit(Kind.PREFILL)
        ready = self._pool.ready
        while ready(Kind.PREFILL, unfit) or not (unfit and ready(Kind.PREFILL)):
            try:
                leg = await self.upstreams.run(call, self._trace, unfit)
            except LegFailed as failed:
                return failed.failure.value if failed.failure else "no_prefill_server"
            answer = leg.response
            if answer.status == PayloadTooLarge.status and ready(Kind.DECODE):
                return "prefill_body"
            own = leg.server.health.room.max_model_len
            if not may_fit_elsewhere(answer, own, context):
                return leg
            reason, unfit = "prefill_context", self._unfit(Kind.PREFILL, (own or 0) + 1)
        return reason

    async def _decode(
        self, params: msgspec.Raw | None, unfit: Sequence[Server] = (), **options: Any
    ) -> None:
        """A decode server generates, or goes on with what others have generated."""
        call = self._decode_call(params, **options)
        unfit = [*unfit, *self._losses.avoided]
        if self.reply.kept:  # what is signed
            unfit += [s for s in self._pool.of[Kind.DECODE] if s.is_doubted]
        await self._have_answered(self.upstreams.run(call, self._trace, unfit))

    def _decode_call(self, params: msgspec.Raw | None, **options: Any) -> UpstreamCall:
        losses = self._losses
        options.setdefault("whole_from", 500 if self.reply.status is None else 400)
        return self._call(
            Kind.DECODE,
            bodies.decode_leg(self._body, params, losses.resume()),
            params,
            own_headers=losses.headers(),
            max_deliveries=losses.max_deliveries(),
            goes_on=losses.may_go_on,
            **options,
        )

    async def _have_answered(self, asked: Awaitable[Leg]) -> None:
        """Relays what a decode server answers, or what the last one said that did not take it."""
        begun, goes_on = self.reply.status is not None, bool(self.reply.kept)
        try:
            leg = await asked
        except LegFailed as failed:
            if failed.answer is None or begun or goes_on:
                raise decode_error(failed) from None
            await self.reply.relay(failed.answer)
            return
        self._trace.decode = leg.server.url
        is_usable = (
            self.reply.can_go_on_with(leg.response)
            if begun
            else leg.response.status < 400
        )
        if (begun or goes_on) and not is_usable:
            self.upstreams.end(leg)
            code = bodies.error_of(leg.response.body or b"") or leg.response.status
            raise DecodeServerLost(f"no decode server goes on with this answer: {code}")
        self._losses.count("resumed")
        await self._relay(leg)

    async def _relay(self, leg: Leg) -> None:
        if not leg.is_open:
            await self.reply.relay(leg.response)
            return
        server, kind, goes_on = (
            leg.server,
            leg.server.kind.value,
            self._losses.may_go_on,
        )
        event, params = None, None
        try:
            relaying = self.reply.relay(leg.response)
            await self.upstreams.unless_given_up(server, relaying, goes_on=goes_on)
            self._fleet.succeeded(server)
            return
        except UpstreamError as broken:
            failure = broken.failure
            if isinstance(broken, HandedBack):
                event, params = broken.event, broken.params
            if params is None:
                self.upstreams.failed(server, failure, str(broken), None)
            told = (
                DecodeServerTimeout
                if isinstance(broken, TimedOut)
                else DecodeServerLost
            )
            error = told(f"the {kind} server broke off its answer: {broken}")
        finally:
            self.upstreams.end(leg)
        if self.reply.finished:  # all that was missing is HTTP's own end
            await self.reply.end()
            return
        if not goes_on:
            raise error
        self._trace.num_moved += params is not None
        self._trace.num_lost += params is None
        has_begun = self.reply.status is not None
        if (
            params is not None and not self.reply.kept
        ):  # of tokens that nobody can name any more
            self.upstreams.give_back(server, self.headers, params)
            params = None
        raise Loss(error, failure, server, event, has_begun, params)

    def _call(
        self, kind: Kind, leg: bytes, params: msgspec.Raw | None = None, **options: Any
    ) -> UpstreamCall:
        if self._plain:
            foreign = partial(bodies.decode_leg, self._plain, params, foreign=True)
            options.setdefault("foreign_body", foreign)
        asked = self.method, self.path, self.headers
        options |= {
            "deadline": self.deadline,
            "priority": bodies.priority(self._plain) or 0,
        }
        options |= {"computes": params is None, "is_admitted": self._losses.num > 0}
        return UpstreamCall(kind, *asked, leg, self._pool, self._ask, **options)

    def _unfit(self, kind: Kind, num_tokens: int = 0) -> list[Server]:
        """Servers without room for so long a sequence, or for so many of them."""
        return self._pool.unfit(kind, num_tokens, bodies.num_choices(self._body))

    def _count(self, path: str, reason: str) -> None:
        """A request counts once, whatever becomes of its servers."""
        if not self._losses.num:
            self.upstreams.count(path, reason)
