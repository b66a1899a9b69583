"""What a server's HTTP connections may cost it: bounds that uvicorn leaves open.

- A client that vanished, or takes nothing of what it is sent: the kernel ends the connection, which
  the application sees as a client that left. A slow reader that goes on reading is left alone.
- A client that owes the rest of a request and is silent: the connection is closed.
- A client that sends hundreds of requests ahead of its answers: the connection is closed.
- A client that leaves while it has sent requests ahead: the running one is told of it, too.
- A client that offers to go on in another protocol (h2c is offered by Java's clients with every
  request): it is answered in this one, and its body is read.
"""

import asyncio
import resource
import socket
from collections.abc import Mapping
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from protocol.countdown import Countdown

MAX_HEAD_BYTES = 1 << 20  # all that has come at once counts, be it the end of another request
MAX_AHEAD = 200  # requests that wait their turn; uvicorn reads on with every answer
_ABOUT_UPGRADES = (b"connection", b"upgrade", b"http2-settings")
_CONNECTION = "baton.connection"  # an extension of ASGI's scope
_LAST_LOOK_S = 0.1
_PROBES = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


def bound_clients(listener: socket.socket, timeout_s: float) -> None:
    """Every connection that `listener` accepts ends when its client acknowledges, or takes,
    nothing of what it was sent for `timeout_s` seconds."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):  # not everywhere
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        limit_ms = max(1, round(timeout_s * 1000))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def raise_file_limit() -> None:
    """Lets this process hold as many connections as the system permits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bounded_protocol(timeout_s: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol for connections that end when a client that owes the rest of a request is
    silent for `timeout_s` seconds, or takes longer than that for its head."""
    return type("BoundedHttp", (_BoundedHttp,), {"timeout_s": timeout_s})


def is_closing(scope: Mapping[str, Any]) -> bool:
    """Whether what is sent on a request's connection from now on is lost. A connection that
    `bounded_protocol` does not serve never says so.

    Args:
        scope: ASGI's, of the request.
    """
    known = (scope.get("extensions") or {}).get(_CONNECTION)
    return known is not None and bool(known["transport"].is_closing())


class _BoundedHttp(HttpToolsProtocol):
    timeout_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_body = False
        self._head_bytes = 0
        self._running: RequestResponseCycle | None = None
        self._late: Countdown | None = self._expect()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_CONNECTION: {"transport": self.transport}}

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if not self.transport.is_closing():
                message = "Invalid HTTP request received."
                self.logger.warning(message)
                self.send_400_response(message)
        if self.transport.is_closing():
            return
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if self._in_body or is_answering:
            self._stop_expecting()
        if self._in_body or (not is_answering and self._late is None):
            self._late = self._expect()
        self._head_bytes = 0 if self._in_body else self._head_bytes + len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The request's head is too long.")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_AHEAD:
            self.transport.abort()
            raise httptools.HttpParserError("too many requests ahead")  # parses no more
        if not self.parser.should_upgrade():
            self._in_body, self._head_bytes = True, 0
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._in_body = False
            super().on_message_complete()

    def _parse(self, data: bytes) -> None:
        """Feeds the parser, which stops at the end of each head that offers another protocol."""
        rest: bytes | None = data
        while rest is not None:
            rest = self._parse_up_to_offer(rest)

    def _parse_up_to_offer(self, data: bytes) -> bytes | None:
        """What is still to be parsed by another parser: that head without its offer, and all that
        follows; None when nothing is."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            method = self.parser.get_method()
            if method == b"CONNECT":
                raise httptools.HttpParserError("this is no proxy") from None
            kept = [header for header in self.headers if header[0] not in _ABOUT_UPGRADES]
            if any(name == b"connection" and b"close" in value for name, value in self.headers):
                kept.append((b"connection", b"close"))
            lines = [name + b": " + value for name, value in kept]
            version = self.parser.get_http_version().encode()
            head = b"\r\n".join([method + b" " + self.url + b" HTTP/" + version, *lines, b"", b""])
            self.parser = httptools.HttpRequestParser(self)
            return head + data[stopped.args[0] :]
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn tells the last of pipelined requests only
            self._running.message_event.set()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection's time is over, unless a request came while this process stood still
        and has not been read yet."""
        close = super().timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(_LAST_LOOK_S, close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _expect(self) -> Countdown:
        return Countdown(self.loop, self.timeout_s, self._is_late)

    def _stop_expecting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_late(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.close()
