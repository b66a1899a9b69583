"""Rank 0's link to the HTTP process. Receives requests, and sends tokens.

The core's thread reads and writes the socket directly. A messaging library would pass
each message through its own threads, four times between a request and its first token,
which takes long on a GPU host.
"""

import contextlib
import select
import socket
import time

from protocol.ipc.wire import Waker, Wire, WireClosed
from protocol.messages import EngineInput, EngineOutput, decode_input, encode

# Largest message. No smaller limit is needed, because both ends belong to one server.
MAX_BYTES = (1 << 32) - 1
# While more bytes than this are unsent, the HTTP process counts as stalled, and the
# engine runs no step.
MAX_UNSENT_BYTES = 1 << 26
_LINGER_S = 1.0  # how long `close` waits for unsent messages


class EngineTransport:
    """The engine's end of the link, and a waker with which other threads wake the core.

    Args:
        link: the socket to the HTTP process.
    """

    def __init__(self, link: socket.socket) -> None:
        self._wire = Wire(link, MAX_BYTES)
        self._waker = Waker()
        self._poll = select.poll()
        self._poll.register(self._wire, select.POLLIN)
        self._poll.register(self._waker, select.POLLIN)

    def receive(self, timeout_s: float) -> tuple[list[EngineInput], bool]:
        """Wait for input or a wake-up, at most `timeout_s`.

        If more than MAX_UNSENT_BYTES are unsent, first waits until the HTTP process has
        read enough. `timeout_s` does not limit this wait.

        Returns:
            The messages, and whether the HTTP process has hung up.
        """
        with contextlib.suppress(WireClosed):  # _wire.receive() below raises it again
            while self._wire.unsent_bytes > MAX_UNSENT_BYTES:
                writable = select.poll()
                writable.register(self._wire, select.POLLOUT)
                writable.poll(1000)
                self._wire.flush()
        write_events = select.POLLOUT if self._wire.has_unsent else 0
        self._poll.modify(self._wire, select.POLLIN | write_events)
        ready = dict(self._poll.poll(int(timeout_s * 1000)))
        if self._waker.fileno() in ready:
            self._waker.clear()
        if self._wire.fileno() not in ready:
            return [], False
        try:
            self._wire.flush()
            return [decode_input(message) for message in self._wire.receive()], False
        except WireClosed:
            return [], True

    def wake(self) -> None:
        self._waker.wake()

    def send(self, message: EngineOutput) -> None:
        """Send a message without waiting. Unsent messages are buffered."""
        with contextlib.suppress(WireClosed):  # `receive` reports the lost link
            self._wire.send(encode(message))

    def close(self) -> None:
        deadline_s = time.monotonic() + _LINGER_S
        with contextlib.suppress(WireClosed):
            while self._wire.has_unsent and time.monotonic() < deadline_s:
                self._poll.modify(self._wire, select.POLLOUT)
                self._poll.poll(100)
                self._wire.flush()
        self._wire.close()
        self._waker.close()
