"""The side channel: how decode engines ask a prefill engine for metadata and about leases.

On P a thread owns the lease table and a ZMQ ROUTER, so an answer never waits for a forward step;
the engine grants leases and collects ended ones through a lock held for microseconds. On D a
client posts requests and takes replies without ever blocking: who asks keeps the nonce.
"""

import logging
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvcache.lease import EndedLease, LeaseState, LeaseTable
from protocol.errors import PeerUnreachable
from protocol.handshake import (
    AbortLease,
    Complete,
    EngineMetadata,
    FrameError,
    GetMetadata,
    Gone,
    Metadata,
    Ok,
    Refused,
    Renew,
    Reply,
    Request,
    open_reply,
    open_request,
    seal_reply,
    seal_request,
)

logger = logging.getLogger(__name__)

Address = tuple[str, int]
ENDED_STATES = (LeaseState.COMPLETED, LeaseState.EXPIRED, LeaseState.ABORTED)

_SWEEP_S = 0.1  # expired leases are collected at most this late
_MAX_REQUEST_BYTES = 64 << 10
_MAX_REPLY_BYTES = 64 << 20
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2000, 6000  # a host that vanished closes no connection


def new_id() -> str:
    """128 random bits, as 32 hex digits: of leases, attempts and nonces."""
    return uuid.uuid4().hex


class LeaseServer:
    """P's end: a thread with the engine's metadata and its leases.

    Args:
        host: what peers connect to; `bind_host` when this machine calls itself otherwise.
        port: 0 takes a free one, see `address`.
        on_event: called from the thread when `drain_ended` has something; must not block.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metadata: EngineMetadata,
        secret: bytes,
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[], None] | None = None,
        bind_host: str | None = None,
    ) -> None:
        self._host = host
        self._metadata = metadata
        self._secret = secret
        self._clock = clock
        self._on_event = on_event
        self._lock = threading.Lock()
        self._table = LeaseTable()
        names = ("granted", "renewed", "gone", "refused", "metadata_sent", "internal_errors")
        self._counters: Counter[str] = Counter(dict.fromkeys(names, 0))
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        _configure(self._router, _MAX_REQUEST_BYTES)
        try:
            self._router.bind(_endpoint(_resolved(bind_host or host), port))
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise OSError(f"side channel cannot listen on {host}:{port}: {error}") from error
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._port = int(endpoint.rsplit(":", 1)[1])
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-server", daemon=True)

    @property
    def address(self) -> Address:
        """What peers connect to."""
        return self._host, self._port

    def start(self) -> None:
        self._thread.start()

    def grant(self, request_id: str, block_ids: Iterable[int], lease_s: float) -> str:
        """Leases blocks for `lease_s` seconds from now and returns the lease id. Any thread."""
        lease_id = new_id()
        with self._lock:
            self._table.grant(lease_id, request_id, block_ids, lease_s, self._clock())
            self._counters["granted"] += 1
        return lease_id

    def abort(self, lease_id: str) -> bool:
        """Ends a lease nobody will come for; False when it was gone already. Any thread."""
        with self._lock:
            return self._table.abort(lease_id, self._clock())

    def drain_ended(self) -> list[EndedLease]:
        """Leases that ended since the last call; their blocks are the engine's. Any thread."""
        with self._lock:
            return self._table.drain_ended()

    def counters(self) -> dict[str, int]:
        """Events since the start, and `held`, the leases held now. Any thread."""
        with self._lock:
            ended = {state.value: self._table.ended_counts[state] for state in ENDED_STATES}
            return {**self._counters, **ended, "held": self._table.num_held}

    def close(self) -> None:
        """Stops the thread; leases still held end as ABORTED and can be drained."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._table.abort_all(self._clock())
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._router.poll(int(_SWEEP_S * 1000)):
                    self._serve_waiting()
                self._sweep()
            except Exception:  # one bad message must not end every lease
                logger.exception("side channel")
                with self._lock:
                    self._counters["internal_errors"] += 1

    def _serve_waiting(self) -> None:
        for _ in range(256):  # then sweep, however many are waiting
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = seal_reply(self._answer(frames), self._secret)
            try:
                self._router.send_multipart([identity, *reply], zmq.NOBLOCK)
            except zmq.ZMQError as error:  # its queue is full or it is gone: it will ask again
                logger.debug("side channel reply dropped: %s", error)

    def _sweep(self) -> None:
        with self._lock:
            self._table.expire(self._clock())
            ended = self._table.has_ended
        if ended and self._on_event is not None:
            self._on_event()

    def _answer(self, frames: list[bytes]) -> Reply:
        try:
            request = open_request(frames, self._secret)
        except FrameError as error:
            with self._lock:
                self._counters["refused"] += 1
            logger.warning("side channel refused a request: %s", error)
            return Refused(reason=str(error))
        if isinstance(request, GetMetadata):
            with self._lock:
                self._counters["metadata_sent"] += 1
            return Metadata(nonce=request.nonce, engine=self._metadata)
        if request.incarnation != self._metadata.incarnation:
            return self._gone(request.nonce, "this prefill server was restarted")
        return self._about_a_lease(request)

    def _about_a_lease(self, request: Renew | Complete | AbortLease) -> Reply:
        with self._lock:
            ok = self._decide(request, self._clock())
            self._counters["renewed"] += ok and isinstance(request, Renew)
        return Ok(nonce=request.nonce) if ok else self._gone(request.nonce, "unknown or ended")

    def _decide(self, request: Renew | Complete | AbortLease, now: float) -> bool:
        if isinstance(request, Renew):
            return self._table.renew(request.lease_id, now)
        if isinstance(request, Complete):
            return self._table.complete(request.lease_id, request.attempt_id, now)
        return self._table.abort(request.lease_id, now)

    def _gone(self, nonce: str, reason: str) -> Gone:
        with self._lock:
            self._counters["gone"] += 1
        return Gone(nonce=nonce, reason=reason)


class SideChannelClient:
    """D's end, for one thread: one DEALER for each prefill engine, requests and replies apart."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._secret = secret
        self._clock = clock
        self._dealers: dict[Address, zmq.Socket[bytes]] = {}
        self._monitors: dict[Address, zmq.Socket[bytes]] = {}
        self._unconnected_since: dict[Address, float] = {}
        self.counters: Counter[str] = Counter(side_channel_full=0, bad_replies=0)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To poll, for `receive_all` and `unconnected`."""
        return [*self._dealers.values(), *self._monitors.values()]

    def unconnected(self) -> dict[Address, float]:
        """Addresses that have no connection now, and since when.

        A process that was killed is noticed so at once, not by the timeout of a question.
        """
        for address, monitor in self._monitors.items():
            while monitor.poll(0):
                event = recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._unconnected_since.pop(address, None)
                else:
                    self._unconnected_since.setdefault(address, self._clock())
        return dict(self._unconnected_since)

    def post(self, address: Address, request: Request) -> bool:
        """Sends without waiting; False when the peer's queue is full (it does not read)."""
        dealer = self._dealers.get(address) or self._connect(address)
        try:
            dealer.send_multipart(seal_request(request, self._secret), zmq.NOBLOCK)
        except zmq.Again:
            self.counters["side_channel_full"] += 1
            return False
        return True

    def receive_all(self) -> list[tuple[Address, Reply]]:
        """All waiting replies, with whom they came from."""
        found: list[tuple[Address, Reply]] = []
        for address, dealer in list(self._dealers.items()):
            found.extend((address, reply) for reply in self._receive(dealer))
        return found

    def _receive(self, dealer: zmq.Socket[bytes]) -> list[Reply]:
        """All waiting replies that are authentic; others are counted and dropped."""
        replies: list[Reply] = []
        while not dealer.closed:
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                replies.append(open_reply(frames, self._secret))
            except FrameError as error:
                self.counters["bad_replies"] += 1
                logger.warning("side channel reply dropped: %s", error)
        return replies

    def forget(self, address: Address) -> None:
        """Drops the connection and what is queued for it."""
        self._unconnected_since.pop(address, None)
        if address in self._dealers:
            _close_monitored(self._dealers.pop(address), self._monitors.pop(address), 0.0)

    def close(self, linger_s: float = 0.0) -> None:
        for address, dealer in self._dealers.items():
            _close_monitored(dealer, self._monitors[address], linger_s)
        self._dealers.clear()
        self._monitors.clear()
        self._unconnected_since.clear()

    def _connect(self, address: Address) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        _configure(dealer, _MAX_REPLY_BYTES)
        monitor = dealer.get_monitor_socket(_WATCHED)
        try:
            dealer.connect(_endpoint(*address))
        except zmq.ZMQError as error:
            _close_monitored(dealer, monitor, 0.0)
            raise PeerUnreachable(f"{address[0]}:{address[1]} is no address: {error}") from error
        self._dealers[address], self._monitors[address] = dealer, monitor
        self._unconnected_since[address] = self._clock()
        return dealer


def ask(address: Address, request: Request, secret: bytes, timeout_s: float) -> Reply:
    """One request, one reply, blocking: for tools and tests.

    Raises:
        PeerUnreachable: no authentic reply came in time.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = SideChannelClient(context, secret)
    try:
        client.post(address, request)
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            zmq.select(client.sockets, [], [], left_s)
            client.unconnected()  # empties the monitors, which would be readable for ever
            for _, reply in client.receive_all():
                if isinstance(reply, Refused) or reply.nonce == request.nonce:
                    return reply
        raise PeerUnreachable(f"{address[0]}:{address[1]} did not answer within {timeout_s} s")
    finally:
        client.close()
        context.destroy(linger=0)


def _configure(sock: zmq.Socket[bytes], max_bytes: int) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.RECONNECT_IVL, 50)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)


def _close_monitored(sock: zmq.Socket[bytes], monitor: zmq.Socket[bytes], linger_s: float) -> None:
    sock.disable_monitor()
    monitor.close(linger=0)  # pyzmq leaves it to the garbage collector, and the context waits
    sock.close(linger=int(linger_s * 1000))


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _resolved(host: str) -> str:
    """ZMQ binds to addresses and interfaces, not to names."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
