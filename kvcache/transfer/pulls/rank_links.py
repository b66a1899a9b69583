"""The links between the coordinator and the pull workers of all ranks.

A worker in the coordinator's own process is reached by calls (`InsideLink`): what a message costs
is waking the threads it passes. The others connect to a socket (`OutsideLink`).
"""

import os
import select
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from kvcache.transfer.pulls.messages import (
    Command,
    Hello,
    Report,
    command_decoder,
    encode,
    report_decoder,
)
from protocol.ipc.waker import Waker
from protocol.ipc.wire import Wire, WireClosed, listen, tune, wait_readable

_MAX_BYTES = 1 << 30  # of a message: engines believe their own ranks
_RETRY_S = 0.05
_Item = TypeVar("_Item")


class WorkerLink(ABC):
    """A worker's end. `waker` is woken when a command may have come; all else is its thread's."""

    def __init__(self) -> None:
        self.waker = Waker()

    @abstractmethod
    def open(self, rank: int, stopping: threading.Event) -> None:
        """Called once, first; returns when commands can come, or nobody wants them any more."""

    @abstractmethod
    def receive(self) -> list[Command]:
        """All waiting commands."""

    @abstractmethod
    def report(self, report: Report) -> None:
        """Tells the coordinator."""

    def wait(self, timeout_s: float | None) -> None:
        """Until there may be a command or somebody woke the waker."""
        wait_readable(self.waker, *self._others(), timeout_s=timeout_s)
        self.waker.clear()

    def close(self) -> None:
        self.waker.close()

    def _others(self) -> list[Wire]:
        return []


class InsideLink(WorkerLink):
    """Both ends in one process.

    Attributes:
        on_report: set by the coordinator; called by the worker's thread when it has reported.
    """

    def __init__(self) -> None:
        super().__init__()
        self._commands: deque[Command] = deque()
        self._reports: deque[Report] = deque()
        self._sleeps = False  # or is about to: only then a command has to wake it
        self.on_report: Callable[[], None] = lambda: None

    def open(self, rank: int, stopping: threading.Event) -> None:
        pass

    def receive(self) -> list[Command]:
        return _drained(self._commands)

    def report(self, report: Report) -> None:
        self._reports.append(report)
        self.on_report()

    def wait(self, timeout_s: float | None) -> None:
        self._sleeps = True
        if not self._commands:  # else it came before `_sleeps` was seen
            super().wait(timeout_s)
        self._sleeps = False

    def send(self, command: Command) -> None:
        self._commands.append(command)
        if self._sleeps:
            self.waker.wake()

    def reports(self) -> list[Report]:
        return _drained(self._reports)


class OutsideLink(WorkerLink):
    """Over a socket, to the coordinator's `worker_address`."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._wire: Wire | None = None

    def open(self, rank: int, stopping: threading.Event) -> None:
        while not stopping.is_set():
            try:
                self._wire = Wire(_connect(self._address), _MAX_BYTES)
                self._wire.send(encode(Hello(rank)))
                return
            except (OSError, WireClosed):  # rank 0 is not that far yet
                stopping.wait(_RETRY_S)

    def receive(self) -> list[Command]:
        if self._wire is None:
            return []
        try:
            self._wire.flush()
            return [command_decoder.decode(frame) for frame in self._wire.receive()]
        except WireClosed:  # rank 0 is gone, and with it the engine: nothing to do but end
            self._wire.close()
            self._wire = None
            return []

    def report(self, report: Report) -> None:
        if self._wire is not None:
            with suppress(WireClosed):  # as above; `receive` notices
                self._wire.send(encode(report))

    def wait(self, timeout_s: float | None) -> None:
        """No longer than `_RETRY_S` where reports are unsent: rank 0 had no room for them."""
        unsent = self._wire is not None and self._wire.has_unsent
        super().wait(_RETRY_S if unsent else timeout_s)

    def close(self) -> None:
        super().close()
        if self._wire is not None:
            self._wire.close()

    def _others(self) -> list[Wire]:
        return [] if self._wire is None else [self._wire]


class RankLinks:
    """The coordinator's ends; what is told to a rank before its Hello waits for it.

    Args:
        address: `ipc://PATH`, or `tcp://HOST:PORT` with port 0 for a free one; not used when every
            rank is inside.
        inside: by rank.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, address: str, num_ranks: int, inside: Mapping[int, InsideLink]) -> None:
        self.address = address
        self._inside = dict(inside)
        outside = [rank for rank in range(num_ranks) if rank not in inside]
        self._unsent: dict[int, list[Command]] = {rank: [] for rank in outside}
        self._ranks: dict[int, Wire] = {}
        self._wires: dict[int, Wire] = {}  # by file descriptor
        self._epoll = select.epoll()
        self._listener: socket.socket | None = None
        if outside:
            self._listener, self.address = _listen(address)
            self._epoll.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when `receive` has something to do."""
        return self._epoll.fileno()

    def broadcast(self, command: Command) -> None:
        for rank in self._unsent:
            if rank in self._ranks:
                self._send(self._ranks[rank], command)
            else:
                self._unsent[rank].append(command)
        for link in self._inside.values():
            link.send(command)

    def receive(self) -> list[Report]:
        """All waiting reports; greetings are answered here."""
        found: list[Report] = []
        for link in self._inside.values():
            found += link.reports()
        if self._listener is None:
            return found
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept(self._listener)
            else:
                found += self._receive(fd)
        return found

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()
        if self._listener is not None:
            self._listener.close()
            if self.address.startswith("ipc://"):
                with suppress(OSError):
                    os.unlink(self.address.removeprefix("ipc://"))
        self._epoll.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if sock.family != socket.AF_UNIX:
            tune(sock)
        wire = self._wires[sock.fileno()] = Wire(sock, _MAX_BYTES)
        self._epoll.register(wire.fileno(), select.EPOLLIN)

    def _receive(self, fd: int) -> list[Report]:
        wire = self._wires[fd]
        reports: list[Report] = []
        try:
            wire.flush()
            for frame in wire.receive():
                report = report_decoder.decode(frame)
                if isinstance(report, Hello):
                    self._greet(report.rank, wire)
                else:
                    reports.append(report)
            wanted = select.EPOLLIN | (select.EPOLLOUT if wire.has_unsent else 0)
            self._epoll.modify(fd, wanted)
        except WireClosed:  # the rank has ended; its engine is about to
            self._ranks = {rank: at for rank, at in self._ranks.items() if at is not wire}
            del self._wires[fd]
            wire.close()
        return reports

    def _send(self, wire: Wire, command: Command) -> None:
        with suppress(WireClosed):  # `receive` notices
            wire.send(encode(command))
            if wire.has_unsent:
                self._epoll.modify(wire.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _greet(self, rank: int, wire: Wire) -> None:
        self._ranks[rank] = wire
        commands, self._unsent[rank] = self._unsent[rank], []
        for command in commands:
            self._send(wire, command)


def _drained(queue: deque[_Item]) -> list[_Item]:
    found = []
    while queue:
        found.append(queue.popleft())
    return found


def _listen(address: str) -> tuple[socket.socket, str]:
    kind, _, rest = address.partition("://")
    if kind == "ipc":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(rest)
            sock.listen(64)
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        return sock, address
    host, _, port = rest.rpartition(":")
    sock = listen(host, int(port))
    return sock, f"tcp://{host}:{sock.getsockname()[1]}"


def _connect(address: str) -> socket.socket:
    kind, _, rest = address.partition("://")
    if kind == "ipc":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(rest)
        except OSError:
            sock.close()
            raise
        return sock
    host, _, port = rest.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=1.0)
    tune(sock)
    return sock
