"""What a server's HTTP connections may cost it: bounds that uvicorn leaves open.

- A client that vanished, or takes nothing of what it is sent: the kernel ends the connection.
- A client that owes the rest of a request and is silent, or slower than MIN_BODY_BYTES_PER_S: it is
  told so, or the connection is closed.
- Many bodies that are not all there yet: beyond a sum, the one that began first is refused.
- Many bodies whose requests are under way: beyond a sum, another one is refused.
- A body that is declared too long, or a head that HTTP/1.1 forbids: refused before the body. Where
  two servers might not agree on its end, the connection is closed, too.
- Trailers and what chunks say beside their sizes: dropped, and not without end.
- A body whose request is answered: the rest is dropped, so that the client sees the answer.
- Hundreds of requests ahead of their answers: the connection is closed.
- A client that leaves after it has sent requests ahead: the running one is told of it, too.
- An offer of another protocol (h2c is offered by Java's clients with every request): it is answered
  in this one, and its body is read.
- A client of HTTP/1.0: nothing is sent to it in chunks.
"""

import asyncio
import contextlib
import re
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools
import msgspec
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from uvicorn._types import ASGI3Application
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.httptools_impl import (
    HttpToolsProtocol,
    RequestResponseCycle,
)

from protocol import errors
from protocol.http.acceptor import Acceptor, max_connections
from protocol.http.access import RATE_HEADERS
from protocol.http.deadlines import Countdown
from protocol.http.tls import Certificate
from protocol.ipc.wire import keep_alive
from protocol.process.logging import request_context
from protocol.settings.options import ListenOptions

MAX_HEAD_BYTES = (
    1 << 20
)  # all that has come at once counts, be it the end of another request
MAX_HEADERS = 200
MAX_AHEAD = 200  # requests that wait their turn; uvicorn reads on with every answer
MAX_TARGET_BYTES = 8192  # of a request's path and query
MIN_BODY_BYTES_PER_S = 16_384
MAX_DROPPED_BYTES = 1 << 28  # of a body whose request is answered
KV_HEADER = "x-baton-kv"  # of an answer: where the KV of its prompt came from
PREFILL_KV_HEADER = "x-baton-kv-prefill"  # the same of its prefill leg
_EXPOSED = [
    "x-request-id",
    KV_HEADER,
    PREFILL_KV_HEADER,
    "retry-after",
    *RATE_HEADERS,
]  # to pages
_ABOUT_UPGRADES = (b"connection", b"upgrade", b"http2-settings")
_CONNECTION = "baton.connection"  # an extension of ASGI's scope
_LAST_LOOK_S = 0.1
_FRAMING = 8  # bytes that a byte of a body may need to come in a chunk
_NAME = rb"[\w.~!$&'()*+,;=%-]"
_HOST = re.compile(rb"(?:\[(?:%b|:)+\]|%b*)(?::\d*)?" % (_NAME, _NAME))
_TARGET = re.compile(rb"(?:(?i:https?)://[^/?#@]+)?((?:/|(?<=.)\?|$)[^#]*)")


def bound_clients(listener: socket.socket, timeout_s: float) -> None:
    """Every connection that `listener` accepts ends when its client acknowledges, or takes,
    nothing of what it was sent for `timeout_s` seconds."""
    keep_alive(listener, idle_s=15, interval_s=5, timeout_s=timeout_s)


def bounded_protocol(
    options: ListenOptions, beside_bytes: int = 0
) -> type[HttpToolsProtocol]:
    """uvicorn's protocol for connections that keep to `options`. Its application answers with the
    `refusal` of a request, where there is one. A body may have `beside_bytes` more."""
    one_body = options.max_body_bytes + beside_bytes
    bodies = _Bodies(
        max(options.max_unfinished_bytes, one_body), options.max_held_bytes
    )
    members = {"options": options, "beside_bytes": beside_bytes, "bodies": bodies}
    return type("BoundedHttp", (_BoundedHttp,), members)


def refusal(scope: Mapping[str, Any]) -> errors.BatonError | None:
    """Why a request of this ASGI scope is not to be served whatever it asks for. What has come of
    its body by then is not all of it."""
    error: errors.BatonError | None = _known(scope).get("refusal")
    return error


def is_closing(scope: Mapping[str, Any]) -> bool:
    """Whether what is sent on the connection of this ASGI scope from now on is lost. A connection
    that `bounded_protocol` does not serve never says so."""
    transport = _known(scope).get("transport")
    return transport is not None and bool(transport.is_closing())


def _known(scope: Mapping[str, Any]) -> dict[Any, Any]:
    """What a connection tells the application; nothing if `bounded_protocol` does not serve it."""
    return (scope.get("extensions") or {}).get(_CONNECTION) or {}


class ClientDisconnected(Exception):
    """The client has gone; nobody reads an answer."""


async def read_body(
    scope: Mapping[str, Any],
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    limit_bytes: int,
    *,
    is_held: bool = True,
) -> bytes:
    """The whole body of a request of ASGI, which the running task ends with. One that is not held
    is soon let go of, and is taken beside any number of others.

    Raises:
        PayloadTooLarge: more than `limit_bytes`.
        QueueFull: too much is held beside it.
        BatonError: the connection's `refusal`.
        ClientDisconnected: the client went away before it was complete.
    """
    parts: list[bytes] = []
    num_bytes, more = 0, refusal(scope) is None
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > limit_bytes:
            raise errors.PayloadTooLarge(
                f"the body has more than {limit_bytes} bytes; send less at once (--max-body-bytes)"
            )
        more = message.get("more_body", False)
    if error := refusal(scope):
        parts.clear()  # the connection keeps the error, which keeps this frame
        raise error
    if is_held and (bodies := _known(scope).get("bodies")):
        bodies.hold(num_bytes)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class HttpServer(uvicorn.Server):
    """uvicorn on bounded connections, without signal handlers: ending is its owner's business.

    Args:
        app: of ASGI; pages of the options' origins may call it, too.
        beside_bytes: see bounded_protocol.
        descriptors_each: that a connection needs; connections for which there are none wait.
        more: arguments of uvicorn.Config.
    """

    def __init__(
        self,
        app: Any,
        options: ListenOptions,
        certificate: Certificate,
        beside_bytes: int = 0,
        descriptors_each: int = 1,
        **more: Any,
    ) -> None:
        self._descriptors_each = descriptors_each
        if options.cors_origin:
            app = CORSMiddleware(
                app,
                allow_origins=options.cors_origin,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=_EXPOSED,
                max_age=600,  # seconds that a browser may remember the answer for
            )
        config = uvicorn.Config(
            app,
            http=bounded_protocol(options, beside_bytes),
            ws="none",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(options.shutdown_grace_s)),
            **certificate.for_uvicorn(),
            **more,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but that connections beyond the limit of descriptors wait."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        config, state = self.config, self.server_state
        own = {
            "config": config,
            "server_state": state,
            "app_state": self.lifespan.state,
        }
        make_protocol: Any = partial(config.http_protocol_class, **own)
        limit = max_connections(self._descriptors_each)
        self.servers: list[Any] = [
            Acceptor(listener, make_protocol, config.ssl, state.connections, limit)
            for listener in sockets or []
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Bodies:
    """Those that are not all there yet, and those of requests under way, over all connections."""

    def __init__(self, unfinished_limit_bytes: int, held_limit_bytes: int) -> None:
        self._limit_bytes, self._held_limit_bytes = (
            unfinished_limit_bytes,
            held_limit_bytes,
        )
        self._bytes: dict[
            _BoundedHttp, int
        ] = {}  # by connection, the first begun first
        self._total_bytes = 0
        self._held_bytes: dict[
            asyncio.Task[Any] | None, int
        ] = {}  # by a request's task

    def add(self, connection: "_BoundedHttp", num_bytes: int) -> None:
        """Counts what has come. The first begun is the one to go: a client that sends as fast as it
        can is through before those that linger."""
        self._bytes[connection] = self._bytes.get(connection, 0) + num_bytes
        self._total_bytes += num_bytes
        while self._total_bytes > self._limit_bytes:
            first = next(iter(self._bytes))
            self.remove(first)
            first.give_up(
                errors.QueueFull(
                    "too many requests are being sent at once; send it again"
                )
            )

    def remove(self, connection: "_BoundedHttp") -> None:
        self._total_bytes -= self._bytes.pop(connection, 0)

    def hold(self, num_bytes: int) -> None:
        """Counts a whole body until the running task, its request's, has ended. Raises QueueFull
        where there are too many; if there is none, any may come."""
        held = sum(self._held_bytes.values())
        if held and held + num_bytes > self._held_limit_bytes:
            raise errors.QueueFull(
                f"requests of {held} bytes are under way (--max-held-bytes)"
            )
        if request := asyncio.current_task():
            self._held_bytes[request] = num_bytes
            request.add_done_callback(self._held_bytes.pop)


class _BoundedHttp(HttpToolsProtocol):
    options: ListenOptions
    beside_bytes: int
    bodies: _Bodies

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_body = False
        self._is_given_up = False  # the body that is being sent
        self._keeps_alive = True  # once that body is all there
        self._head_bytes = 0
        self._piece_bytes = 0  # of the body, since the countdown began
        self._dropped_bytes = 0
        self._running: RequestResponseCycle | None = None
        self._late: Countdown | None = self._expect()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        known: dict[object, object] = {
            "transport": self.transport,
            "bodies": self.bodies,
        }
        self.scope["extensions"] = {_CONNECTION: known}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer: what it says was to be known before the body
        if len(self.headers) >= MAX_HEADERS:
            raise httptools.HttpParserError(f"more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            if not self.transport.is_closing():
                cause = error.__context__ or error
                self.send_400_response(
                    f"Invalid HTTP request received: {str(cause)[:200]}."
                )
        if self.transport.is_closing():
            return
        self._time(len(data))
        self._head_bytes = max(0, self._head_bytes + len(data))
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(
                "The request's head, or what frames its body, is too long."
            )

    def _time(self, num_bytes: int) -> None:
        """Expects what the client owes now that more has come."""
        is_answered = self.cycle is None or self.cycle.response_complete
        owes = self.cycle is self._running if self._in_body else is_answered
        self._piece_bytes += num_bytes
        is_piece = (
            self._in_body and self._piece_bytes >= self._piece_limit and not is_answered
        )
        if not owes or is_piece:
            self._stop_expecting()
        if owes and self._late is None:
            self._late = self._expect()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_AHEAD:
            self.transport.abort()
            raise httptools.HttpParserError("too many requests ahead")  # parses no more
        self._check_framing()
        if self.parser.should_upgrade():
            return
        fault = self._take_target()
        super().on_headers_complete()
        self._stop_expecting()
        self._in_body, self._is_given_up, self._head_bytes = True, False, 0
        _known(self.scope)["refusal"] = fault or self._fault()
        # A client that is answered before its body is all there goes on sending, and would not see
        # the answer if it was hung up on; one that waits to be told to send will not.
        self._keeps_alive = self.cycle.keep_alive
        self.cycle.keep_alive = not self.expect_100_continue

    def _check_framing(self) -> None:
        """Raises HttpParserError for a head behind which two servers might look for another end."""
        version = self.parser.get_http_version()
        codings = [
            value.lower()
            for name, value in self.headers
            if name == b"transfer-encoding"
        ]
        if version not in ("1.0", "1.1"):
            raise httptools.HttpParserError("the version must be HTTP/1.1 or HTTP/1.0")
        if codings and (codings != [b"chunked"] or version == "1.0"):
            raise httptools.HttpParserError(
                "Transfer-Encoding may be `chunked`, in HTTP/1.1 alone"
            )
        if version == "1.0":
            self.expect_100_continue = False

    def _take_target(self) -> errors.BatonError | None:
        """What is wrong with the target. An absolute one loses its host, a wrong one all."""
        sent, self.url = self.url, b"/"
        if len(sent) > MAX_TARGET_BYTES:
            told = f"path and query have {len(sent)} bytes"
            return errors.TargetTooLong(
                f"{told}, the limit is {MAX_TARGET_BYTES} bytes"
            )
        found = _TARGET.fullmatch(sent)
        path = unquote_to_bytes(found[1].partition(b"?")[0]) if found else b".."
        if not found or not {b".", b".."}.isdisjoint(re.split(rb"[/\\]", path)):
            # Servers behind this one may resolve dots, and end up at what is not for clients.
            return errors.InvalidRequest(
                f"the target is {sent[:80]!r}; send a path, without `.` or `..`, and no fragment"
            )
        self.url = found[1] if found[1].startswith(b"/") else b"/" + found[1]
        return None

    def _fault(self) -> errors.BatonError | None:
        """What else is wrong with the head that has come."""
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            return errors.InvalidRequest(
                f"the request has {len(hosts)} headers `Host`; send one"
            )
        if hosts and not _HOST.fullmatch(hosts[0]):
            return errors.InvalidRequest(
                f"`Host` is {hosts[0][:80]!r}; send HOST or HOST:PORT"
            )
        if sum(name == b"authorization" for name, _ in self.headers) > 1:
            return errors.InvalidRequest(
                "the request has several headers `Authorization`; send one"
            )
        declared = next(
            (int(v) for name, v in self.headers if name == b"content-length"), 0
        )
        limit = self.options.max_body_bytes
        if declared > limit + self.beside_bytes:
            return errors.PayloadTooLarge(
                f"the body has {declared} bytes, the limit is {limit} bytes"
            )
        return None

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= (1 + _FRAMING) * len(body)
        if self.cycle.response_complete or self._is_given_up:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.abort()
            return
        if self.expect_100_continue:  # it sends without being told, or was
            self.expect_100_continue, self.cycle.keep_alive = False, True
        super().on_body(body)
        self.bodies.add(self, len(body))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body, self._dropped_bytes = False, 0
        self.bodies.remove(self)
        self._keeps_alive &= (
            self.parser.should_keep_alive()
        )  # a trailer may say that, too
        self.cycle.keep_alive = self._keeps_alive
        if self.cycle.response_complete and not self._keeps_alive:
            self.transport.close()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body:
            self._stop_expecting()
            self._time(0)
            if self.cycle.response_complete:
                self.bodies.remove(self)

    def give_up(self, error: errors.BatonError) -> None:
        """The rest of the body that is being sent is not waited for: `error` is the answer."""
        self._is_given_up = True
        _known(self.scope)["refusal"] = error
        self.cycle.body.clear()
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def shutdown(self) -> None:
        self._keeps_alive = False
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no request of HTTP as other bad requests are, unless the client would
        take it for the answer to another request, or for the rest of one."""
        cycle = self.cycle
        if self._in_body:
            is_free = cycle is self._running and not cycle.response_started
        else:
            is_free = cycle is None or cycle.response_complete
        request_id = uuid.uuid4().hex
        with request_context(request_id):
            self.logger.warning(msg)
        if is_free:
            self.transport.write(_bad_request(msg, request_id))
        self.transport.close()

    def _parse(self, data: bytes) -> None:
        """Feeds the parser, which stops at the end of each head that offers another protocol.
        Another parser goes on there: with that head without its offer, and all that follows."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("this is no proxy") from None
                kept = [
                    header
                    for header in self.headers
                    if header[0] not in _ABOUT_UPGRADES
                ]
                if any(
                    name == b"connection" and b"close" in value
                    for name, value in self.headers
                ):
                    kept.append((b"connection", b"close"))
                first = b"%b %b HTTP/%b" % (
                    method,
                    self.url,
                    self.parser.get_http_version().encode(),
                )
                lines = [name + b": " + value for name, value in kept]
                head = b"\r\n".join([first, *lines, b"", b""])
                self.parser = httptools.HttpRequestParser(self)
                data = head + data[stopped.args[0] :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        self.bodies.remove(self)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = (
                True  # uvicorn tells the last of pipelined requests only
            )
            self._running.message_event.set()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection's time is over, unless a request came while this process stood still
        and has not been read yet."""
        close = super().timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(_LAST_LOOK_S, close)

    def _start_asgi_task(
        self, cycle: RequestResponseCycle, app: ASGI3Application
    ) -> None:
        self._running = cycle
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _unchunked(app, cycle) if is_old else app)

    @property
    def _piece_limit(self) -> int:
        """So much of a body has the time that a whole head has."""
        return round(MIN_BODY_BYTES_PER_S * self.options.client_timeout_s)

    def _expect(self) -> Countdown:
        self._piece_bytes = 0
        return Countdown(self.loop, self.options.client_timeout_s, self._is_late)

    def _stop_expecting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_late(self) -> None:
        self._late = None
        if self._in_body and not self.cycle.response_started and not self._is_given_up:
            self._keeps_alive = self.cycle.keep_alive = False
            due = f"{self._piece_limit} bytes or the rest in {self.options.client_timeout_s:g} s"
            self.give_up(
                errors.RequestTimeout(f"the body comes too slowly; send {due}")
            )
        elif not self.transport.is_closing():
            self.transport.close()


def _unchunked(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """`app`, whose answers end with the connection, whatever lengths they say."""
    cycle.chunked_encoding = (
        False  # so uvicorn reads no length either, and is told of each part
    )

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_plain(message: Any) -> None:
            if message["type"] == "http.response.body":
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer


def _bad_request(message: str, request_id: str) -> bytes:
    body = msgspec.json.encode(errors.InvalidRequest(message).to_openai())
    head = (
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\n\r\n"
    )
    return head.encode() + body
