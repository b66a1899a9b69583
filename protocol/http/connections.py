"""HTTP connections with the bounds that uvicorn lacks.

- A client vanishes or reads nothing: the kernel ends the connection.
- A client owes the rest of a request and is silent, or sends less than
  MIN_BODY_BYTES_PER_S: it receives an error, or the connection is closed.
- The sum of unfinished bodies is too large: the body that began first is refused.
- The sum of the bodies of running requests is too large: a further one is refused.
- A body has a length above the limit, or HTTP/1.1 forbids the head: the request is
  refused before its body arrives. If two servers could disagree about the end of the
  body, the connection is also closed.
- Trailers, and extensions of chunks: they are dropped, and their size is limited.
- The body of a request that has been answered: the rest is dropped, so that the client
  sees the response.
- Hundreds of pipelined requests: the connection is closed.
- A client disconnects after pipelining requests: the running request is notified, too.
- An upgrade to another protocol (Java clients offer h2c with every request): the
  response stays HTTP/1.1, and the body is read.
- A client of HTTP/1.0: it receives no chunked response.
"""

import asyncio
import contextlib
import re
import socket
import sys
import uuid
from collections.abc import Iterator
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
from protocol.http.bodies import EXTENSION, Bodies, connection_state
from protocol.http.deadlines import Countdown
from protocol.http.tls import Certificate
from protocol.ipc.wire import keep_alive
from protocol.messages import KV_HEADER, PREFILL_KV_HEADER
from protocol.process.logging import request_context
from protocol.settings.server_options import ListenOptions

# Of data that arrives together, all counts, even the end of the previous request.
MAX_HEAD_BYTES = 1 << 20
MAX_HEADERS = 200
MAX_AHEAD = 200  # pipelined requests; uvicorn reads further ones with each response
MAX_TARGET_BYTES = 8192  # of a request's path and query
MIN_BODY_BYTES_PER_S = 16_384
MAX_DROPPED_BYTES = 1 << 28  # of a body whose request has been answered
# Response headers that web pages of other origins may read.
_EXPOSED = [
    "x-request-id",
    KV_HEADER,
    PREFILL_KV_HEADER,
    "retry-after",
    *RATE_HEADERS,
]
_UPGRADE_HEADERS = (b"connection", b"upgrade", b"http2-settings")
_LAST_LOOK_S = 0.1
_MAX_FRAMING_RATIO = 8  # bytes of chunk framing per byte of a body
_NAME = rb"[\w.~!$&'()*+,;=%-]"
_HOST = re.compile(rb"(?:\[(?:%b|:)+\]|%b*)(?::\d*)?" % (_NAME, _NAME))
_TARGET = re.compile(rb"(?:(?i:https?)://[^/?#@]+)?((?:/|(?<=.)\?|$)[^#]*)")


def bound_clients(listener: socket.socket, timeout_s: float) -> None:
    """Ends each connection of `listener` whose client is unresponsive for `timeout_s`.

    Such a client acknowledges nothing, or reads nothing of what it was sent.
    """
    keep_alive(listener, idle_s=15, interval_s=5, timeout_s=timeout_s)


def bounded_protocol(
    options: ListenOptions, extra_body_bytes: int = 0
) -> type[HttpToolsProtocol]:
    """Returns uvicorn's protocol class, bounded by `options`.

    The application must answer a request that has a `refusal` with that error.

    Args:
        extra_body_bytes: How much longer than --max-body-bytes a body may be.
    """
    max_body_bytes = options.max_body_bytes + extra_body_bytes
    bodies = Bodies(
        max(options.max_unfinished_bytes, max_body_bytes), options.max_held_bytes
    )
    members = {
        "options": options,
        "extra_body_bytes": extra_body_bytes,
        "bodies": bodies,
    }
    return type("BoundedHttp", (_BoundedHttp,), members)


class HttpServer(uvicorn.Server):
    """A uvicorn server with bounded connections and without signal handlers.

    Args:
        app: An ASGI application. Pages of --cors-origin may call it.
        extra_body_bytes: See bounded_protocol.
        descriptors_each: File descriptors that one connection needs. Connections for
            which there are none wait in the kernel's backlog.
        more: Arguments of uvicorn.Config.
    """

    def __init__(
        self,
        app: Any,
        options: ListenOptions,
        certificate: Certificate,
        extra_body_bytes: int = 0,
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
                max_age=600,  # seconds for which a browser may cache the response
            )
        config = uvicorn.Config(
            app,
            http=bounded_protocol(options, extra_body_bytes),
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
        """Like uvicorn's method, but connections beyond the descriptor limit wait."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        config = self.config
        state = self.server_state
        protocol_class: Any = config.http_protocol_class
        make_protocol = partial(
            protocol_class,
            config=config,
            server_state=state,
            app_state=self.lifespan.state,
        )
        limit = max_connections(self._descriptors_each)
        self.servers: list[Any] = [
            Acceptor(listener, make_protocol, config.ssl, state.connections, limit)
            for listener in sockets or []
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _BoundedHttp(HttpToolsProtocol):
    """One connection. `bounded_protocol` sets the class variables."""

    options: ListenOptions
    extra_body_bytes: int
    bodies: Bodies

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_body = False
        self._is_given_up = False  # the body that is arriving is not wanted any more
        self._keeps_alive = True  # after that body is complete
        self._head_bytes = 0
        self._piece_bytes = 0  # of the body, since the timeout began
        self._dropped_bytes = 0
        self._running: RequestResponseCycle | None = None
        self._timeout: Countdown | None = self._start_timeout()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        shared: dict[object, object] = {
            "transport": self.transport,
            "bodies": self.bodies,
        }
        self.scope["extensions"] = {EXTENSION: shared}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer; a request's headers are needed before its body
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
        self._restart_timeout(len(data))
        self._head_bytes = max(0, self._head_bytes + len(data))
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(
                "The request's head, or what frames its body, is too long."
            )

    def _restart_timeout(self, num_bytes: int) -> None:
        """Starts or ends the client's timeout after `num_bytes` more have arrived."""
        is_answered = self.cycle is None or self.cycle.response_complete
        owes = self.cycle is self._running if self._in_body else is_answered
        self._piece_bytes += num_bytes
        is_piece = (
            self._in_body and self._piece_bytes >= self._piece_limit and not is_answered
        )
        if not owes or is_piece:
            self._stop_timeout()
        if owes and self._timeout is None:
            self._timeout = self._start_timeout()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_AHEAD:
            self.transport.abort()
            raise httptools.HttpParserError("too many pipelined requests")
        self._check_framing()
        if self.parser.should_upgrade():
            return
        fault = self._take_target()
        super().on_headers_complete()
        self._stop_timeout()
        self._in_body = True
        self._is_given_up = False
        self._head_bytes = 0
        connection_state(self.scope)["refusal"] = fault or self._check_headers()
        # A client that is answered before its body is complete still sends the rest. It
        # would not see the response if the connection was closed. A client that waits
        # for 100 Continue sends nothing.
        self._keeps_alive = self.cycle.keep_alive
        self.cycle.keep_alive = not self.expect_100_continue

    def _check_framing(self) -> None:
        """Raises HttpParserError if two servers could disagree on the request's end."""
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
        """Normalizes the target. Returns the error if it is invalid.

        An absolute target loses its host, an invalid one becomes /.
        """
        target = self.url
        self.url = b"/"
        if len(target) > MAX_TARGET_BYTES:
            return errors.TargetTooLong(
                f"path and query have {len(target)} bytes, the limit is "
                f"{MAX_TARGET_BYTES} bytes"
            )
        match = _TARGET.fullmatch(target)
        path = unquote_to_bytes(match[1].partition(b"?")[0]) if match else b".."
        if not match or not {b".", b".."}.isdisjoint(re.split(rb"[/\\]", path)):
            # A server behind this one could resolve dots to a path that is not public.
            return errors.InvalidRequest(
                f"the target is {target[:80]!r}; send a path, without `.` or `..`, and "
                "no fragment"
            )
        self.url = match[1] if match[1].startswith(b"/") else b"/" + match[1]
        return None

    def _check_headers(self) -> errors.BatonError | None:
        """Returns the error if the headers of the request are invalid."""
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
        if declared > limit + self.extra_body_bytes:
            return errors.PayloadTooLarge(
                f"the body has {declared} bytes, the limit is {limit} bytes"
            )
        return None

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= (1 + _MAX_FRAMING_RATIO) * len(body)
        if self.cycle.response_complete or self._is_given_up:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.abort()
            return
        if self.expect_100_continue:  # the client sends without waiting, or has waited
            self.expect_100_continue = False
            self.cycle.keep_alive = True
        super().on_body(body)
        self.bodies.add(self, len(body))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._dropped_bytes = 0
        self.bodies.remove(self)
        # A trailer may also end the connection.
        self._keeps_alive &= self.parser.should_keep_alive()
        self.cycle.keep_alive = self._keeps_alive
        if self.cycle.response_complete and not self._keeps_alive:
            self.transport.close()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body:
            self._stop_timeout()
            self._restart_timeout(0)
            if self.cycle.response_complete:
                self.bodies.remove(self)

    def give_up(self, error: errors.BatonError) -> None:
        """Stops waiting for the rest of the body; `error` is the response."""
        self._is_given_up = True
        connection_state(self.scope)["refusal"] = error
        self.cycle.body.clear()
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def shutdown(self) -> None:
        self._keeps_alive = False
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not an HTTP request, in the format of other errors.

        Nothing is sent if the client would take it for the response to another request,
        or for a part of one.
        """
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
        """Feeds the parser, which stops after each head that offers another protocol.

        A new parser then receives that head without the offer, and everything after it.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("this is no proxy") from None
                headers = [
                    header
                    for header in self.headers
                    if header[0] not in _UPGRADE_HEADERS
                ]
                if any(
                    name == b"connection" and b"close" in value
                    for name, value in self.headers
                ):
                    headers.append((b"connection", b"close"))
                first = b"%b %b HTTP/%b" % (
                    method,
                    self.url,
                    self.parser.get_http_version().encode(),
                )
                lines = [name + b": " + value for name, value in headers]
                head = b"\r\n".join([first, *lines, b"", b""])
                self.parser = httptools.HttpRequestParser(self)
                data = head + data[stopped.args[0] :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timeout()
        self.bodies.remove(self)
        if self._running is not None and not self._running.response_complete:
            # uvicorn notifies only the last one of pipelined requests.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, unless a request arrived in the meantime.

        The process may have been suspended, and the request not been read yet.
        """
        close = super().timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(_LAST_LOOK_S, close)

    def _start_asgi_task(
        self, cycle: RequestResponseCycle, app: ASGI3Application
    ) -> None:
        self._running = cycle
        is_http_1_0 = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _unchunked(app, cycle) if is_http_1_0 else app)

    @property
    def _piece_limit(self) -> int:
        """Bytes of a body that the client must send in one timeout."""
        return round(MIN_BODY_BYTES_PER_S * self.options.client_timeout_s)

    def _start_timeout(self) -> Countdown:
        self._piece_bytes = 0
        return Countdown(
            self.loop, self.options.client_timeout_s, self._on_client_timeout
        )

    def _stop_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _on_client_timeout(self) -> None:
        self._timeout = None
        if self._in_body and not self.cycle.response_started and not self._is_given_up:
            self._keeps_alive = False
            self.cycle.keep_alive = False
            due = f"{self._piece_limit} bytes or the rest"
            seconds = f"{self.options.client_timeout_s:g} s"
            message = f"the body comes too slowly; send {due} in {seconds}"
            self.give_up(errors.RequestTimeout(message))
        elif not self.transport.is_closing():
            self.transport.close()


def _unchunked(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """Returns `app` with responses that end with the connection, whatever their
    length.
    """
    # uvicorn then writes no chunks, and reads no length if it is told of each part.
    cycle.chunked_encoding = False

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
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: "
        f"close\r\ncontent-length: {len(body)}\r\nx-request-id: {request_id}\r\n\r\n"
    )
    return head.encode() + body
