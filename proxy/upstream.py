"""HTTP/1.1 to the servers, over as many connections as there are requests in flight.

send() -> head -> chunks... -> end       the connection goes back on its server's stack
      \\-> error or aclose() on the way   the connection is closed, which the server sees
"""

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol
from urllib.parse import urlsplit

from protocol.errors import InvalidRequest
from proxy import retry
from proxy.connection import (
    Connection,
    Exhausted,
    Lost,
    TimedOut,
    Unreachable,
    UpstreamError,
    connect,
)

__all__ = [
    "Exhausted",
    "Headers",
    "HttpUpstream",
    "Lost",
    "Response",
    "TimedOut",
    "Unreachable",
    "Upstream",
    "UpstreamError",
]

Headers = Sequence[tuple[bytes, bytes]]

IDLE_S = 4.0  # a connection idle for longer is not used again; servers drop theirs after 5 s
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(r"[\x21-\x7e\x80-\xff]+")


class _Server:
    """One server's address, and its connections that have nothing to do, the last used last."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or _PORTS[parts.scheme]
        self.is_tls = parts.scheme == "https"
        host = f"[{self.host}]" if ":" in self.host else self.host
        told = host if self.port == _PORTS[parts.scheme] else f"{host}:{self.port}"
        self.host_line = f"host: {told}\r\n".encode("idna" if not told.isascii() else "ascii")
        self.open: set[Connection] = set()
        self._idle: deque[Connection] = deque()

    def take(self) -> Connection | None:
        """The connection to use for the next request, if one is kept."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and now - connection.idle_since < IDLE_S:
                return connection
            self.close(connection)
        return None

    def put(self, connection: Connection) -> None:
        """Keeps a connection for the next request; closes those that were idle for too long."""
        if not connection.is_reusable:
            self.close(connection)
            return
        now = connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self.close(self._idle.popleft())

    def close(self, connection: Connection) -> None:
        self.open.discard(connection)
        connection.close()


class Response:
    """A response whose head has arrived. Read it to its end or `aclose` it, always."""

    def __init__(self, connection: Connection, server: _Server) -> None:
        self._connection: Connection | None = connection
        self._server = server
        self.status = connection.status
        self.headers: Headers = connection.headers

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    async def next_chunk(self) -> bytes | None:
        """The next bytes of the body as they come; None at the end.

        Raises:
            Lost, TimedOut: the rest will not come.
        """
        connection = self._connection
        if connection is None:
            return None
        chunk = await connection.next_piece()
        if chunk is None:
            self._connection = None
            self._server.put(connection)
        return chunk

    async def read(self) -> bytes:
        """The whole body; the connection is free afterwards."""
        parts = []
        try:
            while (chunk := await self.next_chunk()) is not None:
                parts.append(chunk)
        finally:
            await self.aclose()
        return b"".join(parts)

    async def aclose(self) -> None:
        """Ends the exchange; the server sees a disconnect unless its body was read to the end."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._server.close(connection)


class Upstream(Protocol):
    """How the proxy talks to a server; HttpUpstream in earnest."""

    async def send(
        self, url: str, method: str, path: str, *, headers: Headers = (), body: bytes = b""
    ) -> Response: ...


class HttpUpstream:
    """Sends requests over kept connections.

    Args:
        connect_timeout_s: longest connect.
        read_timeout_s: longest silence of a server that owes bytes, or takes none.
    """

    def __init__(self, *, connect_timeout_s: float, read_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._servers: dict[str, _Server] = {}

    async def send(
        self, url: str, method: str, path: str, *, headers: Headers = (), body: bytes = b""
    ) -> Response:
        """Sends a request and waits for the head of its answer.

        Args:
            url: the server's, such as `http://host:8000`.
            path: sent as it is, with the query.

        Raises:
            Unreachable, Exhausted: nothing was sent.
            Lost, TimedOut: it was sent, and no head came.
            InvalidRequest: `path` or `headers` cannot be sent over HTTP.
        """
        server = self._servers.get(url) or self._servers.setdefault(url, _Server(url))
        request = _request(method, path, server.host_line, headers, body)
        kept = server.take()
        if kept is None:
            return await self._exchange(request, await self._open(server), server)
        idle_s = asyncio.get_running_loop().time() - kept.idle_since
        try:
            return await self._exchange(request, kept, server)
        except Lost as lost:
            if not retry.may_resend(idle_s):
                raise
            try:
                return await self._exchange(request, await self._open(server), server)
            except (Unreachable, Exhausted):  # so it was not idleness: the server died
                raise lost from None

    async def _exchange(self, request: bytes, connection: Connection, server: _Server) -> Response:
        try:
            await connection.send(request)
        except BaseException:
            server.close(connection)
            raise
        return Response(connection, server)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()  # reads the certificate store: slow

    async def _open(self, server: _Server) -> Connection:
        connection = await connect(
            server.host,
            server.port,
            self._tls if server.is_tls else None,
            connect_timeout_s=self._connect_timeout_s,
            read_timeout_s=self._read_timeout_s,
        )
        server.open.add(connection)
        return connection

    async def close(self) -> None:
        """Closes every connection."""
        for server in self._servers.values():
            for connection in list(server.open):
                server.close(connection)
        self._servers.clear()


def _request(method: str, path: str, host_line: bytes, headers: Headers, body: bytes) -> bytes:
    """The request's bytes. Raises InvalidRequest for what no HTTP request can carry."""
    if not _TARGET.fullmatch(path):
        raise InvalidRequest(f"the request cannot be passed on: its path is {path[:200]!r}")
    length = [b"content-length: %d\r\n" % len(body)] if body or method == "POST" else []
    start = f"{method} {path} HTTP/1.1\r\n".encode("latin-1")
    return b"".join([start, host_line, *_lines(headers), *length, b"\r\n", body])


def _lines(headers: Headers) -> Iterable[bytes]:
    for name, value in headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            shown = f"{name[:80]!r}: {value[:80]!r}"
            raise InvalidRequest(f"the request cannot be passed on: its header {shown}")
        yield b"%s: %s\r\n" % (name, value)
