"""HTTP/1.1 to the servers over aiohttp, with as many connections as there are requests in flight.

    send() -> head -> chunks... -> end       the connection is kept for the next request
          \\-> error or close() on the way    the connection is closed, which the server sees

A connection that was idle for longer than IDLE_S is not used again, as its server may be closing it
at that moment. So a request whose connection ends is not sent again from here, unless not a byte of
it was: it is the likelier reason, and another server's turn.
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

IDLE_S = 1.0  # servers drop theirs after 5 s
_LOOK_INTERVAL_S = 1.0  # at a connection that is silent
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)
_CUT_OFF = "the connection ended within the body"
_QUOTE = re.compile("[:'\"]")  # before it, an error of the parser quotes nothing
_UNSENT = (
    "accept",
    "accept-encoding",
    "content-type",
    "user-agent",
)  # unless they are given
_WHOLE_BYTES = 1 << 16  # of a body, that are written at once


class Failure(Enum):
    """What became of a request that a server was given, or was to be given."""

    UNREACHABLE = "unreachable"  # nothing was delivered
    LOST = "lost"  # delivered; the connection ended before the answer's head
    TIMEOUT = "timeout"  # delivered; silent for too long
    FULL = "full"  # 429: refused, its queue is full
    BUSY = "busy"  # 503: refused, or handed back
    MOVED = "moved"  # handed over to another one, with its KV
    DIED = (
        "died"  # 503: delivered; the server's engine ended before there was an answer
    )
    ERROR = "error"  # any other 5xx


class UpstreamError(Exception):
    """The server could not be talked to."""

    failure: Failure
    told = property(str)  # to clients: without addresses


# fmt: off
class Unreachable(UpstreamError):  # no connection: nothing was sent
    failure, told = Failure.UNREACHABLE, "unreachable"
class Exhausted(UpstreamError):  # as that, for want of descriptors or ports here: no server's fault
    failure, told = Failure.BUSY, "exhausted"
class Lost(UpstreamError):  # the connection ended, or spoke no HTTP, after the request was sent
    failure = Failure.LOST
class TimedOut(UpstreamError):  # nothing came for the read timeout
    failure = Failure.TIMEOUT
class Unended(UpstreamError):  # a stream that ended as HTTP has it, and not as its events do
    failure = Failure.ERROR
# fmt: on


@asynccontextmanager
async def within(timeout_s: float) -> AsyncIterator[None]:
    """asyncio.timeout for answers of others, which a loop that is late does not hold against them.

    Raises:
        TimeoutError: nothing came for `timeout_s`, or for longer where the loop was late.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        countdown = Countdown(loop, timeout_s, lambda: timeout.reschedule(loop.time()))
        try:
            yield
        finally:
            countdown.cancel()


class _Connector(aiohttp.TCPConnector):
    """Connects within a time that a late loop does not shorten: or the proxy would find servers
    unreachable, all of them, when very many requests come at once."""

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
    """A response whose head has arrived. Read it to its end or `close` it, always.

    Attributes:
        body: once it was read whole.
    """

    def __init__(self, response: aiohttp.ClientResponse, read_timeout_s: float) -> None:
        self._response = response
        self._connection = response.connection  # None: the whole body is here
        self._read_timeout_s = read_timeout_s
        self._look_s = min(_LOOK_INTERVAL_S, read_timeout_s / 4)
        self._num_looks = -1  # since the reader began to wait; -1: it does not
        self._timer: asyncio.TimerHandle | None = (
            None  # one for the whole body, not for a chunk
        )
        self.status = response.status
        self.headers: Headers = [
            (name.lower(), value) for name, value in response.raw_headers
        ]
        self.body: bytes | None = None

    @property
    def is_event_stream(self) -> bool:
        return self._response.content_type == sse.MEDIA_TYPE

    async def next_chunk(self) -> bytes | None:
        """The next bytes of the body as they come; None at the end.

        Raises:
            Lost, TimedOut: the rest will not come.
        """
        content = self._response.content
        try:
            if content.exception() is not None or self._is_cut_off():
                # `read_nowait` keeps back what came before the connection broke.
                if data := content._read_nowait(-1):
                    return data
                raise content.exception() or Lost(_CUT_OFF)
            self._num_looks = 0
            if self._timer is None:
                self._look_later()
            data = await content.readany()
            self._num_looks = -1
            if data:
                return data
        except (aiohttp.ClientError, TimeoutError) as error:
            self._stop_looking()
            raise _translated(error, self._read_timeout_s) from None
        self._stop_looking()
        return None

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._look_s, self._look)

    def _look(self) -> None:
        """Ends a wait that is too long. Looks are counted, not their time: the loop may be late."""
        content = self._response.content
        self._timer = None
        self._num_looks += self._num_looks >= 0
        if self._is_cut_off():
            content.set_exception(Lost(_CUT_OFF))
        elif self._num_looks * self._look_s > self._read_timeout_s:
            content.set_exception(TimeoutError())
        elif not content.is_eof() and content.exception() is None:
            self._look_later()

    def _is_cut_off(self) -> bool:
        """Whether the connection has ended without a word to who waits for the body: so aiohttp
        ends one with a malformed chunk."""
        content, connection = self._response.content, self._connection
        is_told = content.is_eof() or content.exception() is not None
        return not is_told and connection is not None and connection.closed

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def read(self) -> bytes:
        """The whole body; the connection is free afterwards."""
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
        """Ends the exchange; the server sees a disconnect unless its body was read to the end."""
        self._stop_looking()
        self._response.close()


@dataclass(kw_only=True)
class HttpUpstream:
    """Sends requests over kept connections.

    Args:
        connect_timeout_s: longest connect.
        read_timeout_s: longest silence of a server that owes bytes, or takes none.
        ca_file: authorities for servers at https:// (None: the system's).
        api_key: sent with every request.
    """

    connect_timeout_s: float
    read_timeout_s: float
    ca_file: str | None = None
    api_key: SecretStr | None = None

    def __post_init__(self) -> None:
        key = self.api_key and self.api_key.get_secret_value().encode()
        self._own = [(b"authorization", b"Bearer " + key)] if key else []

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Made on the loop that it runs on."""
        return aiohttp.ClientSession(
            connector=_Connector(
                self.connect_timeout_s,
                limit=0,
                keepalive_timeout=IDLE_S,
                socket_factory=_make_socket,
            ),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_UNSENT,
            auto_decompress=False,
        )

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return client_context(self.ca_file)  # reads the certificate store: slow

    async def send(
        self,
        url: str,
        method: str,
        path: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
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

        async def ask() -> aiohttp.ClientResponse:
            return await self._session.request(
                method,
                URL(url + path, encoded=True),
                headers=CIMultiDict(
                    (as_text(n), as_text(v)) for n, v in (*headers, *self._own)
                ),
                data=BytesIO(body) if len(body) > _WHOLE_BYTES else body or None,
                allow_redirects=False,
                ssl=self._tls if url.startswith("https:") else False,
            )

        try:
            async with within(self.read_timeout_s):
                try:
                    response = await ask()
                except aiohttp.ClientOSError as error:
                    if not _is_unsent(error, body):
                        raise
                    response = await ask()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _translated(
                error, self.read_timeout_s, self.connect_timeout_s
            ) from None
        except ValueError as error:
            raise InvalidRequest(f"the request cannot be passed on: {error}") from None
        _check_is_ours(response, headers)
        return Response(response, self.read_timeout_s)

    async def close(self) -> None:
        """Closes every connection."""
        await self._session.close()


def _is_unsent(error: aiohttp.ClientOSError, body: bytes) -> bool:
    """Whether the first byte was refused, as a kept connection's whose end was seen in the same
    turn of the loop. Of a body in pieces any may have been."""
    is_refused = isinstance(error.__cause__, aiohttp.ClientConnectionResetError)
    return is_refused and len(body) <= _WHOLE_BYTES


def _check_is_ours(response: aiohttp.ClientResponse, headers: Headers) -> None:
    """Raises Lost for a status that no server of ours answers with, as one by which a gateway leads
    elsewhere, and for the answer to another request: servers return the id of each. A server that
    says more than it was asked for would otherwise be heard by whoever comes next."""
    sent = next(
        (as_text(value) for name, value in headers if name == b"x-request-id"), None
    )
    problem = ""
    if response.status // 100 not in (2, 4, 5):
        problem = f"it answers with status {response.status}"
    elif sent not in (None, response.headers.get("x-request-id", sent)):
        problem = "the server answered another request"
    if problem:
        response.close()
        raise Lost(problem)


def as_text(header: bytes) -> str:
    """As aiohttp takes it: it writes UTF-8."""
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")


def _make_socket(address: Any) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setblocking(False)
    # A server may rightly be silent for minutes; a host that is gone is found in half of one.
    keep_alive(made, idle_s=15, interval_s=5)
    return made


def _translated(
    error: Exception, read_timeout_s: float, connect_timeout_s: float = 0.0
) -> UpstreamError:
    """The error of this module for one of aiohttp."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            return Unreachable(f"no connection within {connect_timeout_s:g} s")
        case aiohttp.ClientConnectorError():
            is_ours = error.os_error.errno in OUT_OF_RESOURCES
            return (Exhausted if is_ours else Unreachable)(str(error.os_error))
        case TimeoutError():
            return TimedOut(f"silent for {read_timeout_s:g} s")
        case aiohttp.ClientResponseError():  # its text names the URL, and quotes what has come
            return Lost(f"no HTTP: {_QUOTE.split(error.message)[0]}")
        case aiohttp.ServerDisconnectedError():  # whose text is what was there of a head
            return Lost("connection ended: Server disconnected")
        case aiohttp.ClientPayloadError():
            return Lost(_CUT_OFF)
        case _:  # what was behind it names no URL
            return Lost(f"connection ended: {error.__cause__ or error}")
