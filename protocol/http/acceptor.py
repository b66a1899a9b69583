"""Accepts connections while this process has file descriptors for them.

When no descriptor is free, new connections wait in the kernel's backlog. The event
loop's own server would reset such connections instead: without a free descriptor, libuv
accepts a connection only to close it.
"""

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Callable, Collection

from protocol.process.logging import get_logger

logger = get_logger(__name__)

RETRY_S = 0.05  # pause after a connection could not be accepted
# Maximum number of descriptors that are reserved for files, logs and health checks.
MAX_RESERVED = 64
_BACKLOG = 4096  # maximum number of waiting connections; the kernel may allow fewer
_ACCEPTS_PER_TURN = 64  # connections accepted in one turn of the event loop
_WARN_INTERVAL_S = 60.0


def raise_file_limit() -> None:
    """Raises the soft limit of this process's open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections(descriptors_per_connection: int) -> int:
    """Returns the number of connections that this process's limit of open files allows.

    Args:
        descriptors_per_connection: Number of file descriptors that each connection
            needs.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 30
    reserved = min(MAX_RESERVED, limit // 4)
    return max(1, (limit - reserved) // descriptors_per_connection)


class Acceptor:
    """Accepts the connections of one listening socket, beginning immediately.

    Args:
        listener: The socket. The owner of the socket closes it after calling `close`.
        factory: Creates the protocol object of a connection.
        tls_context: The TLS context; None for plain TCP.
        open_connections: The connections that a protocol object serves, including idle
            ones. The protocol objects maintain this collection.
        limit: Maximum number of simultaneous connections.
    """

    def __init__(
        self,
        listener: socket.socket,
        factory: Callable[[], asyncio.Protocol],
        tls_context: ssl.SSLContext | None,
        open_connections: Collection[object],
        limit: int,
    ) -> None:
        self._listener = listener
        self._factory = factory
        self._tls_context = tls_context
        self._open_connections = open_connections
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        # One task for each accepted connection that no protocol object serves yet, for
        # example because its TLS handshake is in progress.
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._warned_at_s = -_WARN_INTERVAL_S
        self._is_closed = False
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Stops accepting connections. Open connections stay open."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """Waits until all accepted connections are open or have failed to open."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            num_open = len(self._open_connections) + len(self._opening)
            if num_open >= self._limit:
                self._pause(
                    f"{num_open} connections are open, which is the maximum that the "
                    "limit of open files allows"
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
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _begin(self, connection: socket.socket) -> None:
        """Performs the TLS handshake, if any, and attaches the protocol object.

        A failed TLS handshake is not an error of this process, so it is not reported.
        """
        try:
            with contextlib.suppress(OSError, ConnectionError):
                await self._loop.connect_accepted_socket(
                    self._factory, connection, ssl=self._tls_context
                )
        except BaseException:
            connection.close()
            raise

    def _pause(self, reason: str) -> None:
        """Stops accepting for RETRY_S; new connections wait in the backlog."""
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(RETRY_S, self._resume)
        if self._loop.time() >= self._warned_at_s + _WARN_INTERVAL_S:
            self._warned_at_s = self._loop.time()
            logger.warning(
                "%s; new connections wait in the kernel's backlog. Raise the limit of "
                "open files (ulimit -n).",
                reason,
            )

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._accept)
