"""An HTTP/1.1 client for the servers, based on aiohttp: one connection per request.

    send() -> head -> chunks... -> end         the connection is reused
          \\-> error or close() before the end  the connection is closed

A connection that was idle for longer than IDLE_S is not used again, because its server
may be closing it at that moment. If a connection ends during a request, this module
sends the request again only if no byte of the request was sent. A request that was sent
may have crashed the server. The caller decides whether to try another server.
"""

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from io import BytesIO
from typing import Any

import aiohttp
from multidict import CIMultiDict
from pydantic import SecretStr
from yarl import URL

from protocol.errors import InvalidRequest
from protocol.http import sse
from protocol.http.deadlines import Countdown
from protocol.http.tls import client_context
from protocol.ipc.wire import keep_alive

Headers = Sequence[tuple[bytes, bytes]]

IDLE_S = 1.0  # servers close idle connections after 5 s
_CHECK_INTERVAL_S = 1.0  # between checks of a silent connection
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_CUT_OFF = "the connection ended within the body"
# An HTTP parser's error message quotes received bytes after one of these characters.
_QUOTE = re.compile("[:'\"]")
# Headers that aiohttp must not add by itself.
_NOT_ADDED = ("accept", "accept-encoding", "content-type", "user-agent")
_MAX_SINGLE_WRITE_BYTES = 1 << 16  # a larger body is written in pieces


class Failure(Enum):
    """How a request to a server failed."""

    UNREACHABLE = "unreachable"  # nothing was delivered
    LOST = "lost"  # delivered; the response broke off, or was not valid HTTP
    TIMEOUT = "timeout"  # delivered; the server was silent for too long
    FULL = "full"  # 429: refused, the queue is full
    BUSY = "busy"  # refused with 503, given up by the server, or no socket was free
    MOVED = "moved"  # the server ended the answer and lends its KV to another server
    DIED = "died"  # delivered; the server's engine ended before the answer did
    ERROR = "error"  # any other 5xx, or a stream without its last event


class UpstreamError(Exception):
    """The exchange with a server failed.

    Attributes:
        client_message: the message for clients, without addresses. If a subclass
            sets none, it is the error's text.
    """

    failure: Failure
    client_message = property(str)


class Unreachable(UpstreamError):
    """No connection could be opened: nothing was sent."""

    failure = Failure.UNREACHABLE
    client_message = "unreachable"


class OutOfSockets(UpstreamError):
    """The proxy has no descriptors or ports left: nothing was sent.

    This is not the server's fault.
    """

    failure = Failure.BUSY
    client_message = "the proxy has no free sockets"


class Lost(UpstreamError):
    """The request was sent, but no complete and valid response arrived."""

    failure = Failure.LOST


class TimedOut(UpstreamError):
    """The server was silent for as long as the read timeout."""

    failure = Failure.TIMEOUT


class IncompleteStream(UpstreamError):
    """The HTTP body of a stream ended correctly, but its last event is missing."""

    failure = Failure.ERROR


@asynccontextmanager
async def within(timeout_s: float) -> AsyncIterator[None]:
    """Like asyncio.timeout, but a delay of this event loop does not count.

    Raises:
        TimeoutError: the block took `timeout_s`, not counting such delays.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        countdown = Countdown(loop, timeout_s, lambda: timeout.reschedule(loop.time()))
        try:
            yield
        finally:
            countdown.cancel()


class _Connector(aiohttp.TCPConnector):
    """A connector with a timeout that does not count delays of the event loop.

    If such delays counted, all servers would look unreachable when very many requests
    arrive at once.
    """

    def __init__(self, connect_timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._connect_timeout_s = connect_timeout_s

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        try:
            async with within(self._connect_timeout_s):
                return await super().connect(req, traces, timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError from error


class Response:
    """A response after its head has arrived. Read the body to its end, or call `close`.

    Attributes:
        body: the complete body, once `read` has returned it.
    """

    def __init__(self, response: aiohttp.ClientResponse, read_timeout_s: float) -> None:
        self._response = response
        self._connection = response.connection  # None: the body is complete
        self._read_timeout_s = read_timeout_s
        self._check_interval_s = min(_CHECK_INTERVAL_S, read_timeout_s / 4)
        # Number of checks since the reader began to wait; -1 if no reader waits.
        self._num_checks = -1
        # One timer for the whole body: a timer per chunk would cost more.
        self._timer: asyncio.TimerHandle | None = None
        self.status = response.status
        self.headers: Headers = [
            (name.lower(), value) for name, value in response.raw_headers
        ]
        self.body: bytes | None = None

    @property
    def is_event_stream(self) -> bool:
        return self._response.content_type == sse.MEDIA_TYPE

    async def next_chunk(self) -> bytes | None:
        """Wait for the next bytes of the body and return them; None at its end.

        Raises:
            Lost, TimedOut: the rest will not arrive.
        """
        content = self._response.content
        try:
            if content.exception() is not None or self._is_cut_off():
                # Return the bytes that arrived before the connection broke. aiohttp's
                # `read_nowait` would raise the error instead.
                if data := content._read_nowait(-1):
                    return data
                raise content.exception() or Lost(_CUT_OFF)
            self._num_checks = 0
            if self._timer is None:
                self._schedule_check()
            data = await content.readany()
            self._num_checks = -1
            if data:
                return data
        except (aiohttp.ClientError, TimeoutError) as error:
            self._stop_checks()
            raise _translated(error, self._read_timeout_s) from None
        self._stop_checks()
        return None

    def _schedule_check(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._check_interval_s, self._check)

    def _check(self) -> None:
        """End the reader's wait if it is too long, or if the connection has ended.

        The wait is measured in checks and not in seconds, so that delays of the event
        loop do not count.
        """
        content = self._response.content
        self._timer = None
        if self._num_checks >= 0:
            self._num_checks += 1
        if self._is_cut_off():
            content.set_exception(Lost(_CUT_OFF))
        elif self._num_checks * self._check_interval_s > self._read_timeout_s:
            content.set_exception(TimeoutError())
        elif not content.is_eof() and content.exception() is None:
            self._schedule_check()

    def _is_cut_off(self) -> bool:
        """Return whether the connection ended within the body and no error is set.

        After a malformed chunk, aiohttp closes the connection, but reports no error to
        the reader of the body.
        """
        content = self._response.content
        if content.is_eof() or content.exception() is not None:
            return False
        return self._connection is not None and self._connection.closed

    def _stop_checks(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def read(self) -> bytes:
        """Return the complete body; the connection is free afterwards."""
        if self.body is not None:
            return self.body
        parts = []
        try:
            while (chunk := await self.next_chunk()) is not None:
                parts.append(chunk)
        finally:
            self.close()
        self.body = b"".join(parts)
        return self.body

    def close(self) -> None:
        """End the exchange.

        The server sees a disconnect unless the response's body was read to the end.
        """
        self._stop_checks()
        self._response.close()


@dataclass(kw_only=True)
class HttpUpstream:
    """Sends requests over connections that are reused.

    Attributes:
        connect_timeout_s: longest time for opening a connection.
        read_timeout_s: longest silence of a server that must send or receive bytes.
        ca_file: certificate authorities for https:// servers; None: the system's.
        api_key: sent with every request.
    """

    connect_timeout_s: float
    read_timeout_s: float
    ca_file: str | None = None
    api_key: SecretStr | None = None

    def __post_init__(self) -> None:
        key = self.api_key and self.api_key.get_secret_value().encode()
        self._key_headers = [(b"authorization", b"Bearer " + key)] if key else []

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """The session, created on the event loop that uses it."""
        return aiohttp.ClientSession(
            connector=_Connector(
                self.connect_timeout_s,
                limit=0,
                keepalive_timeout=IDLE_S,
                socket_factory=_make_socket,
            ),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_NOT_ADDED,
            auto_decompress=False,
        )

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return client_context(self.ca_file)  # slow: reads the certificate store

    async def send(
        self,
        url: str,
        method: str,
        path: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
    ) -> Response:
        """Send a request and wait for the head of the response.

        Args:
            url: the server's URL, such as `http://host:8000`.
            path: path and query, sent unchanged.

        Raises:
            Unreachable, OutOfSockets: nothing was sent.
            Lost, TimedOut: the request was sent, and no valid head arrived.
            InvalidRequest: `path` or `headers` cannot be sent over HTTP.
        """

        async def request() -> aiohttp.ClientResponse:
            return await self._session.request(
                method,
                URL(url + path, encoded=True),
                headers=CIMultiDict(
                    (as_text(n), as_text(v)) for n, v in (*headers, *self._key_headers)
                ),
                data=BytesIO(body)
                if len(body) > _MAX_SINGLE_WRITE_BYTES
                else body or None,
                allow_redirects=False,
                ssl=self._tls if url.startswith("https:") else False,
            )

        try:
            async with within(self.read_timeout_s):
                try:
                    response = await request()
                except aiohttp.ClientOSError as error:
                    if not _is_unsent(error, body):
                        raise
                    response = await request()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _translated(
                error, self.read_timeout_s, self.connect_timeout_s
            ) from None
        except ValueError as error:
            raise InvalidRequest(
                f"the request cannot be sent to a server: {error}"
            ) from None
        _check_is_ours(response, headers)
        return Response(response, self.read_timeout_s)

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()


def _is_unsent(error: aiohttp.ClientOSError, body: bytes) -> bool:
    """Return whether no byte of the request was sent.

    aiohttp refuses to write to a reused connection if it has just noticed that the
    server closed the connection. A body of more than _MAX_SINGLE_WRITE_BYTES is written
    in pieces, so some pieces may have been sent before the refusal.
    """
    is_refused = isinstance(error.__cause__, aiohttp.ClientConnectionResetError)
    return is_refused and len(body) <= _MAX_SINGLE_WRITE_BYTES


def _check_is_ours(response: aiohttp.ClientResponse, headers: Headers) -> None:
    """Check that a response is a server's answer to this request.

    Servers return the id of each request. Without this check, a server's second
    response to one request would be relayed as the answer to the next request.

    Raises:
        Lost: the response answers another request, or has a status that no server
            sends: for example, a gateway's redirect.
    """
    request_id = None
    for name, value in headers:
        if name == b"x-request-id":
            request_id = as_text(value)
            break
    problem = ""
    if response.status // 100 not in (2, 4, 5):
        problem = f"it answers with status {response.status}"
    elif request_id not in (None, response.headers.get("x-request-id", request_id)):
        problem = "the server answered another request"
    if problem:
        response.close()
        raise Lost(problem)


def as_text(header: bytes) -> str:
    """Return a header as text, as aiohttp requires. aiohttp sends the text as UTF-8.

    A header that is not UTF-8 is decoded as Latin-1. The server then receives other
    bytes than the proxy received.
    """
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")


def num_sent_bytes(header: bytes) -> int:
    """Return the size in bytes that a header has when it is sent; see `as_text`."""
    return len(as_text(header).encode())


def _make_socket(address: Any) -> socket.socket:
    new_socket = socket.socket(*address[:3])
    new_socket.setblocking(False)
    # A server may be silent for minutes. Keep-alive probes detect a dead host in half a
    # minute.
    keep_alive(new_socket, idle_s=15, interval_s=5)
    return new_socket


def _translated(
    error: Exception, read_timeout_s: float, connect_timeout_s: float = 0.0
) -> UpstreamError:
    """Return this module's error for an error of aiohttp."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            return Unreachable(f"no connection within {connect_timeout_s:g} s")
        case aiohttp.ClientConnectorError():
            is_out_of_sockets = error.os_error.errno in OUT_OF_RESOURCES
            return (OutOfSockets if is_out_of_sockets else Unreachable)(
                str(error.os_error)
            )
        case TimeoutError():
            return TimedOut(f"silent for {read_timeout_s:g} s")
        case aiohttp.ClientResponseError():
            # str(error) would reveal the URL, and quote the received bytes.
            return Lost(f"not HTTP: {_QUOTE.split(error.message)[0]}")
        case aiohttp.ServerDisconnectedError():
            # str(error) would quote the received part of the response's head.
            return Lost("connection ended: Server disconnected")
        case aiohttp.ClientPayloadError():
            return Lost(_CUT_OFF)
        case _:
            # Unlike the error's own text, the text of its cause contains no URL.
            return Lost(f"connection ended: {error.__cause__ or error}")
