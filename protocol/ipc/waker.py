"""Waking a thread that blocks in a poll, from any other thread."""

import os
import threading


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
