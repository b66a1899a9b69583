"""Rank 0's link to the HTTP process: requests in, tokens out.

A socket and no threads of its own: each hop through a library's threads takes long on a GPU host,
and four lie between a request and its first token.
"""

import contextlib
import select
import socket
import time

from protocol.ipc.wire import Waker, Wire, WireClosed
from protocol.messages import EngineInput, EngineOutput, decode_input, encode

MAX_BYTES = (1 << 32) - 1  # of a message: both ends are one server's
MAX_UNSENT_BYTES = 1 << 26  # beyond, no step is taken: the HTTP process stands still
_LINGER_S = 1.0  # how long unsent answers may outlive the core


class EngineTransport:
    """The engine's end, and a waker by which other threads wake the core.

    Args:
        link: to the HTTP process.
    """

    def __init__(self, link: socket.socket) -> None:
        self._wire = Wire(link, MAX_BYTES)
        self._waker = Waker()
        self._poll = select.poll()
        self._poll.register(self._wire, select.POLLIN)
        self._poll.register(self._waker, select.POLLIN)

    def receive(self, timeout_s: float) -> tuple[list[EngineInput], bool]:
        """Waits for input or a wake-up, at most `timeout_s`; True once the HTTP process hangs up.
        First it waits for that to read, if too much is unsent."""
        with contextlib.suppress(WireClosed):  # as below
            while self._wire.unsent_bytes > MAX_UNSENT_BYTES:
                room = select.poll()
                room.register(self._wire, select.POLLOUT)
                room.poll(1000)
                self._wire.flush()
        awaits_room = select.POLLOUT if self._wire.has_unsent else 0
        self._poll.modify(self._wire, select.POLLIN | awaits_room)
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
        """Never waits: what the HTTP process has not read yet is kept here."""
        with contextlib.suppress(WireClosed):  # `receive` tells
            self._wire.send(encode(message))

    def close(self) -> None:
        until = time.monotonic() + _LINGER_S
        with contextlib.suppress(WireClosed):
            while self._wire.has_unsent and time.monotonic() < until:
                self._poll.modify(self._wire, select.POLLOUT)
                self._poll.poll(100)
                self._wire.flush()
        self._wire.close()
        self._waker.close()
