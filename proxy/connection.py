"""One HTTP/1.1 connection to a server: one exchange after another.

The proxy's work is to relay small pieces of many streams, so a piece costs one call of a parser in
C and one wake-up of the task that waits for it, and nothing else.

    idle -> send() -> head -> pieces... -> end -> idle, if `is_reusable`
              `-> error or close() on the way ----> closed
"""

import asyncio
import errno
import socket
import ssl
from typing import cast

import httptools

MAX_HEAD_BYTES = 65536
HIGH_WATER_BYTES = 262144  # unread, at which the server has to wait
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


class Connection(asyncio.Protocol):
    """A connected one. The methods in the middle are called by the event loop and by the parser.

    Args:
        read_timeout_s: longest silence of a server that owes bytes, or takes none.
    """

    def __init__(self, read_timeout_s: float) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # of the answer, names in lower case
        self.idle_since = 0.0  # on the loop's clock; the pool's to write
        self._loop = asyncio.get_running_loop()
        self._read_timeout_s = read_timeout_s
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._problem: UpstreamError | None = None
        self._pieces: list[bytes] = []
        self._num_unread = 0  # bytes
        self._num_head = 0  # bytes
        self._has_head = False
        self._has_ended = True
        self._ends_with_connection = False
        self._keeps_alive = False
        self._is_paused = False

    # what the proxy asks for

    async def send(self, request: bytes) -> None:
        """Writes a whole request and waits for the head of its answer.

        Raises:
            Lost, TimedOut: there is none.
        """
        if self._transport is None:
            raise Lost("connection ended before the request was sent")
        self._has_head = self._has_ended = self._ends_with_connection = False
        self._num_head = 0
        self.headers = []
        self._transport.write(request)
        while not self._has_head:
            await self._wait()

    async def next_piece(self) -> bytes | None:
        """What has come of the body since the last call, or what comes next; None at the end.

        Raises:
            Lost, TimedOut: the rest will not come.
        """
        while not self._pieces:
            if self._has_ended:
                return None
            await self._wait()
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._num_unread = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return piece

    @property
    def is_reusable(self) -> bool:
        """Whether another request can be sent."""
        transport = self._transport
        if transport is None or transport.is_closing() or not self._has_ended:
            return False
        return self._keeps_alive and transport.get_write_buffer_size() == 0

    def close(self) -> None:
        """Hangs up at once. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        """Until something has changed. Raises what keeps the answer from coming."""
        if self._problem is not None:
            raise self._problem
        waiter = self._waiter = self._loop.create_future()
        timer = self._loop.call_later(self._read_timeout_s, self._time_out)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _time_out(self) -> None:
        self._fail(TimedOut(f"silent for {self._read_timeout_s:g} s"))

    def _fail(self, problem: UpstreamError) -> None:
        """The exchange cannot go on."""
        self._problem = self._problem or problem
        self._wake()

    # called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if (link := transport.get_extra_info("socket")) is not None:
            for option in SOCKET_OPTIONS:
                link.setsockopt(*option)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._has_head and self._ends_with_connection and exc is None:
            self._has_ended = True
        elif not self._has_ended:
            what = "the answer's body" if self._has_head else "an answer"
            self._fail(Lost(f"connection ended before {what}: {exc or 'closed by the server'}"))
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._has_ended:  # nobody has asked for it
            self.close()
            return
        self._num_head += 0 if self._has_head else len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keeps_alive = False
            if not self._has_ended:
                self._fail(Lost(f"connection ended: no HTTP: {error}"))
        if not self._has_head and self._num_head > MAX_HEAD_BYTES:
            self._fail(Lost(f"connection ended: a head of over {MAX_HEAD_BYTES} bytes"))
        if self._num_unread > HIGH_WATER_BYTES and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def resume_writing(self) -> None:
        self._wake()  # the server takes the request: its time begins anew

    # called by the parser

    def on_message_begin(self) -> None:
        if self._has_ended:  # an answer too many, with the end of the one before
            self._keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else it is a trailer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._has_ended:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers = []
            return
        self._has_head = True
        framed = any(
            name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value)
            for name, value in self.headers
        )
        self._ends_with_connection = not framed and self.status not in (204, 304)

    def on_body(self, piece: bytes) -> None:
        if not self._has_ended:
            self._pieces.append(piece)
            self._num_unread += len(piece)

    def on_message_complete(self) -> None:
        if self._has_head and not self._has_ended:
            self._has_ended = True
            self._keeps_alive = self._parser.should_keep_alive()


async def connect(
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    *,
    connect_timeout_s: float,
    read_timeout_s: float,
) -> Connection:
    """A new connection, to the first address of `host` that can be had.

    Raises:
        Unreachable, Exhausted: there is none.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + connect_timeout_s
    try:
        async with asyncio.timeout_at(end):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for number, (*_, address) in enumerate(found):
            share_s = (end - loop.time()) / (len(found) - number)
            try:
                async with asyncio.timeout(share_s):
                    _, connection = await loop.create_connection(
                        lambda: Connection(read_timeout_s),
                        str(address[0]),
                        port,
                        ssl=tls,
                        server_hostname=host if tls is not None else None,
                    )
                return connection
            except OSError:  # TimeoutError is one
                if number + 1 == len(found):
                    raise
        raise Unreachable(f"{host} has no address")
    except TimeoutError as error:
        reason = str(error) if error.errno else f"no connection within {connect_timeout_s:g} s"
        raise Unreachable(reason) from None
    except (OSError, UnicodeError) as error:
        kind = Exhausted if getattr(error, "errno", None) in OUT_OF_RESOURCES else Unreachable
        raise kind(str(error)) from None
