"""HTTP/1.1 to the servers over httpx, with as many connections as there are requests in flight.

Every connection has an httpx client of its own, kept in a stack per server. One client for many
connections looks through all of them, each time, for every request: 64 idle ones make that
3 ms of CPU per request and 512 make it 87 ms. A client of one connection stays at 0.5 ms.

    send() -> head -> chunks... -> end       the connection goes back on the stack
          \\-> error or aclose() on the way   the connection is closed, which the server sees
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

import httpx

from protocol.errors import InvalidRequest
from proxy import retry

Headers = Sequence[tuple[bytes, bytes]]

IDLE_S = 4.0  # a connection idle for longer is not used again; servers drop theirs after 5 s
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
# A server may rightly be silent for minutes. Probes find a host that is gone in half of one.
KEEPALIVE_PROBES = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in KEEPALIVE_PROBES
        if hasattr(socket, name)  # not everywhere
    ),
]


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
    """A client that has one connection, or none yet, to one server."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.idle_since = float("-inf")  # on the loop's clock


class _Lanes:
    """The lanes of one server that have nothing to do, most recently used last."""

    def __init__(self, url: str) -> None:
        self.url = httpx.URL(url)
        self.open: set[_Lane] = set()
        self._idle: deque[_Lane] = deque()

    def take(self) -> _Lane | None:
        return self._idle.pop() if self._idle else None

    async def put(self, lane: _Lane) -> None:
        """Keeps a lane for the next request, and closes those that have been idle for too long."""
        now = lane.idle_since = asyncio.get_running_loop().time()
        self._idle.append(lane)
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            await self.close(self._idle.popleft())

    async def close(self, lane: _Lane) -> None:
        self.open.discard(lane)
        await lane.client.aclose()


class Response:
    """A response whose head has arrived. Read it to its end or `aclose` it, always."""

    def __init__(self, response: httpx.Response, lane: _Lane, lanes: _Lanes) -> None:
        self._response = response
        self._chunks = response.aiter_raw()
        self._lane: _Lane | None = lane
        self._lanes = lanes
        self.status = response.status_code
        self.headers: Headers = [(name.lower(), value) for name, value in response.headers.raw]

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    async def next_chunk(self) -> bytes | None:
        """The next bytes of the body as they come; None at the end.

        Raises:
            Lost, TimedOut: the rest will not come.
        """
        with _translated(self._response.request):
            chunk = await anext(self._chunks, None)
        if chunk is None and self._lane is not None:
            lane, self._lane = self._lane, None
            await self._lanes.put(lane)
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
        lane, self._lane = self._lane, None
        if lane is not None:
            await self._lanes.close(lane)


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
        request = httpx.Request(
            method,
            lanes.url,
            headers=list(headers),
            content=body,
            extensions={"target": path.encode("latin-1"), "timeout": self._timeout.as_dict()},
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
            with _translated(request):
                response = await lane.client.send(request, stream=True)
        except BaseException:
            await lanes.close(lane)
            raise
        return Response(response, lane, lanes)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()  # reads the certificate store: slow

    def _open(self, lanes: _Lanes) -> _Lane:
        transport = httpx.AsyncHTTPTransport(
            verify=self._tls,
            trust_env=False,
            limits=httpx.Limits(keepalive_expiry=IDLE_S),
            socket_options=SOCKET_OPTIONS,
        )
        client = httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False)
        lane = _Lane(client)
        lanes.open.add(lane)
        return lane

    async def close(self) -> None:
        """Closes every connection."""
        for lanes in self._servers.values():
            for lane in list(lanes.open):
                await lanes.close(lane)
        self._servers.clear()


@contextlib.contextmanager
def _translated(request: httpx.Request) -> Iterator[None]:
    """Raises the errors of this module for those of httpx."""
    timeout = request.extensions["timeout"]
    try:
        yield
    except httpx.ConnectTimeout:
        raise Unreachable(f"no connection within {timeout['connect']:g} s") from None
    except httpx.ConnectError as error:
        cause = _os_error(error)
        kind = Exhausted if getattr(cause, "errno", None) in OUT_OF_RESOURCES else Unreachable
        raise kind(str(cause or error)) from None
    except httpx.TimeoutException:
        raise TimedOut(f"silent for {timeout['read']:g} s") from None
    except httpx.LocalProtocolError as error:
        raise InvalidRequest(f"the request cannot be passed on: {error}") from None
    except httpx.TransportError as error:
        raise Lost(f"connection ended: {error}") from None


def _os_error(error: BaseException) -> OSError | None:
    """The system's own word at the bottom of a chain of errors."""
    found: OSError | None = None
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno is not None:
            found = link
        link = link.__cause__ or link.__context__
    return found
