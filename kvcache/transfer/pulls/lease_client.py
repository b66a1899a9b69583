"""D's end of the side channel: one connection for each prefill engine.

Replies come in any order. A lost connection is opened again until the owner forgets the
address; unsent requests wait for the new one. A request may be lost with a connection,
so its sender has to repeat it.
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

from protocol.handshake import FrameError, Reply, Request, open_reply, seal_request
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
_READ_BYTES = (
    1 << 20
)  # of replies at a time, so that one peer does not delay the others
_MAX_UNSENT = 1000  # requests to one peer
_CONNECT_TIMEOUT_S = 2.0
_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 1.0
_NEVER = float("inf")


@dataclass(eq=False)
class _Link:
    """The connection to one address.

    Attributes:
        since: when the connection was lost, or was first needed.
        unsent: requests that wait for the connection.
        num_attempts: attempts to connect since the last authentic reply.
        retry_at: when to connect again.
        wire: the connection, if there is one.
    """

    address: Address
    since: float
    unsent: deque[bytes] = field(default_factory=deque)
    num_attempts: int = 0
    retry_at: float = _NEVER
    wire: Wire | None = None


class LeaseClient:
    """Sends requests and receives replies.

    It is used by one thread, which waits with the selector. No method blocks.

    Args:
        selector: the data of its keys are calls, which are made when the socket is
            ready.
        on_reply: called with each reply and its sender's address; must not raise.
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
        # Ended attempts to connect; None: the attempt has failed.
        self._dialled: deque[tuple[_Link, socket.socket | None]] = deque()
        selector.register(self._waker, EVENT_READ, self._take_dialled)

    @property
    def has_unsent(self) -> bool:
        return any(link.unsent for link in self._links.values())

    def unconnected(self) -> dict[Address, float]:
        """Addresses without a connection, after at least one failed attempt.

        This shows a killed process at once, not after the timeout of a request.

        Returns:
            For each address, since when there is no connection: since the loss or, if
            nothing had to be sent then, since the first unsent request.
        """
        links = self._links.values()
        return {
            link.address: link.since
            for link in links
            if link.wire is None and link.num_attempts
        }

    def deadline(self) -> float:
        """When `tick` next has something to do; infinity for never."""
        return min((link.retry_at for link in self._links.values()), default=_NEVER)

    def tick(self) -> None:
        """Retries the connections that are due."""
        now = self._clock()
        for link in self._links.values():
            if link.retry_at <= now:
                self._dial(link)

    def post(self, address: Address, request: Request) -> None:
        """Queues a request, and sends as much as possible at once.

        The request is dropped if the queue is full, because the peer does not read
        then.
        """
        link = self._links.get(address)
        if link is None:
            link = _Link(address, self._clock())
            self._links[address] = link
            self._dial(link)
        if len(link.unsent) >= _MAX_UNSENT:
            return
        if link.wire is not None and link.wire.has_ended():
            self._lose(link)  # here, so that this request is not lost with it
        message = seal_request(request, self._secret)
        if link.wire is not None:
            link.wire.queue(message)
            self._flush(link, link.wire)
            return
        if not link.unsent:  # the time in which nothing had to be sent does not count
            link.since = self._clock()
        link.unsent.append(framed(message))

    def forget(self, address: Address) -> None:
        """Drops the connection and its queue."""
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
        link.retry_at = _NEVER
        try:
            threading.Thread(target=self._connect, args=(link,), daemon=True).start()
        except RuntimeError as error:  # the system has no thread for now
            logger.warning("no connection to %s:%d: %s", *link.address, error)
            self._lose(link)

    def _connect(self, link: _Link) -> None:
        """Connects, in a thread of its own: resolving a name may take seconds."""
        sock = None
        try:
            sock = socket.create_connection(link.address, _CONNECT_TIMEOUT_S)
            tune_socket(sock)
            # The system may choose the port to which it connects as its own port.
            if sock.getsockname() == sock.getpeername():
                raise OSError("connected to itself")
        # UnicodeError: a name has an empty part or one that is too long.
        except (OSError, UnicodeError):
            if sock is not None:
                sock.close()
            sock = None
        self._dialled.append((link, sock))
        self._waker.wake()
        if self._closed and sock is not None:
            sock.close()

    def _take_dialled(self) -> None:
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
        """Drops the connection and schedules the next attempt."""
        now = self._clock()
        if link.wire is not None:
            link.since = now
        self._disconnect(link)
        wait_s = min(_MIN_RETRY_S * 2.0 ** min(link.num_attempts, 10), _MAX_RETRY_S)
        link.retry_at = now + wait_s
        link.num_attempts += 1

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
        if link.wire is None:  # the connection was lost in this round
            return
        try:
            messages = exchange(self._selector, link.wire)
        except WireClosed:
            self._lose(link)
            return
        for message in messages:
            try:
                reply = open_reply(message, self._secret)
            except FrameError as error:
                logger.warning("dropped a side channel reply: %s", error)
                self._lose(link)
                return
            link.num_attempts = 0
            self._on_reply(link.address, reply)


def new_id() -> str:
    """128 random bits as 32 hex digits, for leases, attempts and nonces."""
    return os.urandom(16).hex()
