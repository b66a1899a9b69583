"""Accepts connections while this process has descriptors for them.

At the limit, connections wait in the kernel's backlog. An event loop's own server would accept them
all the same: where no descriptor is left, libuv accepts a connection only to close it, which its
client sees as a reset.
"""

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Callable, Collection

from protocol.process.logging import get_logger

logger = get_logger(__name__)

RETRY_S = 0.05  # between two looks for room at the limit
MAX_RESERVED = 64  # descriptors for what is no connection: files, logs, health checks
_BACKLOG = 4096  # connections that wait; the kernel may allow fewer
_AT_ONCE = 64  # connections accepted in one turn of the loop
_WARN_INTERVAL_S = 60.0


def raise_file_limit() -> None:
    """Lets this process hold as many connections as the system permits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections(descriptors_each: int) -> int:
    """How many connections this process may have, each of which needs so many descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 30
    reserved = min(MAX_RESERVED, limit // 4)
    return max(1, (limit - reserved) // descriptors_each)


class Acceptor:
    """Accepts the connections of one listening socket, which its owner closes after `close`.

    Args:
        factory: makes the protocol of each connection.
        open_connections: those that are served, kept by the protocols themselves.
        limit: of connections at a time.
    """

    def __init__(
        self,
        listener: socket.socket,
        factory: Callable[[], asyncio.Protocol],
        certificate: ssl.SSLContext | None,
        open_connections: Collection[object],
        limit: int,
    ) -> None:
        self._listener = listener
        self._factory = factory
        self._certificate = certificate
        self._open_connections = open_connections
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = (
            set()
        )  # accepted, perhaps in a TLS handshake
        self._retry: asyncio.TimerHandle | None = None
        self._warned_at_s = -_WARN_INTERVAL_S
        self._is_closed = False
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accepts no more; connections that are open stay so."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """Waits for handshakes that had begun."""
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            num_open = len(self._open_connections) + len(self._beginning)
            if num_open >= self._limit:
                self._pause(
                    f"{num_open} connections are open, as many as RLIMIT_NOFILE allows"
                )
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, or no memory
                self._pause(f"no connection can be accepted ({error.strerror})")
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, connection: socket.socket) -> None:
        """Hands a connection to its protocol. One that ends in its TLS handshake is over."""
        try:
            with contextlib.suppress(OSError, ConnectionError):
                await self._loop.connect_accepted_socket(
                    self._factory, connection, ssl=self._certificate
                )
        except BaseException:
            connection.close()
            raise

    def _pause(self, reason: str) -> None:
        """Leaves what comes in the backlog for a moment."""
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(RETRY_S, self._resume)
        if self._loop.time() >= self._warned_at_s + _WARN_INTERVAL_S:
            self._warned_at_s = self._loop.time()
            logger.warning(
                "%s; others wait in the kernel's backlog. Raise ulimit -n.", reason
            )

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._accept)
