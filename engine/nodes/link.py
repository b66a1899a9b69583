"""A connection between node 0 and another node, with a thread that watches it."""

import select
import socket
import threading
import time
from collections.abc import Callable

from engine.nodes.messages import (
    BadGreeting,
    Heartbeat,
    Message,
    label_of,
    seal,
    unseal,
)
from protocol.ipc.wire import Wire, WireClosed
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_MAX_MESSAGE_BYTES = 1 << 22
_CLOSE_TIMEOUT_S = 1.0  # maximum duration of each of the two waits in `close`
# Number of heartbeats, and of checks for messages, within the timeout of a link.
_CHECKS = 5


class NodeLink:
    """One end of an authenticated connection between two nodes.

    Both ends send heartbeats. The link is lost if the connection breaks, or if the peer
    is silent for the timeout. Any thread may call `send` and `close`.

    Args:
        sock: the connected socket.
        key: the key of the connection.
        node_rank: the number of this node.
        peer_rank: the number of the other node.
        peer: how messages name the other node, such as "node 1 (10.0.0.2)".
        timeout_s: how long the other node may be silent; see --node-timeout-s.

    Attributes:
        local_host: the address of this end.
    """

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        *,
        node_rank: int,
        peer_rank: int,
        peer: str,
        timeout_s: float,
    ) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.local_host = str(sock.getsockname()[0])
        self._wire = Wire(sock, _MAX_MESSAGE_BYTES)
        self._key = key
        self._label = label_of(node_rank)
        self._peer_label = label_of(peer_rank)
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / _CHECKS
        self._num_sent = 0
        self._num_received = 0
        self._sent_at_s = time.monotonic()
        self._lock = threading.Lock()  # guards the wire's sending side
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(
        self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]
    ) -> None:
        """Starts the thread that receives messages and sends heartbeats.

        Args:
            on_message: called in that thread with each message, except heartbeats.
            on_lost: called in that thread with the reason if the link is lost before
                `close`.
        """

        def run() -> None:
            try:
                self._watch(on_message)
            except (WireClosed, BadGreeting, OSError, ValueError) as error:
                with self._lock:
                    is_lost = not self._is_closed
                    self._is_closed = True
                    self._wire.close()
                if is_lost:
                    on_lost(f"{self.peer} is lost: {error}")

        with self._lock:
            if not self._is_closed:
                thread = threading.Thread(target=run, name="node-link", daemon=True)
                thread.start()
                self._thread = thread

    def send(self, message: Message) -> None:
        """Sends a message without waiting. If the connection is lost, the thread of
        `start` calls `on_lost`."""
        with self._lock:
            if self._is_closed:
                return
            self._wire.queue(seal(message, self._key, self._label, self._num_sent))
            self._num_sent += 1
            self._sent_at_s = time.monotonic()
            self._flush()

    def close(self) -> None:
        """Closes the connection. Waits for at most 2 * _CLOSE_TIMEOUT_S until the peer
        has closed its end.

        Without the wait, the peer could lose the last messages."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._flush()
            self._wire.shut_down(socket.SHUT_WR)
        if self._thread is None:
            self._wire.close()
        else:  # the thread closes the socket
            self._thread.join(_CLOSE_TIMEOUT_S)
            self._wire.shut_down(socket.SHUT_RDWR)
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _flush(self) -> None:
        try:
            self._wire.flush()
        except WireClosed as error:
            logger.debug("%s: %s", self.peer, error)  # `_watch` reports the loss

    def _watch(self, on_message: Callable[[Message], None]) -> None:
        """Calls `on_message` with each message until the link is lost or closed.

        The peer's silence is measured in checks instead of seconds. While this process
        or its machine is suspended, no checks are made. So the time of a suspension
        does not count as silence of the peer.

        Raises:
            WireClosed: the connection has ended, or the peer was silent for too long.
            BadGreeting: a message is not authentic.
        """
        poll = select.poll()
        poll.register(self._wire, select.POLLIN)
        num_silent = 0
        while True:
            if time.monotonic() - self._sent_at_s >= self._interval_s:
                self.send(Heartbeat())
            ready = poll.poll(self._interval_s * 1000)
            if not ready:
                num_silent += 1
                if num_silent >= _CHECKS:
                    raise WireClosed(
                        f"it sent nothing for {self._timeout_s:g} s "
                        "(--node-timeout-s), so its host or the network between the "
                        "nodes is down"
                    )
                continue
            num_silent = 0
            for frame in self._receive():
                message = unseal(frame, self._key, self._peer_label, self._num_received)
                self._num_received += 1
                if not (self._is_closed or isinstance(message, Heartbeat)):
                    on_message(message)

    def _receive(self) -> list[bytes]:
        try:
            return self._wire.receive()
        except WireClosed as error:
            raise WireClosed(
                f"its connection ended ({error}), so its processes have ended or its "
                "host is down; see its log"
            ) from error
