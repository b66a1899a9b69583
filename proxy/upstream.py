"""HTTP/1.1 to the servers over httpx, with as many connections as there are requests in flight.

Every connection has an httpx transport of its own (transport.py), kept in a stack per server. One
transport for many connections searches all of them for every request: with 64 idle ones that takes
3 ms of CPU per request, with 512 it takes 87 ms. httpx's client above the transport would
only cost time: cookies, redirects and authentication are the business of client and servers.

    send() -> head -> chunks... -> end       the connection goes back on the stack
          \\-> error or aclose() on the way   the connection is closed, which the server sees
"""

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import httpx

from protocol.errors import InvalidRequest
from proxy import retry
from proxy.transport import ConnectionTransport

Headers = Sequence[tuple[bytes, bytes]]

IDLE_S = 4.0  # a connection idle for longer is not used again; servers drop theirs after 5 s
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)


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


class _Lane:
    """A transport that has one connection, or none yet, to one server."""

    def __init__(self, transport: ConnectionTransport) -> None:
        self.transport = transport
        self.idle_since = float("-inf")  # on the loop's clock


class _Lanes:
    """The lanes of one server, and those that have nothing to do, the last used last."""

    def __init__(self, url: str) -> None:
        self.url = httpx.URL(url)
        self.host = (b"host", self.url.netloc)
        self.open: set[_Lane] = set()
        self._idle: deque[_Lane] = deque()

    def take(self) -> _Lane | None:
        """The lane to use for the next request; None when none is kept, or fresh enough."""
        now = asyncio.get_running_loop().time()
        while self._idle and now - self._idle[-1].idle_since < IDLE_S:
            lane = self._idle.pop()
            if lane.transport.is_reusable:
                return lane
            self.close(lane)  # the server hung up, or says what nobody asked for
        return None  # `put` closes the others, off this path

    def put(self, lane: _Lane) -> None:
        """Keeps a lane for the next request, and closes those that have been idle for too long."""
        if not lane.transport.is_reusable:
            self.close(lane)
            return
        now = lane.idle_since = asyncio.get_running_loop().time()
        self._idle.append(lane)
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self.close(self._idle.popleft())

    def close(self, lane: _Lane) -> None:
        self.open.discard(lane)
        lane.transport.close()


class Response:
    """A response whose head has arrived. Read it to its end or `aclose` it, always."""

    def __init__(
        self, response: httpx.Response, lane: _Lane, lanes: _Lanes, timeout: httpx.Timeout
    ) -> None:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._stream = response.stream
        self._chunks = aiter(response.stream)
        self._lane: _Lane | None = lane
        self._lanes = lanes
        self._timeout = timeout
        self.status = response.status_code
        self.headers: Headers = [(name.lower(), value) for name, value in response.headers.raw]

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    async def next_chunk(self) -> bytes | None:
        """The next bytes of the body as they come; None at the end.

        Raises:
            Lost, TimedOut: the rest will not come.
        """
        if self._lane is None:
            return None
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            await self._stream.aclose()
        except httpx.TransportError as error:
            raise _translated(error, self._timeout) from None
        lane, self._lane = self._lane, None
        self._lanes.put(lane)
        return None

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
        lane, self._lane = self._lane, None
        if lane is not None:
            self._lanes.close(lane)


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
        self._timeout = httpx.Timeout(read_timeout_s, connect=connect_timeout_s, pool=None)
        self._timeouts = self._timeout.as_dict()
        self._servers: dict[str, _Lanes] = {}

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
        lanes = self._servers.get(url) or self._servers.setdefault(url, _Lanes(url))
        length = [(b"content-length", b"%d" % len(body))] if body or method == "POST" else []
        request = httpx.Request(
            method,
            lanes.url,
            headers=[lanes.host, *headers, *length],
            stream=httpx.ByteStream(body),
            extensions={"target": path.encode("latin-1"), "timeout": self._timeouts},
        )
        kept = lanes.take()
        if kept is None:
            return await self._exchange(request, self._open(lanes), lanes)
        idle_s = asyncio.get_running_loop().time() - kept.idle_since
        try:
            return await self._exchange(request, kept, lanes)
        except Lost as lost:
            if not retry.may_resend(idle_s):
                raise
            try:
                return await self._exchange(request, self._open(lanes), lanes)
            except (Unreachable, Exhausted):  # so it was not idleness: the server died
                raise lost from None

    async def _exchange(self, request: httpx.Request, lane: _Lane, lanes: _Lanes) -> Response:
        try:
            response = await lane.transport.handle_async_request(request)
        except BaseException as error:
            lanes.close(lane)
            if isinstance(error, httpx.TransportError):
                raise _translated(error, self._timeout) from None
            raise
        return Response(response, lane, lanes, self._timeout)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()  # reads the certificate store: slow

    def _open(self, lanes: _Lanes) -> _Lane:
        transport = ConnectionTransport(self._tls if lanes.url.scheme == "https" else None)
        lane = _Lane(transport)
        lanes.open.add(lane)
        return lane

    async def close(self) -> None:
        """Closes every connection."""
        for lanes in self._servers.values():
            for lane in list(lanes.open):
                lanes.close(lane)
        self._servers.clear()


def _translated(error: httpx.TransportError, timeout: httpx.Timeout) -> Exception:
    """The error of this module, or of the request, for one of httpx."""
    match error:
        case httpx.ConnectTimeout():
            return Unreachable(f"no connection within {timeout.connect:g} s")
        case httpx.ConnectError():
            cause = _os_error(error)
            is_ours = cause is not None and cause.errno in OUT_OF_RESOURCES
            return (Exhausted if is_ours else Unreachable)(str(cause or error))
        case httpx.TimeoutException():
            return TimedOut(f"silent for {timeout.read:g} s")
        case httpx.LocalProtocolError():
            return InvalidRequest(f"the request cannot be passed on: {error}")
        case _:
            return Lost(f"connection ended: {error}")


def _os_error(error: BaseException) -> OSError | None:
    """The system's own word at the bottom of a chain of errors."""
    found: OSError | None = None
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno is not None:
            found = link
        if isinstance(link, BaseExceptionGroup):  # one error for each address of the host
            link = link.exceptions[0]
        else:
            link = link.__cause__ or link.__context__
    return found
