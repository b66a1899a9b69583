"""Waking a thread that blocks in a poll: at once, from any other thread, or at a time."""

import ctypes
import os
import threading
import time

_libc = ctypes.PyDLL(None, use_errno=True)  # these calls take a microsecond


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """`set` from any thread makes `fileno` readable after a while; the polling thread then calls
    `clear`. Until then the polling thread is not woken (timerfd; Python has it from 3.13 on)."""

    def __init__(self) -> None:
        self._spec = _TimerSpec()
        self._fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def fileno(self) -> int:
        return self._fd

    def set(self, wait_s: float) -> None:
        """In so many seconds, instead of what was set before; infinity for never. One thread at a
        time."""
        nanoseconds = 0 if wait_s == float("inf") else max(1, int(wait_s * 1e9))
        value = self._spec.value
        value.seconds, value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        if _libc.timerfd_settime(self._fd, 0, ctypes.byref(self._spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            pass  # it is not time, or was set anew

    def close(self) -> None:
        os.close(self._fd)


class Waker:
    """`wake` from any thread makes `fileno` readable; the polling thread then calls `clear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a closed descriptor's number may already be another's
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
