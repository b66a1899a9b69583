"""One socket to a server, and the response that is being read from it."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import httptools

Headers = Sequence[tuple[bytes, bytes]]

PAUSE_BYTES = 256 * 1024  # unread body bytes at which a connection stops reading from its server
# A server may rightly be silent for minutes. Probes find a host that is gone in half of one.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 15, 5, 3


class UpstreamError(Exception):
    """The server could not be talked to. `reason` is one word for metrics."""

    reason = "error"


class Unreachable(UpstreamError):
    """No connection: nothing was sent."""

    reason = "unreachable"


class Exhausted(UpstreamError):
    """No connection for want of descriptors or ports here: no fault of the server."""

    reason = "exhausted"


class Lost(UpstreamError):
    """The connection ended, or spoke no HTTP, after the request was sent."""

    reason = "lost"


class TimedOut(UpstreamError):
    """Nothing came for the read timeout."""

    reason = "timeout"


class Exchange:
    """What the parser has found of one response; the reader's half of a connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.chunks: deque[bytes] = deque()
        self.unread_bytes = 0
        self.complete = False
        self.error: UpstreamError | None = None
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    @property
    def delimited(self) -> bool:
        """Whether the body's end is marked; otherwise the connection's end is the body's."""
        names = {name for name, _ in self.headers}
        return b"content-length" in names or b"transfer-encoding" in names


class Connection(asyncio.Protocol):
    """One socket. Parses whatever comes into the current exchange."""

    def __init__(self, on_lost: Callable[["Connection"], None]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._paused = False
        self._keep_alive = False
        self.exchange: Exchange | None = None
        self.idle_since = 0.0

    def begin(self, request: bytes) -> Exchange:
        """Sends a whole request and starts the exchange that answers it."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._keep_alive = False
        self.exchange = Exchange()
        self._transport.write(request)
        return self.exchange

    @property
    def reusable(self) -> bool:
        closing = self._transport is None or self._transport.is_closing()
        return self._keep_alive and not closing

    def resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by duck typing
        _probe(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self.exchange is None or self.exchange.complete:
            self.abort()  # bytes that nothing asked for: what follows cannot be trusted
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Lost(f"not HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        exchange = self.exchange
        if exchange is not None and exchange.has_head and exc is None and not exchange.delimited:
            exchange.complete = True
            exchange.wake()
        self._fail(Lost(f"connection ended{f': {exc}' if exc else ''}"))
        self._transport = None
        self._on_lost(self)

    def _fail(self, error: UpstreamError) -> None:
        exchange = self.exchange
        if exchange is not None and not exchange.complete and exchange.error is None:
            exchange.error = error
            exchange.wake()

    # httptools callbacks

    def on_message_begin(self) -> None:
        assert self.exchange is not None
        self.exchange.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.exchange is not None
        self.exchange.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None and self.exchange is not None
        status = self._parser.get_status_code()
        if status >= 200:  # 100 and 103 announce the answer, they are not it
            self.exchange.status = status
            self.exchange.has_head = True
            self.exchange.wake()

    def on_body(self, body: bytes) -> None:
        exchange = self.exchange
        assert exchange is not None
        exchange.chunks.append(body)
        exchange.unread_bytes += len(body)
        if exchange.unread_bytes > PAUSE_BYTES and not self._paused and self._transport:
            self._paused = True
            self._transport.pause_reading()
        exchange.wake()

    def on_message_complete(self) -> None:
        assert self._parser is not None and self.exchange is not None
        if self.exchange.has_head:
            self._keep_alive = self._parser.should_keep_alive()
            self.exchange.complete = True
            self.exchange.wake()


async def arrival(exchange: Exchange, timeout_s: float) -> None:
    """Waits until something is new in `exchange`; raises its error, if that came before."""
    if exchange.error is not None:
        raise exchange.error
    exchange.waiter = asyncio.get_running_loop().create_future()
    try:
        async with asyncio.timeout(timeout_s):
            await exchange.waiter
    except TimeoutError:
        raise TimedOut(f"silent for {timeout_s:g} s") from None
    finally:
        exchange.waiter = None


def _probe(sock: socket.socket) -> None:
    """Lets the kernel find out when the server's host is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, option):  # not everywhere
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
