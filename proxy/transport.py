"""An httpx transport of one connection: httpcore's HTTP/1.1 over a socket of the event loop.

httpx's own transport keeps a pool of connections over anyio, and these two take half of the time
that a request costs; upstream.py keeps connections itself.
"""

import asyncio
import contextlib
import select
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from typing import Any, cast

import httpcore
import httpx

from protocol.http.countdown import Countdown
from proxy.waiting import within

HIGH_WATER_BYTES = 262144  # unread, at which the server has to wait
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
_ERRORS: dict[type[Exception], type[httpx.TransportError]] = {
    httpcore.ReadTimeout: httpx.ReadTimeout,
    httpcore.WriteTimeout: httpx.WriteTimeout,
    httpcore.ReadError: httpx.ReadError,
    httpcore.WriteError: httpx.WriteError,
    httpcore.LocalProtocolError: httpx.LocalProtocolError,
    httpcore.RemoteProtocolError: httpx.RemoteProtocolError,
}


class ConnectionTransport(httpx.AsyncBaseTransport):
    """Connects when it is first asked, and only then.

    Args:
        tls: for `https`; None for `http`.
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._socket: Socket | None = None
        self._http: httpcore.AsyncHTTP11Connection | None = None

    @property
    def is_reusable(self) -> bool:
        """Connected, and whatever is read from now on answers the next request: not so once more
        has come than an answer, whether it lies in the socket or in the parser."""
        if self._http is None or self._socket is None:
            return False
        is_quiet = self._http.is_idle() and self._socket.is_quiet
        return is_quiet and not self._http._h11_state.trailing_data[0]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request and waits for the head of its answer.

        Raises:
            httpx.TransportError: ConnectError or ConnectTimeout when nothing was sent.
        """
        http = await self._connected(request)
        url, extensions = request.url, dict(request.extensions)
        target = extensions.pop("target", url.raw_path)  # else httpcore makes a second URL
        asked = httpcore.Request(
            request.method,
            _core_url(url.raw_scheme, url.raw_host, url.port, target),
            headers=request.headers.raw,
            content=request.stream,
            extensions=extensions,
        )
        with _translated():
            answer = await http.handle_async_request(asked)
        return httpx.Response(
            answer.status, headers=answer.headers, stream=_Body(answer), request=request
        )

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    async def _connected(self, request: httpx.Request) -> httpcore.AsyncHTTP11Connection:
        if self._http is not None:
            return self._http
        url, timeout_s = request.url, request.extensions["timeout"]["connect"]
        loop = asyncio.get_running_loop()
        port = url.port or (443 if self._tls else 80)
        try:
            async with within(timeout_s):
                _, self._socket = await loop.create_connection(
                    Socket, url.host, port, ssl=self._tls
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error), request=request) from error
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        origin = httpcore.Origin(url.raw_scheme, url.raw_host, port)
        http = self._http = httpcore.AsyncHTTP11Connection(origin, self._socket)
        # One task at a time uses it; httpcore's lock would go once round the loop for each request
        # and once more for each answer.
        http._state_lock = cast(Any, contextlib.nullcontext())
        return http


class Socket(httpcore.AsyncNetworkStream, asyncio.Protocol):
    """A connected one, as httpcore reads and writes it. One task at a time waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received: list[bytes] = []
        self._num_received = 0
        self._waiter: asyncio.Future[None] | None = None
        self._problem: Exception | None = None
        self._poll: select.poll | None = None  # of what the kernel has for it
        self._is_paused = False  # reading
        self._is_full = False  # what is unsent

    @property
    def is_quiet(self) -> bool:
        """Connected, and nothing is unread, be it an end that the loop has yet to look at: it may
        have been there for long where this process stood still."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._received:
            return False
        return self._poll is None or not self._poll.poll(0)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # called by httpcore

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        while not self._received:
            if self._transport is None:
                if self._problem is not None:
                    raise httpcore.ReadError(str(self._problem)) from self._problem
                return b""
            await self._wait(timeout, httpcore.ReadTimeout)
        data = self._received[0] if len(self._received) == 1 else b"".join(self._received)
        rest = data[max_bytes:]
        self._received = [rest] if rest else []
        self._num_received = len(rest)
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data[:max_bytes] if rest else data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._transport is not None:
            self._transport.write(buffer)
        while self._is_full and self._transport is not None:
            await self._wait(timeout, httpcore.WriteTimeout)
        if self._transport is None:
            raise httpcore.WriteError(str(self._problem or "closed by the server"))

    async def aclose(self) -> None:
        self.close()

    async def start_tls(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        raise NotImplementedError("a connection begins with TLS or stays without")

    def get_extra_info(self, info: str) -> Any:
        return None if self._transport is None else self._transport.get_extra_info(info)

    # called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if (link := transport.get_extra_info("socket")) is not None:
            for option in SOCKET_OPTIONS:
                link.setsockopt(*option)
            self._poll = select.poll()
            self._poll.register(link.fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._num_received += len(data)
        if self._num_received > HIGH_WATER_BYTES and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self._problem = None, exc
        self._wake()

    async def _wait(self, timeout_s: float | None, error: type[Exception]) -> None:
        """Until something has changed."""
        waiter = self._waiter = self._loop.create_future()
        countdown = None
        if timeout_s is not None:
            countdown = Countdown(self._loop, timeout_s, lambda: _end(waiter, error))
        try:
            await waiter
        finally:
            self._waiter = None
            if countdown is not None:
                countdown.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Body(httpx.AsyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._stream = cast(Any, answer.stream)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _translated():
            async for piece in self._stream:
                yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


@lru_cache(maxsize=256)  # a server's paths are few
def _core_url(scheme: bytes, host: bytes, port: int | None, target: bytes) -> httpcore.URL:
    return httpcore.URL(scheme=scheme, host=host, port=port, target=target)


def _end(waiter: asyncio.Future[None], error: type[Exception]) -> None:
    if not waiter.done():
        waiter.set_exception(error())


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """What upstream.py sees are httpx's errors."""
    try:
        yield
    except Exception as error:
        for known, translated in _ERRORS.items():
            if isinstance(error, known):
                raise translated(str(error)) from error
        raise
