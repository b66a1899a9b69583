"""Standard streams that never block the program that writes to them.

    print, log lines --> bounded queue --> one thread per file --> stdout, stderr

A pipe or terminal that is not read blocks its writers once the kernel's buffer is full
(64 KiB for a pipe). Here only the thread blocks. A full queue drops lines, counts them
and keeps the newest ones. When writing works again, the number of dropped lines and the
newest ones follow.

Output that C libraries write to the file descriptors does not pass through the queue.
"""

import atexit
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TextIO

MAX_QUEUED_BYTES: Final = 1 << 20
MAX_LAST_TEXTS: Final = 40  # newest dropped texts that are kept
FLUSH_TIMEOUT_S: Final = 1.0
_BATCH_BYTES: Final = 4096  # PIPE_BUF: writes up to this size are atomic on a pipe

Describe = Callable[[int], str]  # returns the line that reports dropped lines


class OutputQueue:
    """A queue of bytes for one file descriptor. Threads and signal handlers may
    write.
    """

    def __init__(
        self, fd: int, describe: Describe, *, max_queued_bytes: int = MAX_QUEUED_BYTES
    ) -> None:
        # Lines since the start, including those that a failed write lost.
        self.num_dropped = 0
        self._fd = fd
        self._describe = describe
        self._max_queued_bytes = max_queued_bytes
        # Reentrant, because a signal handler may write while its thread is in `put`.
        self._changed = threading.Condition(threading.RLock())
        self._texts: deque[bytes] = deque()
        self._num_bytes = 0  # in `_texts` and in the batch that is being written
        self._is_full = False
        self._num_unreported = 0
        self._last_texts: deque[bytes] = deque(maxlen=MAX_LAST_TEXTS)
        threading.Thread(target=self._run, name=f"output-{fd}", daemon=True).start()

    def put(self, text: bytes) -> None:
        """Queues complete lines. It never waits for the file."""
        with self._changed:
            is_too_much = self._num_bytes + len(text) > self._max_queued_bytes
            if self._is_full or (self._num_bytes and is_too_much):
                self._is_full = True
                self._drop(text)
            else:
                self._append(text)

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Waits until everything is written, including the newest dropped lines.

        Returns:
            False if it was not after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._report_dropped()
            while self._num_bytes:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return False
                self._changed.wait(remaining_s)
        return True

    def _append(self, text: bytes) -> None:
        self._num_bytes += len(text)
        self._texts.append(text)
        self._changed.notify_all()

    def _drop(self, text: bytes) -> None:
        if len(self._last_texts) == MAX_LAST_TEXTS:
            self._count_dropped(self._last_texts[0])
        self._last_texts.append(text[-_BATCH_BYTES:])

    def _count_dropped(self, text: bytes) -> None:
        num_lines = max(1, text.count(b"\n"))
        self.num_dropped += num_lines
        self._num_unreported += num_lines

    def _report_dropped(self) -> None:
        """Queues the number of dropped lines and the newest of them."""
        self._is_full = False
        if self._num_unreported:
            num_lines = self._num_unreported
            self._num_unreported = 0
            self._append(f"{self._describe(num_lines)}\n".encode())
        while self._last_texts:
            self._append(self._last_texts.popleft())

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._texts:
                    self._changed.wait()
                batch = self._next_batch()
            written = self._write(batch)
            with self._changed:
                self._num_bytes -= len(batch)
                if written < len(batch):
                    self._count_dropped(batch[written:])
                if self._num_bytes <= self._max_queued_bytes // 2:
                    self._is_full = False
                    if written == len(batch):
                        self._report_dropped()
                self._changed.notify_all()

    def _next_batch(self) -> bytes:
        """Removes as many texts as one write takes in one piece, at least one."""
        parts = [self._texts.popleft()]
        num_bytes = len(parts[0])
        while self._texts and num_bytes + len(self._texts[0]) <= _BATCH_BYTES:
            parts.append(self._texts.popleft())
            num_bytes += len(parts[-1])
        return b"".join(parts)

    def _write(self, text: bytes) -> int:
        """Returns the number of bytes written: all, unless the file failed.

        A full disk or a closed pipe makes it fail.
        """
        written = 0
        while written < len(text):
            try:
                written += os.write(self._fd, text[written:])
            except BlockingIOError:
                # Another process has made the file, which we share, non-blocking.
                select.select([], [self._fd], [])
            except OSError:
                break
        return written


class QueuedStream(io.TextIOBase):
    """A text stream whose lines go to an OutputQueue.

    An incomplete line stays with the thread that writes it until its end or `flush`.
    Therefore the lines of several threads do not mix.
    """

    def __init__(self, stream: TextIO, queue: OutputQueue) -> None:
        self._stream = stream
        self._queue = queue
        self._unfinished = threading.local()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        """Queues the lines that `text` completes. Returns the length of `text`."""
        unfinished: str = getattr(self._unfinished, "text", "")
        lines, newline, rest = (unfinished + text).rpartition("\n")
        self._unfinished.text = rest
        if newline:
            self._put(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Queues the incomplete line of this thread. It does not wait."""
        unfinished: str = getattr(self._unfinished, "text", "")
        self._unfinished.text = ""
        if unfinished:
            self._put(unfinished)

    def _put(self, text: str) -> None:
        self._queue.put(text.encode(errors="backslashreplace"))


_queues: list[OutputQueue] = []  # of this process


def queue_standard_streams(describe: Describe) -> None:
    """Makes `sys.stdout` and `sys.stderr` non-blocking. Idempotent.

    Streams that are not Python's own, such as those of a test, stay as they are.

    Args:
        describe: Returns the line that reports a number of dropped lines.
    """
    if _queues:
        return
    # stdout and stderr share a queue if they are one file, which keeps their order.
    by_file: dict[tuple[int, int], OutputQueue] = {}
    for name in ("stdout", "stderr"):
        stream: TextIO = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        status = os.fstat(stream.fileno())
        file = (status.st_dev, status.st_ino)
        if file not in by_file:
            by_file[file] = OutputQueue(stream.fileno(), describe)
        setattr(sys, name, QueuedStream(stream, by_file[file]))
    _queues.extend(by_file.values())
    atexit.register(flush_output)


def flush_output(timeout_s: float = FLUSH_TIMEOUT_S) -> None:
    """Waits up to `timeout_s` seconds per standard stream until everything is written.

    A process that ends without Python's own shutdown calls it first.
    """
    for queue in _queues:
        queue.flush(timeout_s)


def num_dropped_lines() -> int:
    """Returns the number of lines that this process has dropped since its start."""
    return sum(queue.num_dropped for queue in _queues)
