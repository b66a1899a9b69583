"""One request through a prefill and a decode server.

prefill leg --params--> decode leg --> the client gets the decode server's bytes
    |- 4xx -----------> the client gets that; no decode server is asked
    `- nothing usable-> decode leg without params: it does all the work, and is counted

A request that only scores its prompt is the prefill server's alone; no KV moves.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from protocol.errors import BatonError, ContextLengthExceeded, NoServerAvailable, PayloadTooLarge
from protocol.http import sse
from protocol.metrics import Metrics
from protocol.openai.prefill_leg import RELEASE_PATH
from protocol.process.logging import get_logger
from proxy import body as bodies
from proxy.body import Body
from proxy.errors import DecodeServerLost, DecodeServerTimeout
from proxy.membership import Fleet, Server
from proxy.relay import Reply
from proxy.retry import Failure, Kind, RetryPolicy
from proxy.upstream import (
    Exhausted,
    Headers,
    Response,
    TimedOut,
    Unreachable,
    Upstream,
    UpstreamError,
)
from proxy.upstream_call import (
    Answer,
    LegFailed,
    RequestTrace,
    ResultT,
    UpstreamCall,
    failure_of,
    read,
)

logger = get_logger(__name__)

# Why a request is decoded without a prefill.
_PREFILL_BODY, _PREFILL_CONTEXT, _PREFILL_CHOICES, _DECODE_CHOICES = (
    "prefill_body",
    "prefill_context",
    "prefill_choices",
    "decode_choices",
)
GIVE_BACK_TIMEOUT_S = 30.0  # a prefill server that is silent frees the KV when its lease ends
CLOSE_TIMEOUT_S = 2.0
# A decode server hears of a client that left by the end of its connection, a busy one within half a
# second, and ends the lease itself. A release that overtook it would count as a lost lease there.
_LEFT_S = 1.0


@dataclass(frozen=True)
class ClientRequest:
    """A request as both legs need it. `body` is sanitized."""

    path: str
    headers: Headers
    body: Body


class PDRequest:
    """Takes requests through the fleet."""

    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        metrics: Metrics,
        policy: RetryPolicy | None = None,
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self._legs = UpstreamCall(fleet, metrics, policy or RetryPolicy())
        self._giving_back: set[asyncio.Task[None]] = set()

    async def run(self, request: ClientRequest, reply: Reply, trace: RequestTrace) -> None:
        """Serves `request`. Being cancelled aborts the leg in flight.

        Raises:
            BatonError: what the client is to be told; the reply has not ended.
        """
        is_scoring = bodies.is_scoring(request.body)
        if is_scoring:
            trace.rotation = "score"
            if await self._score(request, reply, trace):
                return
        if self._fleet.num_ready(Kind.DECODE) == 0:
            raise NoServerAvailable("no decode server is ready; see /ready")
        prefilled = None if is_scoring else await self._prefill(request, trace)
        if isinstance(prefilled, Answer):
            await reply.relay_answer(prefilled.status, prefilled.headers, prefilled.body)
        elif prefilled is None:
            leg = bodies.decode_leg(request.body, None)
            is_long = trace.decode_only == _PREFILL_CONTEXT  # then for those of the longest context
            length = self._fleet.context(Kind.DECODE) if is_long else None
            unfit = self._unfit(Kind.DECODE, request, length or 0)
            if self._fleet.num_ready(Kind.DECODE, unfit) == 0:  # a shorter one may be enough
                unfit = self._unfit(Kind.DECODE, request)
            await self._decode("POST", request.path, request.headers, leg, reply, trace, unfit)
        else:
            await self._decode_prefilled(request, prefilled, reply, trace)

    async def _decode_prefilled(
        self, request: ClientRequest, params: msgspec.Raw, reply: Reply, trace: RequestTrace
    ) -> None:
        """The decode leg; unless it ends well, the prefill server is told to take its KV back."""
        after_s = 0.0
        try:
            leg = bodies.decode_leg(request.body, params)
            num_tokens = bodies.num_tokens(request.body, params)
            unfit = self._unfit(Kind.DECODE, request, num_tokens)
            await self._decode("POST", request.path, request.headers, leg, reply, trace, unfit)
        except asyncio.CancelledError:
            after_s = _LEFT_S
            raise
        finally:
            if not reply.has_succeeded:
                self._will_not_come(request, params, trace.prefill, after_s)

    def on_silence(self, server: Server, is_long: bool) -> None:
        """Prefill legs go elsewhere, or are done without. A decode server keeps its requests for
        longer, as a client may get an error for one that may still be answered."""
        if is_long or server.kind is Kind.PREFILL:
            self._legs.give_up(server)

    async def close(self) -> None:
        """Waits for what is still being given back, for `CLOSE_TIMEOUT_S` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*self._giving_back, return_exceptions=True)

    def _will_not_come(
        self, request: ClientRequest, params: msgspec.Raw, url: str, after_s: float = 0.0
    ) -> None:
        """Has KV given back by a task of its own: neither the client nor its absence delays it."""
        task = asyncio.create_task(self._give_back(request, params, url, after_s))
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)

    async def _give_back(
        self, request: ClientRequest, params: msgspec.Raw, url: str, after_s: float
    ) -> None:
        """Tells the prefill server that nobody will come for the KV; its lease runs out anyway."""
        await asyncio.sleep(after_s)
        try:
            async with asyncio.timeout(GIVE_BACK_TIMEOUT_S):
                response = await self._upstream.send(
                    url,
                    "POST",
                    RELEASE_PATH,
                    headers=request.headers,
                    body=bodies.release_body(params),
                )
                await response.read()
        except (UpstreamError, TimeoutError) as error:
            logger.info("KV was not given back to %s: %r", url, error)

    async def get(self, path: str, headers: Headers, reply: Reply, trace: RequestTrace) -> None:
        """Answers a GET as a decode server does.

        Raises:
            BatonError: as `run`.
        """
        trace.rotation = "read"
        await self._decode("GET", path, headers, b"", reply, trace)

    async def post(
        self, path: str, headers: Headers, body: bytes, reply: Reply, trace: RequestTrace
    ) -> None:
        """Answers a POST that generates nothing as a decode server does.

        Raises:
            BatonError: as `run`.
        """
        trace.rotation = path
        await self._decode("POST", path, headers, body, reply, trace)

    async def _score(self, request: ClientRequest, reply: Reply, trace: RequestTrace) -> bool:
        """Has a prefill server answer the request; False: none can be had, nothing was sent."""
        leg = bodies.decode_leg(request.body, None)
        send = self._sender("POST", request.path, request.headers, leg, whole_from=400)
        contexts = [self._fleet.context(kind) or 0 for kind in Kind]  # here one of P is enough
        asked = await self._ask_prefill(request, send, trace, max(contexts))
        if asked is None:
            return False
        server, response = asked
        trace.prefill = server.url
        if isinstance(response, Response):
            self._count("prefill", "scored")
            await self._relay(server, response, reply, trace)
            return True
        self._count("prefill", f"status_{response.status}")
        await reply.relay_answer(response.status, response.headers, response.body)
        return True

    async def _prefill(
        self, request: ClientRequest, trace: RequestTrace
    ) -> Answer | msgspec.Raw | None:
        """The params of a prefill, None to do without, or the answer that refuses the request."""
        context = self._fleet.context(Kind.DECODE)
        transfer_id = uuid.uuid4().hex
        leg = bodies.prefill_leg(request.body, request.path, context, transfer_id)

        async def send(server: Server) -> Answer:
            try:
                return await read(
                    await self._upstream.send(
                        server.url, "POST", request.path, headers=request.headers, body=leg
                    )
                )
            except (Unreachable, Exhausted):
                raise
            except BaseException:  # the answer may be on its way, and KV kept for who reads it
                self._will_not_come(request, bodies.unanswered(transfer_id), server.url)
                raise

        unfit = self._unfit(Kind.DECODE, request)
        if self._fleet.num_ready(Kind.DECODE, unfit) == 0:  # it will be refused
            self._decode_only(_DECODE_CHOICES, trace)
            return None
        asked = await self._ask_prefill(request, send, trace, context)
        if asked is None:
            return None
        server, answer = asked
        trace.prefill, trace.prefill_s = server.url, trace.elapsed_s()
        self._metrics.observe("baton_proxy_prefill_seconds", trace.prefill_s)
        if answer.status != 200:
            self._count("prefill", f"status_{answer.status}")
            return answer
        params = bodies.params_of(answer.body)
        if params is None:
            self._decode_only("no_kv_params", trace)
        else:
            self._count("pd", "routed")
        return params

    async def _ask_prefill(
        self,
        request: ClientRequest,
        send: Callable[[Server], Awaitable[ResultT]],
        trace: RequestTrace,
        context: int | None,
    ) -> tuple[Server, ResultT] | None:
        """What the first prefill server says that has room for the request; `release`d unless it is
        to be relayed. None: to be done without, which is counted.

        Args:
            context: the longest of the servers that may be asked instead.
        """
        reason, unfit = _PREFILL_CHOICES, self._unfit(Kind.PREFILL, request)
        num_ready = self._fleet.num_ready
        while num_ready(Kind.PREFILL, unfit) or not (unfit and num_ready(Kind.PREFILL)):
            try:
                server, answer = await self._legs.run(Kind.PREFILL, send, trace, unfit)
            except LegFailed as failed:
                reason = failed.reason
                break
            if not isinstance(answer, Answer):
                return server, answer
            self._legs.release(server)
            self._legs.succeeded(server)
            if answer.status == PayloadTooLarge.status and num_ready(Kind.DECODE):
                reason = _PREFILL_BODY
                break
            own = self._fleet.health(server).room.max_model_len
            if not _is_beyond(answer, own, context):
                return server, answer
            reason, unfit = _PREFILL_CONTEXT, self._unfit(Kind.PREFILL, request, (own or 0) + 1)
        self._decode_only(reason, trace)
        return None

    def _unfit(self, kind: Kind, request: ClientRequest, num_tokens: int = 0) -> list[Server]:
        """Servers without room for so long a sequence, or for so many of them."""
        return self._fleet.unfit(kind, num_tokens, bodies.num_choices(request.body))

    def _decode_only(self, reason: str, trace: RequestTrace) -> None:
        trace.decode_only, trace.rotation = reason, "decode_only"
        self._count("decode_only", reason)

    def _count(self, path: str, reason: str) -> None:
        """Counts a request by the way it takes. A reason is one word: see retry.Failure."""
        self._metrics.inc("baton_proxy_requests", path=path, reason=reason)

    async def _decode(
        self,
        method: str,
        path: str,
        headers: Headers,
        leg: bytes,
        reply: Reply,
        trace: RequestTrace,
        unfit: Sequence[Server] = (),
    ) -> None:
        """Relays what a decode server answers, or what the last one said that did not take it."""
        send = self._sender(method, path, headers, leg)
        try:
            server, response = await self._legs.run(Kind.DECODE, send, trace, unfit)
        except LegFailed as failed:
            if failed.answer is None:
                raise failed.to_error() from None
            await reply.relay_answer(
                failed.answer.status, failed.answer.headers, failed.answer.body
            )
            return
        assert isinstance(response, Response)
        trace.decode = server.url
        await self._relay(server, response, reply, trace)

    def _sender(
        self, method: str, path: str, headers: Headers, body: bytes, whole_from: int = 500
    ) -> Callable[[Server], Awaitable[Answer | Response]]:
        """What sends this leg to a server. An answer with a status of `whole_from` or above is read
        whole, any other is to be relayed."""

        async def send(server: Server) -> Answer | Response:
            response = await self._upstream.send(
                server.url, method, path, headers=headers, body=body
            )
            return await read(response) if response.status >= whole_from else response

        return send

    async def _relay(
        self, server: Server, response: Response, reply: Reply, trace: RequestTrace
    ) -> None:
        try:
            ended = await self._legs.unless_given_up(server, _relay(response, reply, trace))
        except UpstreamError as error:
            self._legs.failed(server, failure_of(error), None, f"{server}: {error}")
            raise _broken(server, error) from None
        finally:
            await response.aclose()
            self._legs.release(server)
        if not ended:
            self._legs.failed(server, Failure.ERROR, None, f"{server}: no last event")
            raise DecodeServerLost(
                f"the {server.kind.value} server ended the stream before its last event"
            )
        self._legs.succeeded(server)


async def _relay(response: Response, reply: Reply, trace: RequestTrace) -> bool:
    """Sends the client what the decode server sends; False: a stream without an end of its own."""
    media_type = (response.header(b"content-type") or b"").partition(b";")[0].strip()
    if media_type == sse.MEDIA_TYPE.encode():
        return await reply.relay_stream(response, trace.on_bytes)
    answer = await read(response)  # whole: a failure up to here is still an HTTP error
    trace.on_bytes()
    await reply.relay_answer(answer.status, answer.headers, answer.body)
    return True


def _is_beyond(answer: Answer, own: int | None, context: int | None) -> bool:
    """Whether a request too long for a prefill server's `own` context may fit another server, of
    which the longest has `context`."""
    is_too_long = bodies.error_code(answer.body) == ContextLengthExceeded.code
    return is_too_long and own is not None and context is not None and own < context


def _broken(server: Server, error: UpstreamError) -> BatonError:
    kind = DecodeServerTimeout if isinstance(error, TimedOut) else DecodeServerLost
    return kind(f"the {server.kind.value} server broke off its answer: {error}")
