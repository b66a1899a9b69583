"""The sockets between the coordinator and the transfer workers of ranks 1 and up."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from selectors import EVENT_READ, BaseSelector, DefaultSelector
from socket import socket

from kvcache.transfer.pulls.messages import (
    Command,
    Report,
    command_decoder,
    encode,
    report_decoder,
)
from protocol.ipc.wire import (
    Waker,
    Wire,
    WireClosed,
    exchange,
    nap_if_short,
    update_selector,
)

# Largest size of a message in bytes. The limit is high, because all messages come from
# processes of this engine.
_MAX_BYTES = 1 << 30


class WorkerLink:
    """A worker's end of the link, on ranks 1 and up.

    Any thread may call `wake`; only the worker's thread calls all other methods.
    """

    def __init__(self, sock: socket) -> None:
        self._waker = Waker()
        self.wake = self._waker.wake
        self._selector = DefaultSelector()
        self._selector.register(self._waker, EVENT_READ)
        self._wire: Wire | None = Wire(sock, _MAX_BYTES)
        self._selector.register(self._wire, EVENT_READ)

    def receive(self, timeout_s: float) -> list[Command]:
        """Waits for a command or a `wake`, for at most `timeout_s`.

        Returns:
            The commands that were received.
        """
        self._selector.select(nap_if_short(timeout_s))
        self._waker.clear()
        if self._wire is None:
            return []
        try:
            frames = exchange(self._selector, self._wire)
        except WireClosed:
            # Rank 0 has ended, so the engine is ending: there will be no more commands.
            self._selector.unregister(self._wire)
            self._wire.close()
            self._wire = None
            return []
        return [command_decoder.decode(frame) for frame in frames]

    def report(self, report: Report) -> None:
        """Sends a report to the coordinator."""
        if self._wire is not None:
            with suppress(WireClosed):  # `receive` handles a closed wire
                self._wire.send(encode(report))
                update_selector(self._selector, self._wire)

    def close(self) -> None:
        self._selector.close()
        self._waker.close()
        if self._wire is not None:
            self._wire.close()


class RankLinks:
    """The coordinator's ends of the links to all ranks except rank 0.

    Args:
        sockets: one socket for each rank.
        selector: the data of a key is the function to call when its socket is ready.
        on_report: called with each report; must not raise.
    """

    def __init__(
        self,
        sockets: Iterable[socket],
        selector: BaseSelector,
        on_report: Callable[[Report], None],
    ) -> None:
        self._selector = selector
        self._on_report = on_report
        self._wires = [Wire(sock, _MAX_BYTES) for sock in sockets]
        for wire in self._wires:
            selector.register(wire, EVENT_READ, partial(self._receive, wire))

    def broadcast(self, command: Command) -> None:
        """Sends a command to every rank except rank 0."""
        message = encode(command)
        for wire in self._wires:
            with suppress(WireClosed):  # `_receive` handles a closed wire
                wire.send(message)
                update_selector(self._selector, wire)

    def close(self) -> None:
        for wire in list(self._wires):
            self._drop(wire)

    def _receive(self, wire: Wire) -> None:
        try:
            frames = exchange(self._selector, wire)
        except WireClosed:  # the rank has ended, and its engine is about to end
            self._drop(wire)
            return
        for frame in frames:
            self._on_report(report_decoder.decode(frame))

    def _drop(self, wire: Wire) -> None:
        self._selector.unregister(wire)
        self._wires.remove(wire)
        wire.close()
