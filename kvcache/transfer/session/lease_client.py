"""D's end of the side channel: one connection per prefill engine; replies come in any order.

A lost connection is made anew, for up to a minute, and unsent requests wait for it. Whoever sent a
request that may have been lost with it has to repeat it.
"""

import errno
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.handshake import FrameError, Reply, Request, open_reply, seal_request
from protocol.ipc.waker import Waker
from protocol.ipc.wire import Wire, WireClosed, framed, tune, wait_readable
from protocol.process.logging import get_logger

logger = get_logger(__name__)

Address = tuple[str, int]
_Endpoint = tuple[int, Any]  # address family, address

MAC_BYTES = 32  # of a message; its payload follows
_MAX_REPLY_BYTES = 64 << 20
_READ_BYTES = 1 << 20  # of replies at a time: one peer must not keep the others waiting
_MAX_UNSENT = 1000  # requests to one peer
_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 1.0
_GIVE_UP_S = 60.0  # no question waits so long, and a lease that was to be given back has expired


@dataclass(eq=False)
class _Link:
    """To one address. Connected when it has a wire, on the way when it has only a socket."""

    address: Address
    unsent: deque[bytes] = field(default_factory=deque)
    endpoints: list[_Endpoint] = field(default_factory=list)  # what the name stands for
    attempts: int = 0  # since something authentic came last
    retry_at: float = float("inf")
    sock: socket.socket | None = None
    wire: Wire | None = None
    awaits_room: bool = False  # the epoll looks for it, as for a socket that connects


class LeaseClient:
    """One thread at a time uses it. It never blocks.

    Args:
        clock: of what `unconnected` says.
    """

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret
        self._clock = clock
        self._links: dict[Address, _Link] = {}
        self._by_fd: dict[int, _Link] = {}
        self._unconnected_since: dict[Address, float] = {}
        self._epoll = select.epoll()
        self._waker = Waker()  # for names that have been looked up
        self._found: deque[tuple[_Link, list[_Endpoint]]] = deque()
        self._epoll.register(self._waker.fileno(), select.EPOLLIN)
        self.counters: Counter[str] = Counter(side_channel_full=0, bad_replies=0)

    def fileno(self) -> int:
        """Readable when `receive_all` has something to do."""
        return self._epoll.fileno()

    def retry_in_s(self) -> float:
        """When `receive_all` has to be called even so; infinity for never."""
        soonest = min((link.retry_at for link in self._links.values()), default=float("inf"))
        return max(0.0, soonest - time.monotonic())

    @property
    def all_connected(self) -> bool:
        return not self._unconnected_since

    def unconnected(self) -> dict[Address, float]:
        """Addresses that have no connection now, and since when.

        A process that was killed is noticed so at once, not by the timeout of a question.
        """
        return dict(self._unconnected_since)

    def post(self, address: Address, request: Request) -> bool:
        """Sends without waiting; False when the peer's queue is full (it does not read)."""
        link = self._links.get(address) or self._open(address)
        if len(link.unsent) >= _MAX_UNSENT:
            self.counters["side_channel_full"] += 1
            return False
        if link.wire is not None and link.wire.has_ended():
            self._lost(link)  # else this would be lost with it
        message = b"".join(seal_request(request, self._secret))
        if link.wire is None:
            link.unsent.append(framed(message))
        else:
            link.wire.queue(message)
            self._flush(link)
        return True

    def has_something(self) -> bool:
        """Whether `receive_all` has something to do now."""
        return bool(self._epoll.poll(0, 1))

    def receive_all(self) -> list[tuple[Address, Reply]]:
        """All waiting replies, with whom they came from; goes on with what is unfinished."""
        found: list[tuple[Address, Reply]] = []
        for fd, _ in self._epoll.poll(0):
            link = self._by_fd.get(fd)
            if link is None:
                self._take_endpoints()
            elif link.wire is None:
                self._connected(link)
            else:
                self._flush(link)
                found.extend((link.address, reply) for reply in self._receive(link))
        now = time.monotonic()
        for link in list(self._links.values()):
            if link.retry_at > now:
                continue
            if self._clock() - self._unconnected_since[link.address] < _GIVE_UP_S:
                self._connect(link)
            else:
                self.forget(link.address)
        return found

    def forget(self, address: Address) -> None:
        """Drops the connection and what is queued for it."""
        self._unconnected_since.pop(address, None)
        link = self._links.pop(address, None)
        if link is not None:
            self._disconnect(link)

    def close(self, linger_s: float = 0.0) -> None:
        """Drops all connections; what is unsent has `linger_s` to leave."""
        deadline = time.monotonic() + linger_s
        while any(link.unsent for link in self._links.values()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            wait_readable(self, timeout_s=min(left_s, self.retry_in_s()))
            self.receive_all()
        for address in list(self._links):
            self.forget(address)
        self._epoll.close()
        self._waker.close()

    # -- connecting

    def _open(self, address: Address) -> _Link:
        link = self._links[address] = _Link(address)
        self._unconnected_since[address] = self._clock()
        self._connect(link)
        return link

    def _connect(self, link: _Link) -> None:
        link.retry_at = float("inf")
        link.endpoints = link.endpoints or _look_up(link.address, socket.AI_NUMERICHOST)
        if not link.endpoints:  # a name: asking for it may take seconds
            arguments = (link, self._found, self._waker)
            try:
                threading.Thread(target=_look_up_name, args=arguments, daemon=True).start()
            except RuntimeError as error:  # no thread is to be had, for now
                logger.warning("%s:%d is not looked up: %s", *link.address, error)
                self._lost(link)
            return
        family, endpoint = link.endpoints[link.attempts % len(link.endpoints)]
        try:
            sock = link.sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            tune(sock)
            self._by_fd[sock.fileno()] = link
            self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
            link.awaits_room = True
            status = sock.connect_ex(endpoint)
        except OSError as error:  # no descriptors are left, for now
            logger.warning("no connection to %s:%d: %s", *link.address, error)
            self._lost(link)
            return
        if status == 0:
            self._connected(link)
        elif status != errno.EINPROGRESS:
            self._lost(link)

    def _take_endpoints(self) -> None:
        self._waker.clear()
        while self._found:
            link, endpoints = self._found.popleft()
            if self._links.get(link.address) is not link:
                continue
            link.endpoints = endpoints
            if endpoints:
                self._connect(link)
            else:
                self._lost(link)

    def _connected(self, link: _Link) -> None:
        sock = link.sock
        assert sock is not None
        try:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError("refused")
            if sock.getsockname() == sock.getpeername():  # a free port may be given to oneself
                raise OSError("connected to itself")
        except OSError:
            self._lost(link)
            return
        link.wire = Wire(sock, _MAX_REPLY_BYTES, link.unsent, read_bytes=_READ_BYTES)
        self._unconnected_since.pop(link.address, None)
        self._flush(link)

    def _lost(self, link: _Link) -> None:
        """Tries again later."""
        self._disconnect(link)
        self._unconnected_since.setdefault(link.address, self._clock())
        wait_s = min(_RETRY_MIN_S * 2.0 ** min(link.attempts, 10), _RETRY_MAX_S)
        link.attempts += 1
        link.retry_at = time.monotonic() + wait_s

    def _disconnect(self, link: _Link) -> None:
        sock, link.sock, link.wire = link.sock, None, None
        if sock is not None:
            self._by_fd.pop(sock.fileno(), None)
            sock.close()  # which ends its place in the epoll

    # -- connected

    def _flush(self, link: _Link) -> None:
        if link.wire is None:
            return
        try:
            link.wire.flush()
        except WireClosed:
            self._lost(link)
            return
        if bool(link.unsent) != link.awaits_room:
            link.awaits_room = bool(link.unsent)
            wanted = select.EPOLLIN | (select.EPOLLOUT if link.unsent else 0)
            self._epoll.modify(link.wire.fileno(), wanted)

    def _receive(self, link: _Link) -> list[Reply]:
        """Waiting replies; one that is not authentic ends the connection."""
        replies: list[Reply] = []
        try:
            messages = link.wire.receive() if link.wire is not None else []
        except WireClosed:
            self._lost(link)
            return replies
        for message in messages:
            try:
                replies.append(open_reply(split(message), self._secret))
            except FrameError as error:
                self.counters["bad_replies"] += 1
                logger.warning("side channel reply dropped: %s", error)
                self._lost(link)
                break
            link.attempts = 0
        return replies


def split(message: bytes) -> list[bytes]:
    """[mac, payload] of a message."""
    return [message[:MAC_BYTES], message[MAC_BYTES:]]


def _look_up(address: Address, flags: int = 0) -> list[_Endpoint]:
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError):  # the latter for a name with an empty or too long part
        return []
    return [(family, endpoint) for family, _, _, _, endpoint in found]


def _look_up_name(link: _Link, found: deque[tuple[_Link, list[_Endpoint]]], waker: Waker) -> None:
    found.append((link, _look_up(link.address)))
    waker.wake()
