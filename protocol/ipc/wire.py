"""Messages over a stream socket that never blocks: a length (u32), then the bytes.

No thread hand-over is needed between the caller and the kernel.
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
    """The connection is lost, or the peer sent something that is not a message."""


class Wire:
    """A connected socket, for one thread at a time. `send` and `receive` never wait.

    Args:
        max_bytes: Maximum size of a received message. The owner may raise it later.
        read_bytes: Maximum size of one `receive`, for a peer that is not trusted.
        unsent: Messages to send first. The caller shares the queue and may pass it on
            to the next connection. A message stays in it until the kernel has all of
            it.
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
        self._sent_bytes = 0  # of the first unsent message
        self.unsent_bytes = sum(map(len, self._unsent))
        self._received = bytearray()
        self._end: str | None = None  # why no more data will arrive

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def queue(self, message: bytes) -> None:
        """Queues a message for `flush`."""
        frame = framed(message)
        self._unsent.append(frame)
        self.unsent_bytes += len(frame)

    def send(self, message: bytes) -> None:
        """Sends as much as the kernel accepts; `flush` sends the rest.

        Raises:
            WireClosed: The connection is lost.
        """
        self.queue(message)
        self.flush()

    def flush(self) -> None:
        """Sends more of the unsent messages. Raises WireClosed."""
        try:
            while self._unsent:
                sent = self._socket.send(
                    memoryview(self._unsent[0])[self._sent_bytes :]
                )
                self._sent_bytes += sent
                self.unsent_bytes -= sent
                if self._sent_bytes == len(self._unsent[0]):
                    self._unsent.popleft()
                    self._sent_bytes = 0
        except BlockingIOError:
            return
        except OSError as error:
            raise WireClosed(str(error)) from error

    def receive(self) -> list[bytes]:
        """Returns the complete messages that have arrived, up to `read_bytes` at once.

        Raises:
            WireClosed: The connection is lost, or a message is too long.
        """
        self._read()
        messages = self._messages()
        if self._end is not None and not messages:
            raise WireClosed(self._end)
        return messages

    def has_ended(self) -> bool:
        """Returns whether the peer has closed the connection, even before `receive`."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        remaining_bytes = self._read_bytes
        try:
            while self._end is None and remaining_bytes > 0:
                part_bytes = min(remaining_bytes, _RECEIVE_BYTES)
                part = self._socket.recv(part_bytes)
                if not part:
                    self._end = "the peer closed the connection"
                self._received += part
                remaining_bytes -= len(part)
                if len(part) < part_bytes:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._end = str(error)

    def _messages(self) -> list[bytes]:
        messages: list[bytes] = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if length > self.max_bytes:
                self._end = (
                    f"a message of {length} bytes; at most {self.max_bytes} are read"
                )
                self._received.clear()
                return messages
            begin = start + _LENGTH.size
            end = begin + length
            if end > len(self._received):
                break
            messages.append(bytes(self._received[begin:end]))
            start = end
        del self._received[:start]
        return messages


def exchange(selector: BaseSelector, wire: Wire) -> list[bytes]:
    """Sends unsent messages and returns the messages that have arrived.

    The selector then waits for a writable socket only while there are unsent messages.

    Raises:
        WireClosed: The connection is lost, and all messages before that were returned.
    """
    with suppress(WireClosed):
        wire.flush()
    messages = wire.receive()
    await_writable(selector, wire)
    return messages


def await_writable(selector: BaseSelector, wire: Wire) -> None:
    """Makes the selector wait for a writable socket while there are unsent messages."""
    events = EVENT_READ | (EVENT_WRITE if wire.has_unsent else 0)
    selector.modify(wire, events, selector.get_key(wire).data)


def framed(message: bytes) -> bytes:
    """Returns a message with its length, as a wire sends it."""
    return _LENGTH.pack(len(message)) + message


def tune(sock: socket.socket) -> None:
    """Sends data without delay, and detects within seconds that the host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock, idle_s=2, interval_s=2, timeout_s=6)


def keep_alive(
    sock: socket.socket, *, idle_s: int, interval_s: int, timeout_s: float | None = None
) -> None:
    """Makes the kernel probe a peer that was silent for `idle_s`, up to three times.

    Args:
        timeout_s: The kernel ends the connection if the peer acknowledges or accepts no
            data for this long. None: only if the peer answers no probe.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if timeout_s is not None:
        timeout_ms = max(1, round(timeout_s * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def nap_if_short(timeout_s: float) -> float:
    """Sleeps for a timeout below 1 ms, which polling would round up.

    Returns:
        The remaining time to poll for.
    """
    if timeout_s >= 0.001:
        return timeout_s
    if timeout_s > 0:
        time.sleep(timeout_s)
    return 0.0


def allow_short_naps() -> None:
    """Lets sleeps of the calling thread end 1 us late at most, instead of Linux's 50
    us.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


class Waker:
    """Wakes a polling thread: `wake` makes `fileno` readable, and `clear` resets it.

    Any thread may call `wake`; the polling thread calls `clear`.
    """

    def __init__(self) -> None:
        # Another file may get the number of a closed descriptor.
        self._lock = threading.Lock()
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
            pass  # no thread has called `wake`

    def close(self) -> None:
        """Closes the descriptor. Call it from the polling thread, or after its end."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class CannotListen(OSError):
    """A socket cannot listen. The message has the address, the reason and the fix.

    The fix is to change `port_option` if the port is at fault, else --host.
    """

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
    """Returns a socket bound to a TCP port of a name or an address; port 0: a free
    port.

    Raises:
        CannotListen: The name is unknown, or the address is not local or in use.
    """
    sock: socket.socket | None = None
    try:
        kind = socket.SOCK_STREAM
        addresses = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)
        # IPv4 first.
        family, *_, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        return sock
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        if sock is not None:
            sock.close()
        raise CannotListen(host, port, error, port_option) from error


def listen(host: str, port: int, port_option: str = "--port") -> socket.socket:
    """Returns a non-blocking socket that listens; like `bind` otherwise."""
    sock = bind(host, port, port_option)
    sock.listen(512)
    sock.setblocking(False)
    return sock
