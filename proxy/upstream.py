"""HTTP/1.1 to the servers: one keep-alive pool per origin, nothing bounded, bytes as they come.

Written on asyncio and httptools because the general client costs 2-3 ms of CPU per request once
hundreds are in flight (its pool searches all of them for each), and every request has two legs.

    send() -> head -> chunks... -> end       the connection returns to the pool
          \\-> error or close() on the way    the connection is aborted, which the server sees
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

Headers = Sequence[tuple[bytes, bytes]]

PAUSE_BYTES = 256 * 1024  # unread body bytes at which a connection stops reading from its server
IDLE_S = 4.0  # a connection idle for longer is not used again; servers drop theirs after 5 s
STALE_S = 1.0  # one idle for longer and lost on its next use may have been closed for idleness


class UpstreamError(Exception):
    """The server could not be talked to. `reason` is one word for metrics."""

    reason = "error"


class Unreachable(UpstreamError):
    """No connection: nothing was sent."""

    reason = "unreachable"


class Lost(UpstreamError):
    """The connection ended, or spoke no HTTP, after the request was sent."""

    reason = "lost"


class TimedOut(UpstreamError):
    """Nothing came for the read timeout."""

    reason = "timeout"


@dataclass(frozen=True)
class Origin:
    """Where a server is."""

    host: str
    port: int
    tls: bool

    @classmethod
    def parse(cls, url: str) -> "Origin":
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls)

    @property
    def header(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()


class _Exchange:
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


class _Connection(asyncio.Protocol):
    """One socket. Parses whatever comes into the current exchange."""

    def __init__(self, on_lost: Callable[["_Connection"], None]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._paused = False
        self._keep_alive = False
        self.exchange: _Exchange | None = None
        self.idle_since = 0.0

    def begin(self, request: bytes) -> _Exchange:
        """Sends a whole request and starts the exchange that answers it."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._keep_alive = False
        self.exchange = _Exchange()
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


class Response:
    """A response whose head has arrived. Read it to its end or `close` it, always."""

    def __init__(
        self, connection: _Connection, exchange: _Exchange, timeout_s: float, pool: "_Pool"
    ) -> None:
        self._connection: _Connection | None = connection
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._pool = pool
        self.status = exchange.status
        self.headers: Headers = exchange.headers

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    async def next_chunk(self) -> bytes | None:
        """What has arrived since the last call, waiting for something; None at the end.

        Raises:
            Lost, TimedOut: the rest will not come.
        """
        exchange = self._exchange
        while not exchange.chunks:
            if exchange.complete:
                self._release()
                return None
            await _arrival(exchange, self._timeout_s)
        data = exchange.chunks[0] if len(exchange.chunks) == 1 else b"".join(exchange.chunks)
        exchange.chunks.clear()
        exchange.unread_bytes = 0
        if self._connection is not None:
            self._connection.resume()
        return data

    async def read(self) -> bytes:
        """The whole body; the connection is free afterwards."""
        parts = []
        try:
            while (chunk := await self.next_chunk()) is not None:
                parts.append(chunk)
        finally:
            self.close()
        return b"".join(parts)

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.put(connection)

    def close(self) -> None:
        """Ends the exchange; the server sees a disconnect unless it had sent everything."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._exchange.complete and not self._exchange.chunks:
            self._pool.put(connection)
        else:
            connection.abort()


async def _arrival(exchange: _Exchange, timeout_s: float) -> None:
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


class _Pool:
    """The idle connections of one origin, most recently used last."""

    def __init__(self) -> None:
        self._idle: dict[_Connection, None] = {}
        self._open: set[_Connection] = set()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, now: float) -> _Connection | None:
        """The freshest idle connection, unless even that one is too old: then all go."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.reusable and now - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        return None

    def add(self, connection: _Connection) -> None:
        self._open.add(connection)

    def put(self, connection: _Connection) -> None:
        if not connection.reusable:
            connection.abort()
            return
        connection.exchange = None
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle[connection] = None

    def lost(self, connection: _Connection) -> None:
        self._idle.pop(connection, None)
        self._open.discard(connection)

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()


class Upstream(Protocol):
    """How the proxy talks to a server; HttpUpstream in earnest."""

    async def send(
        self,
        url: str,
        method: str,
        path: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> Response: ...


class HttpUpstream:
    """Sends requests over pooled connections.

    Args:
        connect_timeout_s: longest connect.
        read_timeout_s: longest silence of a server that owes bytes.
    """

    def __init__(self, *, connect_timeout_s: float, read_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._pools: dict[Origin, _Pool] = {}
        self._origins: dict[str, Origin] = {}

    async def send(
        self,
        url: str,
        method: str,
        path: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> Response:
        """Sends a request and waits for the head of its answer.

        A connection that its server closed for idleness at this moment is replaced by a new one.

        Raises:
            Unreachable: nothing was sent.
            Lost, TimedOut: it was sent, and no head came.
        """
        origin = self._origins.get(url) or self._origins.setdefault(url, Origin.parse(url))
        pool = self._pools.setdefault(origin, _Pool())
        request = _encode(method, path, origin, headers, body)
        timeout_s = timeout_s or self._read_timeout_s
        stale: Lost | None = None
        sent_at = asyncio.get_running_loop().time()
        if (pooled := pool.take(sent_at)) is not None:
            try:
                return await self._exchange(pooled, request, timeout_s, pool)
            except Lost as error:
                if sent_at - pooled.idle_since < STALE_S:
                    raise
                stale = error
        try:
            connection = await self._connect(origin, pool)
        except Unreachable:
            if stale is not None:  # so it was not idleness: the server died of, or with, this
                raise stale from None
            raise
        return await self._exchange(connection, request, timeout_s, pool)

    async def _exchange(
        self, connection: _Connection, request: bytes, timeout_s: float, pool: _Pool
    ) -> Response:
        exchange = connection.begin(request)
        try:
            while not exchange.has_head:
                await _arrival(exchange, timeout_s)
        except BaseException:
            connection.abort()
            raise
        return Response(connection, exchange, timeout_s, pool)

    async def _connect(self, origin: Origin, pool: _Pool) -> _Connection:
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if origin.tls else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(pool.lost), origin.host, origin.port, ssl=context
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise Unreachable(str(error)) from None
        pool.add(connection)
        return connection

    async def close(self) -> None:
        """Aborts every connection."""
        for pool in self._pools.values():
            pool.close()
        await asyncio.sleep(0)


def _encode(method: str, path: str, origin: Origin, headers: Headers, body: bytes) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1".encode("ascii"),
        b"host: " + origin.header,
        *(name + b": " + value for name, value in headers),
    ]
    if body or method == "POST":
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
