"""One client request on its way through a prefill and a decode server.

    prefill leg --kv_transfer_params--> decode leg --> relayed to the client
        |- 4xx -----------------------> relayed to the client; no decode leg
        `- no usable answer ----------> decode leg without params: the decode server
                                        does all the work, and the request is counted
                                        as decode_only

If both servers support it, the legs are opened together: see legs/early_decode.py. A
request that only scores its prompt has only a prefill leg, and no KV moves. If a
decode server is lost, another decode server continues: see `_generate`.
"""

import asyncio
import time
import uuid
from dataclasses import asdict, dataclass, replace
from functools import partial

import msgspec

from protocol.errors import BatonError, Forbidden, NoServerAvailable
from protocol.kv_offers import Offer
from protocol.resume import FrameHistory
from proxy import body as bodies
from proxy.charge import charged
from proxy.failover import UpstreamLost
from proxy.legs.call import Leg, LegFailed
from proxy.legs.early_decode import EarlyDecode, lender_of
from proxy.legs.outage import (
    RETRY_PAUSE_S,
    Outage,
    may_wait_again,
    wait_after_loss,
)
from proxy.legs.outcome import DecodeOnly, DecodeOnlyReason
from proxy.legs.request_legs import RequestLegs
from proxy.membership import Kind, Pool, Server
from proxy.placement.request_profile import limit_to_context

# Delay of a release after the proxy has closed the connection of a decode leg. The
# decode server notices within half a second, and ends the lease itself. If the release
# ended the lease first, the decode server would count a lost lease.
_RELEASE_DELAY_S = 1.0


@dataclass(frozen=True)
class _PrefilledDecode:
    """A decode leg that pulls the KV of the prompt from another server.

    Attributes:
        lender: the server that has the KV.
        params: the lender's kv_transfer_params.
        readers: the decode servers that can read the KV.
    """

    lender: Server
    params: msgspec.Raw
    readers: Pool


@dataclass
class PDRequest(RequestLegs):
    """A client's request. Cancelling `run` or `pass_on` aborts the legs in flight."""

    # entry points

    async def pass_on(self, model: str | None = None) -> None:
        """Relay a decode server's answer to a request that generates nothing.

        Args:
            model: a server of this model answers. None: the body names the model, or
                any server may answer.

        Raises:
            BatonError: the request failed before its reply was complete. The caller
                must end the reply with this error.
        """
        num_tokens = 0
        if self.data:
            body = await bodies.read_body(self.data)
            num_tokens = bodies.num_text_tokens(body)
            if len(self._fleet.models) > 1:
                self._model_pool = self._fleet.pool(bodies.model_of(body))
        elif model is not None:
            self._model_pool = self._fleet.pool(model)
        with charged(self.grant, self.reply, num_tokens):
            call = self._call(Kind.DECODE, self.data, self._model_pool, computes=True)
            await self._relay_decode(self.upstreams.run(call, self._trace))

    async def run(self) -> None:
        """Serve a request that generates.

        Raises:
            BatonError: the request failed before its reply was complete. The caller
                must end the reply with this error.
        """
        await self._read_body()
        profile = bodies.profile(self._body)
        num_answers = bodies.num_prompts(self._body) * bodies.num_choices(self._body)
        num_reserved = profile.max_output_tokens * num_answers
        with charged(self.grant, self.reply, profile.tokens, num_reserved):
            self._trace.begin()
            self.upstreams.metrics.inc("baton_proxy_requests_in_progress")
            try:
                model = bodies.model_of(self._unseeded_body)
                self._model_pool = self._fleet.pool(model)
                self._trace.model = model or ",".join(self._fleet.models) or "-"
                self._profile = limit_to_context(profile, self._longest_context())
                await self._score_or_generate()
            finally:
                self.upstreams.load_tracker.cancel(self._reservation)
                self.upstreams.metrics.inc("baton_proxy_requests_in_progress", -1)

    async def _read_body(self) -> None:
        """Read the body into `_body`; check its priority against the key's limit.

        Raises:
            BatonError: the error for the client.
        """
        min_priority = self.grant.min_priority
        body = await bodies.read_body(self.data)
        body, had_params = bodies.sanitize(body, min_priority)
        if self.grant.salting_key:
            secret = self.upstreams.secret
            body = bodies.salted(body, self.grant.salting_key, secret)
        find_context = partial(self._shortest_context, body)
        body = bodies.with_prompt_limit(body, self.path, find_context)
        self._unseeded_body = body
        self._body = bodies.seeded(body)
        priority = bodies.priority(body)
        if min_priority is not None and (priority is None or priority < min_priority):
            value = "not a 32-bit integer" if priority is None else priority
            raise Forbidden(
                f"priority is {value}; {self.grant.name} may request "
                f"{min_priority} or more",
                param="priority",
            )
        if had_params:
            self.upstreams.metrics.inc("baton_proxy_stripped_kv_transfer_params")

    def _shortest_context(self, body: bodies.Body) -> int | None:
        """Return the shortest context of the decode servers of the body's model."""
        pool = self._fleet.pool(bodies.model_of(body))
        return pool.shortest_context(Kind.DECODE)

    def _longest_context(self) -> int | None:
        """Return the longest context of the model's servers.

        None unless all ready servers have reported their contexts.
        """
        pool = self._model_pool
        contexts = [pool.longest_context(kind) for kind in Kind if pool.ready(kind)]
        reported = [context for context in contexts if context is not None]
        if not reported or len(reported) < len(contexts):
            return None
        return max(reported)

    # scoring

    async def _score_or_generate(self) -> None:
        if not bodies.is_scoring(self._body):
            await self._generate(None)
            return
        scored = await self._score()
        if isinstance(scored, DecodeOnly):
            await self._generate(scored)
            return
        self._trace.prefill = scored.server.url
        outcome = f"status_{scored.response.status}"
        if scored.is_open:
            outcome = "scored"
        self.upstreams.count_request("prefill", outcome)
        await self._relay(scored)

    async def _score(self) -> Leg | DecodeOnly:
        """Return a prefill server's scores, or why no prefill server returns them."""
        call = self._call(
            Kind.PREFILL,
            bodies.decode_leg(self._body, None),
            self._model_pool,
            computes=True,
            min_read_status=400,
        )
        contexts = [self._model_pool.longest_context(kind) or 0 for kind in Kind]
        return await self._run_prefill(call, max(contexts))

    # generation and failover

    async def _generate(self, decode_only: DecodeOnly | None) -> None:
        """Generate the answer, and continue it if a decode server did not complete it.

        Another decode server can continue the answer, because the next tokens depend
        only on the request and on the tokens so far.

        Args:
            decode_only: why there is no prefill leg; None if there may be one.
        """
        self._failover.is_enabled = self.upstreams.max_resumes > 0
        outage = Outage(self.upstreams, self.reply, self._failover)
        loss: UpstreamLost | None = None
        resume_until_s = 0.0
        while loss is None or self._count_and_check_failover(loss):
            try:
                if loss is None:
                    await self._generate_once(decode_only)
                else:
                    await self._continue_after(loss, decode_only, resume_until_s)
                return
            except UpstreamLost as next_loss:
                loss = next_loss
                resume_until_s = time.monotonic() + self.upstreams.resume_wait_s
            except BatonError as error:
                if loss is None:
                    await outage.outlast(error, self._model_pool)
                    continue
                loss.params = None
                if may_wait_again(error, self._model_pool, resume_until_s):
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                self._failover.count_outcome("failed")
                if loss.has_begun or not self.reply.frame_history:
                    break
                # The client has no part of the answer yet, so the next server starts
                # the answer from the beginning.
                self.reply.frame_history = FrameHistory()
                if self.reply.meter is not None:
                    self.reply.meter.reset()
        if loss.params is not None:
            self.upstreams.release_kv(loss.server, self.headers, loss.params)
        if loss.event is None or not loss.has_begun:
            raise loss.error
        await self.reply.break_off(loss.event)

    def _count_and_check_failover(self, loss: UpstreamLost) -> bool:
        return self._failover.count_and_check_failover(
            loss, self._fleet.by_kind[Kind.DECODE]
        )

    async def _continue_after(
        self, loss: UpstreamLost, decode_only: DecodeOnly | None, until_s: float
    ) -> None:
        """Continue an answer that its decode server did not complete.

        Args:
            until_s: when the wait for another server ends (monotonic time).
        """
        self._trace.decode_only = "-"
        digest = loss.server.health.kv_digest
        if loss.params is not None:
            # The server handed the answer over and lends its KV. If no other server is
            # ready, that server continues the answer itself, if it still runs.
            prefilled = _PrefilledDecode(
                loss.server, loss.params, self._model_pool.readers_of(digest)
            )
            await self._decode_prefilled(prefilled, last_resort=loss.server)
            return
        servers = self._fleet.by_kind[Kind.DECODE]
        avoided = self._failover.avoided
        if loss.has_begun:
            # Servers of another model or dtype would refuse to continue.
            avoided = [each for each in servers if each.health.kv_digest != digest]
        elif all(server in avoided for server in servers):
            avoided = []
        await wait_after_loss(
            self._model_pool,
            avoided,
            max(0.0, until_s - time.monotonic()),
            has_begun=loss.has_begun,
        )
        await self._generate_once(decode_only)

    async def _generate_once(self, decode_only: DecodeOnly | None) -> None:
        """Generate the answer, or the rest of an answer after a loss.

        Raises:
            UpstreamLost: a decode server did not complete the answer, and another
                server may continue.
            BatonError: the error for the client.
        """
        pool = self._model_pool
        if not pool.ready(Kind.DECODE):
            raise NoServerAvailable("no decode server is ready; see /ready")
        is_first = not self._failover.num_losses
        if self._profile is not None and is_first:
            # Without this check, a prefill could be computed while every decode server
            # is full and refuses the request.
            self.upstreams.full_servers.check_capacity(
                Kind.DECODE,
                self._profile,
                bodies.priority(self._unseeded_body) or 0,
                pool.ready(Kind.DECODE),
            )
        if decode_only is not None:
            await self._decode_only(decode_only)
            return
        prefill = await self._prefill_or_both()
        match prefill:
            case None:
                return
            case Leg() if prefill.response.status != 200 and is_first:
                outcome = f"status_{prefill.response.status}"
                self.upstreams.count_request("prefill", outcome)
                await self._relay(prefill)
            case Leg():
                await self._decode_after(prefill)
            case DecodeOnly():
                await self._decode_only(prefill)

    async def _decode_after(self, prefill: Leg) -> None:
        """Run the decode leg that follows `prefill`, with or without its KV."""
        match self._after_prefill(prefill):
            case _PrefilledDecode() as prefilled:
                self._count("pd", "routed")
                await self._decode_prefilled(prefilled)
            case DecodeOnly() as decode_only:
                await self._decode_only(decode_only)

    def _after_prefill(self, leg: Leg) -> _PrefilledDecode | DecodeOnly:
        """Return which decode leg follows a prefill leg, depending on its answer."""
        params = bodies.params_of(leg.response.body or b"")
        if params is None:
            return DecodeOnly(DecodeOnlyReason.NO_KV_PARAMS)
        readers = self._model_pool.readers_of(leg.server.health.kv_digest)
        if readers.ready(Kind.DECODE):
            return _PrefilledDecode(leg.server, params, readers)
        # No server that can read the KV is ready any more.
        self.upstreams.release_kv(leg.server, self.headers, params)
        return DecodeOnly(DecodeOnlyReason.INCOMPATIBLE)

    # prefill leg

    async def _prefill_or_both(self) -> Leg | DecodeOnly | None:
        """Return the result of `_prefill`, or None if the request has been served.

        The request has been served if a decode leg was opened together with the prefill
        leg, and its answer was relayed. A leg that is still running is cancelled.
        """
        early = EarlyDecode(self.upstreams, self._open_early, self._failover)
        prefill = asyncio.ensure_future(self._prefill(early))
        has_result = False
        try:
            decode = await early.take(prefill)
            if decode is None:
                result = await prefill
                has_result = True
                return result
            self._count("pd", "routed")
            await self._relay_decode(decode)
            return None
        finally:
            early.close()
            if not has_result and not self.reply.has_succeeded:
                self._release_prefill(lender_of(prefill))
            # If the prefill server has not answered, this aborts its work.
            prefill.cancel()

    def _release_prefill(self, lender: Server | None) -> None:
        if lender is not None:
            params = {"do_remote_decode": True, "transfer_id": self._transfer_id}
            self.upstreams.release_kv(lender, self.headers, params, _RELEASE_DELAY_S)

    async def _prefill(self, early: EarlyDecode) -> Leg | DecodeOnly:
        """Return a prefill server's answer, or why there is none."""
        pool = self._model_pool
        context = pool.longest_context(Kind.DECODE)
        self._transfer_id = uuid.uuid4().hex
        if not pool.ready(Kind.DECODE, self._unfit(pool, Kind.DECODE)):
            # No decode server accepts this many choices: skip the prefill, and a
            # decode server will refuse the request.
            return DecodeOnly(DecodeOnlyReason.DECODE_CHOICES)
        paired = pool.paired()
        if pool.ready(Kind.PREFILL) and not paired.ready(Kind.PREFILL):
            return DecodeOnly(DecodeOnlyReason.INCOMPATIBLE)
        if self._place_decode_only(paired):
            return DecodeOnly(DecodeOnlyReason.PLACED)
        call = self._call(
            Kind.PREFILL,
            bodies.prefill_leg(self._body, self.path, self._transfer_id),
            paired,
            computes=True,
            min_read_status=0,
            foreign_body=self._foreign_prefill_body,
        )
        call = replace(
            call, transfer_id=self._transfer_id, on_server_chosen=early.follow
        )
        leg = await self._run_prefill(call, context)
        if isinstance(leg, Leg):
            prefill_s = self._trace.elapsed_s()
            self._trace.prefill = leg.server.url
            self._trace.prefill_s = prefill_s
            self.upstreams.metrics.observe(
                "baton_proxy_prefill_seconds",
                prefill_s,
                trace_id=self._trace.stored_trace_id,
            )
        return leg

    def _place_decode_only(self, pool: Pool) -> bool:
        """Return whether a decode server is to compute the prompt itself.

        With `--disaggregate auto`, the servers' loads decide. If they favor a decode
        server, the request's load on that server is reserved in `_reservation`.
        """
        prefills = pool.ready(Kind.PREFILL, self._unfit(pool, Kind.PREFILL))
        if self._profile is None or not prefills:
            return False
        load_tracker = self.upstreams.load_tracker
        if load_tracker.decode_only is not None:
            return load_tracker.decode_only
        decodes = pool.ready(Kind.DECODE, self._unfit(pool, Kind.DECODE))
        # An earlier attempt may have left a reservation if its leg did not start.
        load_tracker.cancel(self._reservation)
        self._reservation = load_tracker.reserve_decode_only(
            self._profile, prefills, decodes
        )
        return self._reservation is not None

    # decode leg

    async def _open_early(self, prefill: Server) -> Leg:
        """Open the decode leg while `prefill` computes the prompt.

        Raises:
            LegFailed: the decode leg cannot start before the prefill leg has ended.
        """
        await asyncio.sleep(0)  # so that the prefill leg is sent first
        cannot_open = LegFailed("cannot start together with its prefill", None, None)
        channel = prefill.health.side_channel
        secret = self.upstreams.secret
        if channel is None or not channel.host or not secret:
            raise cannot_open
        if self._failover.num_losses or bodies.reports_prompt(self._unseeded_body):
            raise cannot_open
        pool = self._model_pool.readers_of(prefill.health.kv_digest)
        excluded = [
            *self._unfit(self._model_pool, Kind.DECODE),
            *(
                server
                for server in pool.ready(Kind.DECODE)
                if server.is_trust_circuit_open
                or server.url == prefill.url
                or not server.health.subscribes
            ),
        ]
        if not pool.ready(Kind.DECODE, excluded):
            raise cannot_open
        self._trace.prefill = prefill.url
        offer = Offer(
            transfer_id=self._transfer_id,
            issued_s=int(time.time()),
            **asdict(channel),
        )
        params = msgspec.Raw(msgspec.json.encode(offer.to_json(secret)))
        call = self._decode_call(pool, params)
        call = replace(call, min_read_status=400)
        return await self.upstreams.run(call, self._trace, excluded)

    async def _decode_prefilled(
        self, prefilled: _PrefilledDecode, last_resort: Server | None = None
    ) -> None:
        """Run the decode leg; if it does not succeed, release the lender's KV.

        Args:
            last_resort: the server that continues if no other server is ready.
        """
        delay_s = 0.0
        pool = prefilled.readers
        try:
            num_tokens = bodies.num_context_tokens(self._body, prefilled.params)
            unfit = self._unfit(pool, Kind.DECODE, num_tokens)
            call = self._decode_call(pool, prefilled.params)
            await self._decode(replace(call, last_resort=last_resort), unfit)
        except asyncio.CancelledError:
            delay_s = _RELEASE_DELAY_S
            raise
        finally:
            if not self.reply.has_succeeded:
                self.upstreams.release_kv(
                    prefilled.lender, self.headers, prefilled.params, delay_s
                )

    async def _decode_only(self, decode_only: DecodeOnly) -> None:
        """Run the decode leg at a server that also computes the prompt."""
        pool = self._model_pool
        self._trace.decode_only = decode_only.label
        self._count("decode_only", decode_only.label)
        num_tokens = 0
        if decode_only.needs_longest_context:
            num_tokens = pool.longest_context(Kind.DECODE) or 0
        unfit = self._unfit(pool, Kind.DECODE, num_tokens)
        if not pool.ready(Kind.DECODE, unfit):
            # The servers with the longest context refuse this many choices. The prompt
            # may still fit the context of another server.
            unfit = self._unfit(pool, Kind.DECODE)
        await self._decode(self._decode_call(pool, None), unfit)
