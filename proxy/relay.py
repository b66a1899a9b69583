"""The client's half of a request: exactly one answer, or one stream with one end.

A stream that breaks ends in an error event without `[DONE]`. To leave that event readable, the
beginning of an event that has not fully arrived is held back: no client could use it anyway.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from protocol.errors import BatonError
from protocol.http import sse
from protocol.metrics import Metrics
from protocol.openai.token_meter import TokenMeter
from protocol.process.logging import get_logger
from protocol.resume import (
    DIED,
    FAILOVER_PREFIX,
    HEADER,
    MOVED,
    FrameHistory,
    Frames,
    frames_request,
)
from protocol.settings.machine import cluster_secret
from protocol.settings.settings import ProxySettings
from proxy.membership import Server
from proxy.upstream import (
    Failure,
    Headers,
    Lost,
    Response,
    Unended,
    UpstreamError,
    as_text,
)

logger = get_logger(__name__)

Send = Callable[[dict[str, Any]], Awaitable[None]]

_FRAMED = HEADER.encode()
# Named by RFC 9110 as of one connection alone, or written by our own HTTP server.
_NOT_RELAYED = frozenset(
    b"connection keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding "
    b"upgrade content-length date server x-request-id".split()
) | {_FRAMED}
MAX_MOVES = 16  # of a stream, that its servers hand over
LOSS_REASONS = [
    each for each in Failure if each not in (Failure.UNREACHABLE, Failure.FULL)
]
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_DONE = sse.DONE.rstrip()
_FAILURES = (b"event: error", b"event: response.failed")
_LAST_EVENTS = (*_FAILURES, b"event: response.completed", b"event: response.incomplete")
_decode_event = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass
class RequestTrace:
    """What became of a request: for its log line and the metrics."""

    prefill: str = "-"  # URL of the server that answered
    decode: str = "-"
    decode_only: str = "-"  # why no prefill server was used
    started_at: float = field(default_factory=time.monotonic)
    prefill_s: float | None = None
    legs: list[tuple[str, float]] = field(
        default_factory=list
    )  # servers asked, and when (s)
    num_lost: int = 0  # decode servers, that had been given it
    num_moved: int = 0  # times that one has handed it over
    first_byte_s: float | None = None

    def begin(self) -> None:
        """The request is read; its time runs from here."""
        self.started_at = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    def on_bytes(self) -> None:
        if self.first_byte_s is None:
            self.first_byte_s = self.elapsed_s()


class EventBuffer:
    """Passes complete events on and keeps the rest; knows whether the stream came to its end."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._last = b""  # of the events that were passed, but for a [DONE]
        self._is_done = False

    def feed(self, data: bytes) -> bytes:
        """`data` up to the end of its last event, after what was held back before."""
        if not self._held and data.endswith(_EVENT_ENDS):  # as nearly always
            return self._note(data)
        searched = max(
            0, len(self._held) - 3
        )  # an event may be long, and come in many pieces
        self._held += data
        found = ((self._held.rfind(end, searched), end) for end in _EVENT_ENDS)
        return self._pass(max(at + len(end) if at >= 0 else 0 for at, end in found))

    def were_sent(self) -> None:
        """The client has the events that were passed."""

    def rest(self) -> bytes:
        """What is held back, at the end of a stream that ended well."""
        return self._pass(len(self._held))

    def _pass(self, length: int) -> bytes:
        passed = bytes(self._held[:length])
        del self._held[:length]
        return self._note(passed)

    def _note(self, passed: bytes) -> bytes:
        if text := passed.rstrip():
            self._is_done = text.endswith(_DONE)
            self._last = text.removesuffix(_DONE) or self._last
        return passed

    @property
    def has_ended(self) -> bool:
        """Whether the last event was one that ends a stream: [DONE], an error, a whole response."""
        return (
            self._is_done
            or self._last_event().startswith(_LAST_EVENTS)
            or self.has_failed
        )

    @property
    def has_failed(self) -> bool:
        """Whether the last event was an error, be it before a [DONE] as vLLM's are."""
        last = self._last_event()
        return last.startswith(_FAILURES) or _is_error(last)

    def _last_event(self) -> bytes:
        text = self._last.replace(b"\r\n", b"\n").strip()
        return text[text.rfind(b"\n\n") + 1 :].strip()


class HandedBack(UpstreamError):
    """A server ends a stream with an error, after which another one may go on.

    Args:
        event: that error's, for a client whose stream does not go on.

    Attributes:
        params: of the KV that it has lent to who goes on.
    """

    def __init__(self, text: bytes, event: bytes) -> None:
        super().__init__(
            "its engine ended" if text == DIED else "it does not go on with this"
        )
        self.failure = Failure.DIED if text == DIED else Failure.BUSY
        self.event, self.params = event, None
        if text.startswith(MOVED):
            self.failure, self.params = Failure.MOVED, msgspec.Raw(text[len(MOVED) :])


class FramedEvents(EventBuffer):
    """A stream in frames: the client gets whole ones, their texts are kept; see protocol.resume."""

    def __init__(self, kept: FrameHistory, meter: TokenMeter | None = None) -> None:
        super().__init__()
        self._kept, self._frames = kept, Frames()
        self._meter = meter
        self._texts = b""  # of what was passed and may not have been sent
        self._handed_back: HandedBack | None = None

    def feed(self, data: bytes) -> bytes:
        try:
            frames = self._frames.feed(data)
        except ValueError:
            raise Lost("what it sends are no frames") from None
        passed = b""
        for text, events in frames:
            if text[:1] == FAILOVER_PREFIX:
                self._handed_back = HandedBack(text, events)
                break
            self._texts += text + b","
            if self._meter is not None:
                self._meter.on_frame(text)
            passed = passed + events if passed else events
        return self._note(passed)

    def were_sent(self) -> None:
        if self._texts:
            self._kept.add(self._texts)
            self._texts = b""
        if self._handed_back is not None:
            raise self._handed_back


def _is_error(event: bytes) -> bool:
    """Whether what an event says is an error: a member of its own, no schema's or response's."""
    if b'"error"' not in event:
        return False
    lines = (line.partition(b":") for line in event.splitlines())
    try:
        said = _decode_event(
            b"".join(value for name, _, value in lines if name == b"data")
        )
    except (msgspec.DecodeError, RecursionError):
        return False
    return bytes(said.get("error", b"")).startswith(b"{")


class _Numbered(msgspec.Struct):
    sequence_number: int


def _next_number(sent: bytes) -> int:
    """Of the event that follows those of /v1/responses which were sent."""
    try:
        last = (b"\n" + sent).rpartition(b"\ndata:")[2]
        return msgspec.json.decode(last, type=_Numbered).sequence_number + 1
    except (msgspec.DecodeError, RecursionError):
        return 0


# Returns headers and body of the page that shows an error.
ErrorPage = Callable[[BatonError], tuple[list[tuple[bytes, bytes]], bytes]]


class Reply:
    """Answers one client request. Whatever happens, it sends one head and one end."""

    def __init__(self, send: Send, request_id: bytes, path: str = "") -> None:
        self._send, self._path = send, path
        self._sent = b""  # of a stream's events, the last ones
        self.request_id = request_id
        self.headers: Mapping[str, str] = {}  # beside an answer's own
        self.error_page: ErrorPage | None = (
            None  # set where a browser displays the response
        )
        self.trace = RequestTrace()
        self.status: int | None = None  # once the head is sent
        self.finished = False
        self.is_stream = False
        self.is_broken = False  # the stream ended in an error, whatever its status says
        self.kept = FrameHistory()  # of a stream, by which another server may go on
        self.meter: TokenMeter | None = None  # where the key's tokens are limited

    @property
    def has_succeeded(self) -> bool:
        """The client was sent all of an answer that is no error."""
        is_error = self.is_broken or self.status is None or self.status >= 400
        return self.finished and not is_error

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a whole response."""
        await self._head(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._body(body, more=False)

    async def answer_json(
        self, status: int, value: object, headers: Headers = ()
    ) -> None:
        body = msgspec.json.encode(value)
        await self.answer(
            status, [(b"content-type", b"application/json"), *headers], body
        )

    async def fail(self, error: BatonError) -> None:
        """Ends in `error`: as the response, or as the last event of a stream that has begun."""
        if self.finished:
            return
        if self.status is None:
            headers = [(b"retry-after", b"1")] if error.status == 503 else []
            headers += [
                (name.encode(), text.encode()) for name, text in error.headers.items()
            ]
            if self.error_page is None:
                await self.answer_json(error.status, error.to_openai(), headers)
            else:
                own, page = self.error_page(error)
                await self.answer(error.status, [*own, *headers], page)
        else:
            is_numbered = self._path == "/v1/responses"
            number = _next_number(self._sent) if is_numbered else None
            await self.break_off(sse.error_event(error, number))

    async def relay(self, response: Response) -> None:
        """Sends what a server answers: an event stream as it comes, perhaps as the rest of one that
        has begun; anything else whole.

        Raises:
            UpstreamError: the server broke it off before its end, so that `fail` has to end it.
        """
        if response.body is None and response.is_event_stream:
            await self._relay_stream(response)
            return
        body = (
            await response.read()
        )  # whole: a failure up to here is still an HTTP error
        self.trace.on_bytes()
        if self.meter is not None:
            self.meter.on_response(body)
        await self.answer(response.status, end_to_end(response.headers), body)

    async def _relay_stream(self, response: Response) -> None:
        is_framed = _is_framed(response)
        events = FramedEvents(self.kept, self.meter) if is_framed else EventBuffer()
        if not is_framed:
            await self._begin_stream(response)
            self.kept.forget()
        is_sent = True  # what came
        try:
            while (chunk := await response.next_chunk()) is not None:
                self.trace.on_bytes()
                is_sent = False
                if complete := events.feed(chunk):
                    if self.meter is not None:
                        self.meter.on_events(complete)
                    await self._begin_stream(response)
                    await self._body(complete, more=True)
                    self._sent = complete
                is_sent = True
                events.were_sent()
        except asyncio.CancelledError:
            self.finished = (
                is_sent and events.has_ended
            )  # many clients hang up at [DONE]
            self.is_broken = events.has_failed
            raise
        except UpstreamError:
            if not events.has_ended:  # all that is missing is HTTP's own end
                raise
        else:
            if rest := events.rest():
                await self._body(rest, more=True)
        if not events.has_ended:
            raise Unended("it ended the stream before its last event")
        self.is_broken = events.has_failed
        await self.end()

    async def end(self) -> None:
        """Ends a stream whose last event was sent."""
        await self._body(b"", more=False)

    async def _begin_stream(self, response: Response) -> None:
        """Not before there is an event in a frame: what moves may be no stream to the client."""
        self.is_stream = True
        if self.status is None:
            await self._head(response.status, end_to_end(response.headers))

    def can_go_on_with(self, response: Response) -> bool:
        """Whether this is the rest of the stream that the client has begun to read."""
        is_stream = response.status == 200 and response.is_event_stream
        return is_stream and (_is_framed(response) or not self.kept)

    async def break_off(self, event: bytes) -> None:
        """Ends a stream with a server's error event."""
        self.is_broken = True
        await self._body(event, more=False)

    async def _head(self, status: int, headers: Headers) -> None:
        own = [(name.encode(), text.encode()) for name, text in self.headers.items()]
        identified = [*headers, *own, (b"x-request-id", self.request_id)]
        await self._send(
            {"type": "http.response.start", "status": status, "headers": identified}
        )
        self.status = (
            status  # being cancelled while it waited for room, nothing was sent
        )

    async def _body(self, data: bytes, *, more: bool) -> None:
        self.finished = not more
        await self._send(
            {"type": "http.response.body", "body": data, "more_body": more}
        )


def _is_framed(response: Response) -> bool:
    return any(name == _FRAMED for name, _ in response.headers)


@dataclass(eq=False)
class Loss(Exception):
    """A decode server did not come to the end of an answer.

    Args:
        told: what the client is told if no other server goes on.
        event: the server's own error event, to be told instead.
        has_begun: the client has some of the answer.
        params: of the KV that the server has lent to who goes on.
    """

    told: BatonError
    reason: Failure
    server: Server
    event: bytes | None
    has_begun: bool
    params: msgspec.Raw | None


class Losses:
    """Those of one request, and whether another server may go on.

    Args:
        limit: of losses, after which another one may.
        secret: of the cluster; empty: a stream that has begun ends with its server.
    """

    def __init__(
        self, reply: Reply, metrics: Metrics, limit: int, secret: bytes
    ) -> None:
        self._reply, self._metrics, self._limit, self._secret = (
            reply,
            metrics,
            limit,
            secret,
        )
        self.avoided: list[Server] = []  # asked again only where there is no other
        self.may_go_on = False  # of an answer that is generated
        self._reason: str | None = (
            None  # of the last loss, until somebody has taken over
        )
        self._failures = 0  # of servers that took the request and were not lost

    @property
    def num(self) -> int:
        """Of all, those that were moves among them."""
        return self._reply.trace.num_lost + self._reply.trace.num_moved

    def max_deliveries(self) -> int:
        """To how many servers the request may be given before one of them has begun to answer."""
        return max(1, 1 + self._limit - self._reply.trace.num_lost - self._failures)

    def take_failure(self, failure: Failure | None) -> bool:
        """Whether another server may be given the request, after those that failed with it."""
        self._failures += failure is Failure.ERROR
        is_left = self._reply.trace.num_lost + self._failures <= self._limit
        return is_left and failure is not Failure.TIMEOUT

    def headers(self) -> Headers:
        """By which a server of ours is asked for a stream that can go on elsewhere."""
        if not (self._secret and self.may_go_on):
            return ()
        request_id = as_text(self._reply.request_id).encode()  # as it is sent
        return [(_FRAMED, frames_request(self._secret, request_id))]

    def resume(self) -> bytes | None:
        """What the next server is told of a stream, if any of it was sent."""
        return self._reply.kept.sign(self._secret) if self._reply.kept else None

    def take(self, loss: Loss, servers: Iterable[Server]) -> bool:
        """Whether another one of these servers may go on."""
        self.count("lost_again")
        self._reason = loss.reason.value
        health = loss.server.health
        trace = self._reply.trace
        if trace.num_lost > self._limit or trace.num_moved > MAX_MOVES:
            self.count("limit_reached")
        elif health.is_foreign or (loss.has_begun and not self._reply.kept.is_whole):
            self.count("not_resumable")
        else:  # servers of another model or dtype would not go on with its stream
            like = health.kv_digest
            self.avoided += [
                s for s in servers if s is loss.server or s.health.kv_digest != like
            ]
            return True
        return False

    def count(self, outcome: str) -> None:
        """What became of the last loss, if that is not known yet."""
        reason, self._reason = self._reason, None
        if reason is not None:
            self._metrics.inc("baton_proxy_resumes", reason=reason, outcome=outcome)


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers of a server's response that are meant for the client."""
    return [(name, value) for name, value in headers if name not in _NOT_RELAYED]


def signing_secret(settings: ProxySettings) -> bytes:
    """With which servers are named to each other, and asked for streams that can go on elsewhere;
    empty where there is none."""
    try:
        return cluster_secret(settings.cluster_secret)
    except (OSError, ValueError) as error:
        logger.warning(
            "decode servers are asked last, and streams end with them: %s", error
        )
        return b""
