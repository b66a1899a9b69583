"""HTTP/1.1 to the servers: one keep-alive pool per origin, nothing bounded, bytes as they come.

Written on asyncio and httptools because the general client costs 2-3 ms of CPU per request once
hundreds are in flight (its pool searches all of them for each), and every request has two legs.

    send() -> head -> chunks... -> end       the connection returns to the pool
          \\-> error or close() on the way    the connection is aborted, which the server sees
"""

import asyncio
import errno
import ssl
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol
from urllib.parse import urlsplit

from proxy.connection import (
    Connection,
    Exchange,
    Exhausted,
    Headers,
    Lost,
    TimedOut,
    Unreachable,
    UpstreamError,
    arrival,
)

__all__ = [
    "Exhausted",
    "Headers",
    "HttpUpstream",
    "Lost",
    "Origin",
    "Response",
    "TimedOut",
    "Unreachable",
    "Upstream",
    "UpstreamError",
]

IDLE_S = 4.0  # a connection idle for longer is not used again; servers drop theirs after 5 s
STALE_S = 1.0  # one idle for longer and lost on its next use may have been closed for idleness
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)


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


class Response:
    """A response whose head has arrived. Read it to its end or `close` it, always."""

    def __init__(
        self, connection: Connection, exchange: Exchange, timeout_s: float, pool: "_Pool"
    ) -> None:
        self._connection: Connection | None = connection
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
            await arrival(exchange, self._timeout_s)
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


class _Pool:
    """The idle connections of one origin, most recently used last."""

    def __init__(self) -> None:
        self._idle: dict[Connection, None] = {}
        self._open: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, now: float) -> Connection | None:
        """The freshest idle connection, unless even that one is too old: then all go."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.reusable and now - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        return None

    def add(self, connection: Connection) -> None:
        self._open.add(connection)

    def put(self, connection: Connection) -> None:
        if not connection.reusable:
            connection.abort()
            return
        connection.exchange = None
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle[connection] = None

    def lost(self, connection: Connection) -> None:
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
            Unreachable, Exhausted: nothing was sent.
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
        except (Unreachable, Exhausted):
            if stale is not None:  # so it was not idleness: the server died of, or with, this
                raise stale from None
            raise
        return await self._exchange(connection, request, timeout_s, pool)

    async def _exchange(
        self, connection: Connection, request: bytes, timeout_s: float, pool: _Pool
    ) -> Response:
        exchange = connection.begin(request)
        try:
            while not exchange.has_head:
                await arrival(exchange, timeout_s)
        except BaseException:
            connection.abort()
            raise
        return Response(connection, exchange, timeout_s, pool)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()  # reads the certificate store: slow

    async def _connect(self, origin: Origin, pool: _Pool) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(pool.lost),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            kind = Exhausted if error.errno in OUT_OF_RESOURCES else Unreachable
            raise kind(str(error)) from None
        pool.add(connection)
        return connection

    async def close(self) -> None:
        """Aborts every connection."""
        for pool in self._pools.values():
            pool.close()
        await asyncio.sleep(0)


def _encode(method: str, path: str, origin: Origin, headers: Headers, body: bytes) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1".encode("latin-1"),
        b"host: " + origin.header,
        *(name + b": " + value for name, value in headers),
    ]
    if body or method == "POST":
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
