"""The sockets between the coordinator and the transfer workers of ranks 1 and up."""

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from selectors import EVENT_READ, BaseSelector, DefaultSelector

from kvcache.transfer.pulls.messages import Command, Report, command_decoder, encode, report_decoder
from protocol.ipc.wire import Waker, Wire, WireClosed, await_room, exchange, nap_if_short, path_of

_MAX_BYTES = 1 << 30  # of a message: engines believe their own ranks
_RETRY_S = 0.05


class WorkerLink:
    """A worker's end, of all ranks but 0. `wake` may be called by any thread; all else is the
    worker's.

    Args:
        address: as of RankLinks.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._waker = Waker()
        self.wake = self._waker.wake
        self._selector = DefaultSelector()
        self._selector.register(self._waker, EVENT_READ)
        self._wire: Wire | None = None

    def receive(self, timeout_s: float) -> list[Command]:
        """All commands, when there are some or somebody woke it, or after `timeout_s`."""
        self._wire = self._wire or self._connect()
        if self._wire is None:
            timeout_s = min(timeout_s, _RETRY_S)
        self._selector.select(nap_if_short(timeout_s))
        self._waker.clear()
        if self._wire is None:
            return []
        try:
            frames = exchange(self._selector, self._wire)
        except WireClosed:  # rank 0 is gone, and with it the engine: nothing to do but end
            self._selector.unregister(self._wire)
            self._wire.close()
            self._wire = None
            return []
        return [command_decoder.decode(frame) for frame in frames]

    def report(self, report: Report) -> None:
        """Tells the coordinator."""
        if self._wire is not None:
            with suppress(WireClosed):  # as above; `receive` notices
                self._wire.send(encode(report))
                await_room(self._selector, self._wire)

    def close(self) -> None:
        self._selector.close()
        self._waker.close()
        if self._wire is not None:
            self._wire.close()

    def _connect(self) -> Wire | None:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path_of(self._address))
        except OSError:  # rank 0 is not that far yet
            sock.close()
            return None
        wire = Wire(sock, _MAX_BYTES)
        self._selector.register(wire, EVENT_READ)
        return wire


class RankLinks:
    """The coordinator's ends. A rank that connects late is told all that it has missed.

    Args:
        address: `ipc://PATH`, in a directory of this user's own.
        selector: its data are calls, to be made when the file is ready.
        on_report: called for each report; must not raise.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        num_ranks: int,
        selector: BaseSelector,
        on_report: Callable[[Report], None],
    ) -> None:
        self._selector, self._on_report = selector, on_report
        self._num_missing = num_ranks
        self._missed: list[bytes] = []  # messages
        self._wires: list[Wire] = []
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(path_of(address))
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        selector.register(self._listener, EVENT_READ, self._accept)

    def broadcast(self, command: Command) -> None:
        message = encode(command)
        if self._num_missing:
            self._missed.append(message)
        for wire in self._wires:
            self._send(wire, [message])

    def close(self) -> None:
        for wire in list(self._wires):
            self._drop(wire)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            wire = Wire(self._listener.accept()[0], _MAX_BYTES)
        except OSError:
            return
        self._wires.append(wire)
        self._selector.register(wire, EVENT_READ, partial(self._receive, wire))
        self._send(wire, self._missed)
        self._num_missing -= 1
        if not self._num_missing:
            self._missed = []

    def _send(self, wire: Wire, messages: list[bytes]) -> None:
        with suppress(WireClosed):  # `_receive` notices
            for message in messages:
                wire.queue(message)
            wire.flush()
            await_room(self._selector, wire)

    def _receive(self, wire: Wire) -> None:
        try:
            frames = exchange(self._selector, wire)
        except WireClosed:  # the rank has ended; its engine is about to
            self._drop(wire)
            return
        for frame in frames:
            self._on_report(report_decoder.decode(frame))

    def _drop(self, wire: Wire) -> None:
        self._selector.unregister(wire)
        self._wires.remove(wire)
        wire.close()
