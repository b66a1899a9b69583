"""Whole messages over a stream socket that never blocks: a length (u32), then the bytes. No thread
is woken between the caller and the kernel.
"""

import ctypes
import errno
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector

_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 64 << 10
_PR_SET_TIMERSLACK = 29  # in ns


class WireClosed(Exception):
    """The connection is gone, or what came over it is no message."""


class Wire:
    """One connected socket. One thread at a time; `send` and `receive` never wait.

    Args:
        max_bytes: of one message that is received; the owner may allow more later.
        read_bytes: at most, by one `receive`, where the peer may be anybody.
        unsent: messages to send first; shared with the caller, who may carry them over to the
            next connection: a message stays there until the kernel has all of it.
    """

    def __init__(
        self,
        sock: socket.socket,
        max_bytes: int,
        unsent: deque[bytes] | None = None,
        read_bytes: int | None = None,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self.max_bytes = max_bytes
        self._read_bytes = read_bytes or sys.maxsize
        self._unsent: deque[bytes] = deque() if unsent is None else unsent
        self._begun = 0  # bytes of the first unsent message that are out
        self.unsent_bytes = sum(map(len, self._unsent))
        self._received = bytearray()
        self._end: str | None = None  # why nothing more will come

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def queue(self, message: bytes) -> None:
        """`flush` sends it."""
        frame = framed(message)
        self._unsent.append(frame)
        self.unsent_bytes += len(frame)

    def send(self, message: bytes) -> None:
        """Sends now what the kernel takes; `flush` sends the rest. Raises WireClosed."""
        self.queue(message)
        self.flush()

    def flush(self) -> None:
        """Sends more of what is unsent. Raises WireClosed."""
        try:
            while self._unsent:
                sent = self._socket.send(memoryview(self._unsent[0])[self._begun :])
                self._begun += sent
                self.unsent_bytes -= sent
                if self._begun == len(self._unsent[0]):
                    self._unsent.popleft()
                    self._begun = 0
        except BlockingIOError:
            return
        except OSError as error:
            raise WireClosed(str(error)) from error

    def receive(self) -> list[bytes]:
        """Whole messages that have come: all, or those in the first `read_bytes`. Raises WireClosed
        when the connection is gone, or a message would be too long."""
        self._read()
        found = self._messages()
        if self._end is not None and not found:
            raise WireClosed(self._end)
        return found

    def has_ended(self) -> bool:
        """Whether the connection is known to be gone, though `receive` has not met its end yet."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        left = self._read_bytes
        try:
            while self._end is None and left > 0:
                wanted = min(left, _RECEIVE_BYTES)
                part = self._socket.recv(wanted)
                if not part:
                    self._end = "the peer closed the connection"
                self._received += part
                left -= len(part)
                if len(part) < wanted:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._end = str(error)

    def _messages(self) -> list[bytes]:
        found: list[bytes] = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if length > self.max_bytes:
                self._end = (
                    f"a message of {length} bytes; at most {self.max_bytes} are read"
                )
                self._received.clear()
                return found
            begin, end = start + _LENGTH.size, start + _LENGTH.size + length
            if end > len(self._received):
                break
            found.append(bytes(self._received[begin:end]))
            start = end
        del self._received[:start]
        return found


def exchange(selector: BaseSelector, wire: Wire) -> list[bytes]:
    """Sends what is unsent and returns what has come; with a `selector` that looks for room only
    while there is need. Raises WireClosed, once all that came before the end was returned."""
    with suppress(WireClosed):
        wire.flush()
    found = wire.receive()
    await_room(selector, wire)
    return found


def await_room(selector: BaseSelector, wire: Wire) -> None:
    """Has the selector look for room in the socket where something is unsent."""
    events = EVENT_READ | (EVENT_WRITE if wire.has_unsent else 0)
    selector.modify(wire, events, selector.get_key(wire).data)


def framed(message: bytes) -> bytes:
    """A message as it goes over a wire."""
    return _LENGTH.pack(len(message)) + message


def tune(sock: socket.socket) -> None:
    """Sends at once, and notices within seconds that the other host is not there any more."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock, idle_s=2, interval_s=2, timeout_s=6)


def keep_alive(
    sock: socket.socket, *, idle_s: int, interval_s: int, timeout_s: float | None = None
) -> None:
    """The kernel asks a peer that was silent for `idle_s` three times, and ends the connection to
    one that has acknowledged, or taken, nothing for `timeout_s`; None: that answers none of it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if timeout_s is not None:
        timeout_ms = max(1, round(timeout_s * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def nap_if_short(timeout_s: float) -> float:
    """Polls round up to milliseconds: sleeps for less; returns what is left to poll for."""
    if timeout_s >= 0.001:
        return timeout_s
    if timeout_s > 0:
        time.sleep(timeout_s)
    return 0.0


def allow_short_naps() -> None:
    """Naps of the calling thread end within 1 us of their time, not within Linux's usual 50."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


class Waker:
    """`wake` from any thread makes `fileno` readable; the polling thread then calls `clear`."""

    def __init__(self) -> None:
        self._lock = (
            threading.Lock()
        )  # a closed descriptor's number may already be another's
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass  # nobody woke it

    def close(self) -> None:
        """From the polling thread, or when it has ended."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class CannotListen(OSError):
    """Says where, why, and which option to change; `port_option` if it is the port."""

    def __init__(
        self, host: str, port: int, error: Exception, port_option: str
    ) -> None:
        number = error.errno if isinstance(error, OSError) else None
        option = port_option if number in (errno.EADDRINUSE, errno.EACCES) else "--host"
        reason = getattr(error, "strerror", None) or str(error)
        super().__init__(
            f"cannot listen on {host}:{port} ({reason}); use another {option}"
        )


def bind(host: str, port: int, port_option: str = "--port") -> socket.socket:
    """A socket bound to a TCP port of a name or an address; 0 takes a free one.

    Raises:
        CannotListen: the name is unknown, or the address is not ours or another's.
    """
    sock: socket.socket | None = None
    try:
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        found = socket.getaddrinfo(host, port, type=kind, flags=flags)
        family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        return sock
    except (
        OSError,
        UnicodeError,
    ) as error:  # the latter for what no encoding of is a name
        if sock is not None:
            sock.close()
        raise CannotListen(host, port, error, port_option) from error


def listen(host: str, port: int, port_option: str = "--port") -> socket.socket:
    """As `bind`; it listens, and never blocks."""
    sock = bind(host, port, port_option)
    sock.listen(512)
    sock.setblocking(False)
    return sock
