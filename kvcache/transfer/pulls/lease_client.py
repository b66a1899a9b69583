"""The decode server's end of the side channel: one connection per prefill engine.

Replies may arrive in any order. A lost connection is reopened, until `forget` is
called. Unsent requests wait for the new connection. A request that was sent may be lost
with its connection, so callers repeat a request that is not answered.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from selectors import EVENT_READ, BaseSelector

from protocol.handshake import MessageError, Reply, Request, open_reply, seal_request
from protocol.ipc.wire import (
    Waker,
    Wire,
    WireClosed,
    exchange,
    framed,
    tune_socket,
    update_selector,
)
from protocol.process.logging import get_logger

logger = get_logger(__name__)

Address = tuple[str, int]

_MAX_REPLY_BYTES = 64 << 20
# Largest number of bytes in one read from a peer's connection, so that one peer does
# not delay the replies of all other peers.
_READ_BYTES = 1 << 20
_MAX_UNSENT = 1000  # limit on the unsent requests to one peer
_CONNECT_TIMEOUT_S = 2.0
_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 1.0
_NEVER = float("inf")


@dataclass(eq=False)
class _Link:
    """The connection to one address.

    Attributes:
        since: when the connection was lost, or when the oldest unsent request was
            posted, whichever was later.
        unsent: requests that wait for the connection, or for the peer to read.
        num_failures: number of failed attempts to connect and of lost connections since
            the last authentic reply.
        retry_at: when to connect again; infinity for never.
        wire: the connection; None if there is none.
    """

    address: Address
    since: float
    unsent: deque[bytes] = field(default_factory=deque)
    num_failures: int = 0
    retry_at: float = _NEVER
    wire: Wire | None = None


class LeaseClient:
    """Sends requests and receives replies.

    Only the thread that waits with the selector may use the client. No method blocks.

    Args:
        selector: the data of a key is the function to call when its socket is ready.
        on_reply: called with the sender's address and each reply; must not raise.
    """

    def __init__(
        self,
        secret: bytes,
        selector: BaseSelector,
        on_reply: Callable[[Address, Reply], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret = secret
        self._clock = clock
        self._selector = selector
        self._on_reply = on_reply
        self._links: dict[Address, _Link] = {}
        self._waker = Waker()
        self._closed = False
        # Ended attempts to connect, each with its socket; None: the attempt has failed.
        self._dialled: deque[tuple[_Link, socket.socket | None]] = deque()
        selector.register(self._waker, EVENT_READ, self._take_dialled)

    @property
    def has_unsent(self) -> bool:
        """Whether any request has not been sent completely."""
        return any(link.unsent for link in self._links.values())

    def unconnected(self) -> dict[Address, float]:
        """The addresses that have lost their connection or cannot be connected to.

        The address of a killed process is included at once, before requests to that
        process time out.

        Returns:
            For each address, when its connection was lost, or when its oldest unsent
            request was posted, whichever was later.
        """
        links = self._links.values()
        return {
            link.address: link.since
            for link in links
            if link.wire is None and link.num_failures
        }

    def deadline(self) -> float:
        """When `tick` next has something to do; infinity for never."""
        return min((link.retry_at for link in self._links.values()), default=_NEVER)

    def tick(self) -> None:
        """Begins the attempts to connect that are due."""
        now = self._clock()
        for link in self._links.values():
            if link.retry_at <= now:
                self._dial(link)

    def post(self, address: Address, request: Request) -> None:
        """Queues a request, and sends as much of the queue as possible at once.

        The request is dropped if the queue is full, because the peer does not read or
        has no connection.
        """
        link = self._links.get(address)
        if link is None:
            link = _Link(address, self._clock())
            self._links[address] = link
            self._dial(link)
        if len(link.unsent) >= _MAX_UNSENT:
            return
        if link.wire is not None and link.wire.has_ended():
            self._lose(link)  # so that this request waits for the next connection
        message = seal_request(request, self._secret)
        if link.wire is not None:
            link.wire.queue(message)
            self._flush(link, link.wire)
            return
        # The time without a connection counts only while requests wait.
        if not link.unsent:
            link.since = self._clock()
        link.unsent.append(framed(message))

    def forget(self, address: Address) -> None:
        """Drops the connection to an address, and the unsent requests."""
        link = self._links.pop(address, None)
        if link is not None:
            self._disconnect(link)

    def close(self) -> None:
        self._closed = True
        for address in list(self._links):
            self.forget(address)
        self._take_dialled()
        self._selector.unregister(self._waker)
        self._waker.close()

    def _dial(self, link: _Link) -> None:
        """Begins an attempt to connect; `_take_dialled` handles the result."""
        link.retry_at = _NEVER
        try:
            threading.Thread(target=self._connect, args=(link,), daemon=True).start()
        except RuntimeError as error:  # the system cannot start a thread now
            logger.warning(
                "side channel: cannot connect to %s:%d: %s", *link.address, error
            )
            self._lose(link)

    def _connect(self, link: _Link) -> None:
        """Connects, in its own thread, because resolving a name may take seconds."""
        sock = None
        try:
            sock = socket.create_connection(link.address, _CONNECT_TIMEOUT_S)
            tune_socket(sock)
            # If nothing listens on the port, the system may choose this very port as
            # the local one, and connect the socket to itself.
            if sock.getsockname() == sock.getpeername():
                raise OSError("connected to itself")
        # UnicodeError is raised if a part of the host name is empty or too long.
        except (OSError, UnicodeError):
            if sock is not None:
                sock.close()
            sock = None
        self._dialled.append((link, sock))
        self._waker.wake()
        if self._closed and sock is not None:
            sock.close()

    def _take_dialled(self) -> None:
        """Handles the results of the threads that connect."""
        self._waker.clear()
        while self._dialled:
            link, sock = self._dialled.popleft()
            if self._links.get(link.address) is not link:
                if sock is not None:
                    sock.close()
            elif sock is None:
                self._lose(link)
            else:
                wire = Wire(sock, _MAX_REPLY_BYTES, link.unsent, read_bytes=_READ_BYTES)
                link.wire = wire
                self._selector.register(wire, EVENT_READ, partial(self._serve, link))
                self._flush(link, wire)

    def _lose(self, link: _Link) -> None:
        """Drops the connection, if any, and schedules the next attempt to connect."""
        now = self._clock()
        if link.wire is not None:
            link.since = now
        self._disconnect(link)
        wait_s = min(_MIN_RETRY_S * 2.0 ** min(link.num_failures, 10), _MAX_RETRY_S)
        link.retry_at = now + wait_s
        link.num_failures += 1

    def _disconnect(self, link: _Link) -> None:
        wire, link.wire = link.wire, None
        if wire is not None:
            self._selector.unregister(wire)
            wire.close()

    def _flush(self, link: _Link, wire: Wire) -> None:
        try:
            wire.flush()
            update_selector(self._selector, wire)
        except WireClosed:
            self._lose(link)

    def _serve(self, link: _Link) -> None:
        """Receives replies. A reply that is not authentic closes the connection."""
        if link.wire is None:  # an earlier call has lost the connection
            return
        try:
            messages = exchange(self._selector, link.wire)
        except WireClosed:
            self._lose(link)
            return
        for message in messages:
            try:
                reply = open_reply(message, self._secret)
            except MessageError as error:
                logger.warning(
                    "side channel: closing the connection to %s:%d after an invalid "
                    "reply: %s",
                    *link.address,
                    error,
                )
                self._lose(link)
                return
            link.num_failures = 0
            self._on_reply(link.address, reply)


def new_id() -> str:
    """128 random bits as 32 hex digits, for leases, attempts and nonces."""
    return os.urandom(16).hex()
