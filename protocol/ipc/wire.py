"""Messages over a non-blocking stream socket. A message is its length (u32, little
endian) and its bytes.

The thread that calls `send` and `receive` accesses the socket directly. Passing each
message to another thread would take longer.
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
_PR_SET_TIMERSLACK = 29  # option of prctl; the slack is given in ns


class WireClosed(Exception):
    """The connection is lost, or the peer sent a message that is too long."""


class Wire:
    """A connected socket, for one thread at a time. `send` and `receive` never wait.

    Args:
        max_bytes: Maximum size of a received message. The attribute of the same name
            may be raised later.
        unsent: The queue of messages to send, each with its length (see `framed`). The
            caller can reuse the queue for a new connection, because a message stays in
            the queue until the kernel has accepted all its bytes.
        read_bytes: Maximum number of bytes that one call of `receive` reads. It
            protects against untrusted peers. None: no limit.

    Attributes:
        unsent_bytes: Number of bytes in the queue that the kernel has not accepted yet.
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
        # Bytes of the queue's first message that the kernel has accepted.
        self._first_sent_bytes = 0
        self.unsent_bytes = sum(map(len, self._unsent))
        self._received = bytearray()  # bytes that `receive` has not returned yet
        self._close_reason: str | None = None  # set when nothing more will be read

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
        """Queues a message, and sends as much of the queue as the kernel accepts.

        `flush` sends the rest of the queue.

        Raises:
            WireClosed: The connection is lost.
        """
        self.queue(message)
        self.flush()

    def flush(self) -> None:
        """Sends as much of the unsent messages as the kernel accepts.

        Raises:
            WireClosed: The connection is lost.
        """
        try:
            while self._unsent:
                sent = self._socket.send(
                    memoryview(self._unsent[0])[self._first_sent_bytes :]
                )
                self._first_sent_bytes += sent
                self.unsent_bytes -= sent
                if self._first_sent_bytes == len(self._unsent[0]):
                    self._unsent.popleft()
                    self._first_sent_bytes = 0
        except BlockingIOError:
            return
        except OSError as error:
            raise WireClosed(str(error)) from error

    def receive(self) -> list[bytes]:
        """Returns the complete messages that have arrived.

        At most `read_bytes` bytes are read from the socket.

        Raises:
            WireClosed: The connection is lost, or a message is too long. Earlier calls
                have returned all complete messages before the error.
        """
        self._read()
        messages = self._split_messages()
        if self._close_reason is not None and not messages:
            raise WireClosed(self._close_reason)
        return messages

    def has_ended(self) -> bool:
        """Returns whether the connection has ended, and no received data is unread."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def shut_down(self, how: int) -> None:
        """Ends a direction of the connection, or both: socket.SHUT_WR, SHUT_RDWR."""
        with suppress(OSError):
            self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        remaining_bytes = self._read_bytes
        try:
            while self._close_reason is None and remaining_bytes > 0:
                part_bytes = min(remaining_bytes, _RECEIVE_BYTES)
                part = self._socket.recv(part_bytes)
                if not part:
                    self._close_reason = "the peer closed the connection"
                self._received += part
                remaining_bytes -= len(part)
                if len(part) < part_bytes:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._close_reason = str(error)

    def _split_messages(self) -> list[bytes]:
        """Removes the complete messages from the received bytes and returns them."""
        messages: list[bytes] = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if length > self.max_bytes:
                if messages:
                    break  # the caller may raise the limit when it gets `messages`
                self._close_reason = (
                    f"the peer sent a message of {length} bytes, the limit is "
                    f"{self.max_bytes}"
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
    """Sends unsent messages, returns the messages that have arrived, and calls
    `update_selector`.

    Raises:
        WireClosed: See Wire.receive.
    """
    with suppress(WireClosed):
        wire.flush()
    messages = wire.receive()
    update_selector(selector, wire)
    return messages


def update_selector(selector: BaseSelector, wire: Wire) -> None:
    """Makes the selector watch a registered wire for reading, and also for writing if
    the wire has unsent messages.
    """
    events = EVENT_READ | (EVENT_WRITE if wire.has_unsent else 0)
    selector.modify(wire, events, selector.get_key(wire).data)


def framed(message: bytes) -> bytes:
    """Returns a message with its length in front, as a Wire sends it."""
    return _LENGTH.pack(len(message)) + message


def tune_socket(sock: socket.socket) -> None:
    """Makes a TCP socket send data without delay, and detect within seconds that the
    peer's host is gone.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock, idle_s=2, interval_s=2, timeout_s=6)


def keep_alive(
    sock: socket.socket, *, idle_s: int, interval_s: int, timeout_s: float | None = None
) -> None:
    """Makes the kernel end a connection if its peer is gone.

    The kernel probes a peer that was silent for `idle_s` up to three times, at
    intervals of `interval_s`. If the peer answers no probe, the kernel ends the
    connection.

    Args:
        timeout_s: The kernel also ends the connection if the peer acknowledges or
            accepts no data for this long. None: the system's default.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if timeout_s is not None:
        timeout_ms = max(1, round(timeout_s * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def nap_if_short(timeout_s: float) -> float:
    """Sleeps for a timeout below 1 ms, which a poll would round up to 1 ms.

    Returns:
        The timeout for the poll that follows: 0 if `timeout_s` is below 1 ms, else
        `timeout_s`.
    """
    if timeout_s >= 0.001:
        return timeout_s
    if timeout_s > 0:
        time.sleep(timeout_s)
    return 0.0


def allow_short_naps() -> None:
    """Reduces the timer slack of the calling thread from Linux's 50 us to 1 us.

    The slack then delays the end of a sleep by at most 1 us.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


class Waker:
    """Wakes a polling thread: `wake` makes `fileno` readable until `clear` is called.

    Any thread may call `wake`; the polling thread calls `clear`.
    """

    def __init__(self) -> None:
        # The lock protects `_fd`: after `close`, a different file may get this number.
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
        """Closes the descriptor. While the polling thread runs, only this thread may
        call the method.
        """
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class CannotListen(OSError):
    """A socket cannot listen. The message has the address, the reason and the fix.

    Args:
        port_option: The option to change if the port is at fault. Otherwise the message
            names --host.
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
    """Returns a socket that is bound to a TCP port.

    Args:
        host: A host name or an IP address. An IPv4 address of the name is preferred.
        port: 0: a free port.
        port_option: The option that sets the port, for the error message.

    Raises:
        CannotListen: The name is unknown, the address is not one of this machine's, or
            the port cannot be used.
    """
    sock: socket.socket | None = None
    try:
        kind = socket.SOCK_STREAM
        addresses = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)
        # Take an IPv4 address if there is one, else the first address.
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
    """Returns a non-blocking socket that listens. Arguments and errors: see `bind`."""
    sock = bind(host, port, port_option)
    sock.listen(512)
    sock.setblocking(False)
    return sock
