"""D's end of the side channel: one connection per prefill engine; replies come in any order.

A lost connection is made anew until the owner forgets the address; unsent requests wait for the new
one. A request may be lost with a connection: its sender has to repeat it.
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
    await_room,
    exchange,
    framed,
    tune,
)
from protocol.process.logging import get_logger

logger = get_logger(__name__)

Address = tuple[str, int]

_MAX_REPLY_BYTES = 64 << 20
_READ_BYTES = 1 << 20  # of replies at a time: one peer must not keep the others waiting
_MAX_UNSENT = 1000  # requests to one peer
_CONNECT_S = 2.0
_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 1.0
_NEVER = float("inf")


@dataclass(eq=False)
class _Link:
    address: Address
    since: float  # when the connection was lost, or was first wanted
    unsent: deque[bytes] = field(default_factory=deque)
    attempts: int = 0  # to connect, since the last authentic reply
    retry_at: float = _NEVER
    wire: Wire | None = None


class LeaseClient:
    """Used by one thread, which waits with the selector. No method blocks.

    Args:
        selector: the data of its keys are calls, made when the socket is ready.
        on_reply: called with each reply and its sender's address; must not raise.
    """

    def __init__(
        self,
        secret: bytes,
        selector: BaseSelector,
        on_reply: Callable[[Address, Reply], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret, self._clock = secret, clock
        self._selector, self._on_reply = selector, on_reply
        self._links: dict[Address, _Link] = {}
        self._waker, self._closed = Waker(), False
        self._dialled: deque[tuple[_Link, socket.socket | None]] = deque()
        selector.register(self._waker, EVENT_READ, self._take_dialled)

    @property
    def has_unsent(self) -> bool:
        return any(link.unsent for link in self._links.values())

    def unconnected(self) -> dict[Address, float]:
        """Addresses without a connection, after at least one failed attempt, and since when: since
        the loss or, if nothing was to be sent then, since the first unsent request. Shows a killed
        process at once, not after the timeout of a request."""
        lost = [
            link for link in self._links.values() if link.wire is None and link.attempts
        ]
        return {link.address: link.since for link in lost}

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
        """Queues a request and sends what it can at once. Dropped if the queue is full, as then the
        peer does not read."""
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(address, self._clock())
            self._dial(link)
        if len(link.unsent) >= _MAX_UNSENT:
            return
        if link.wire is not None and link.wire.has_ended():
            self._lost(link)  # before the request would be lost with it
        message = seal_request(request, self._secret)
        if link.wire is not None:
            link.wire.queue(message)
            self._flush(link, link.wire)
            return
        if not link.unsent:  # the time in which nothing was to be sent does not count
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
        except RuntimeError as error:  # no thread is to be had, for now
            logger.warning("no connection to %s:%d: %s", *link.address, error)
            self._lost(link)

    def _connect(self, link: _Link) -> None:
        """In a thread of its own: resolving a name may take seconds."""
        sock = None
        try:
            sock = socket.create_connection(link.address, _CONNECT_S)
            tune(sock)
            if (
                sock.getsockname() == sock.getpeername()
            ):  # the system chose the port it connects to
                raise OSError("connected to itself")
        except (
            OSError,
            UnicodeError,
        ):  # the latter for a name with an empty or too long part
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
                self._lost(link)
            else:
                link.wire = Wire(
                    sock, _MAX_REPLY_BYTES, link.unsent, read_bytes=_READ_BYTES
                )
                self._selector.register(
                    link.wire, EVENT_READ, partial(self._serve, link)
                )
                self._flush(link, link.wire)

    def _lost(self, link: _Link) -> None:
        """Drops the connection and plans the next attempt."""
        now = self._clock()
        if link.wire is not None:
            link.since = now
        self._disconnect(link)
        wait_s = min(_RETRY_MIN_S * 2.0 ** min(link.attempts, 10), _RETRY_MAX_S)
        link.retry_at = now + wait_s
        link.attempts += 1

    def _disconnect(self, link: _Link) -> None:
        wire, link.wire = link.wire, None
        if wire is not None:
            self._selector.unregister(wire)
            wire.close()

    def _flush(self, link: _Link, wire: Wire) -> None:
        try:
            wire.flush()
            await_room(self._selector, wire)
        except WireClosed:
            self._lost(link)

    def _serve(self, link: _Link) -> None:
        """Takes replies; one that is not authentic closes the connection."""
        if link.wire is None:  # lost meanwhile
            return
        try:
            messages = exchange(self._selector, link.wire)
        except WireClosed:
            self._lost(link)
            return
        for message in messages:
            try:
                reply = open_reply(message, self._secret)
            except FrameError as error:
                logger.warning("side channel reply dropped: %s", error)
                self._lost(link)
                return
            link.attempts = 0
            self._on_reply(link.address, reply)


def new_id() -> str:
    """128 random bits, as 32 hex digits: of leases, attempts and nonces."""
    return os.urandom(16).hex()
