"""Standard streams that never block the program that writes to them.

    print, log lines --> bounded queue --> one thread per file --> stdout, stderr

A pipe or terminal that is not read stops its writers once the kernel's buffer is full (64 KiB of
a pipe). Here only the thread stops. A full queue drops lines, counts them, and keeps the newest
ones: these and the number of lines dropped follow as soon as writing works again.

Output that C libraries write to the descriptors themselves does not pass through the queue.
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
MAX_LAST_WORDS: Final = 40  # dropped texts that are kept, the newest ones
FLUSH_TIMEOUT_S: Final = 1.0
_BATCH_BYTES: Final = 4096  # PIPE_BUF: writes up to this size are atomic on a pipe

Describe = Callable[[int], str]  # makes the line that reports a number of dropped lines


class OutputQueue:
    """Bytes on their way to one file descriptor. Any thread may write; signal handlers, too."""

    def __init__(
        self, fd: int, describe: Describe, *, max_queued_bytes: int = MAX_QUEUED_BYTES
    ) -> None:
        self.num_dropped = (
            0  # lines since the start, those that a failed write lost included
        )
        self._fd = fd
        self._describe = describe
        self._max_queued_bytes = max_queued_bytes
        # Reentrant: a signal handler may write while its thread is in `put`.
        self._changed = threading.Condition(threading.RLock())
        self._texts: deque[bytes] = deque()
        self._num_bytes = 0  # of `_texts` and of what is being written
        self._is_full = False
        self._num_unreported = 0
        self._last_words: deque[bytes] = deque(maxlen=MAX_LAST_WORDS)
        threading.Thread(target=self._run, name=f"output-{fd}", daemon=True).start()

    def put(self, text: bytes) -> None:
        """Queues whole lines. Never waits for the file."""
        with self._changed:
            is_too_much = self._num_bytes + len(text) > self._max_queued_bytes
            if self._is_full or (self._num_bytes and is_too_much):
                self._is_full = True
                self._drop(text)
            else:
                self._append(text)

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Waits until all is written, the newest dropped lines included. Returns False if it was
        not after `timeout_s` seconds."""
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
        if len(self._last_words) == MAX_LAST_WORDS:
            self._count_dropped(self._last_words[0])
        self._last_words.append(text[-_BATCH_BYTES:])

    def _count_dropped(self, text: bytes) -> None:
        num_lines = max(1, text.count(b"\n"))
        self.num_dropped += num_lines
        self._num_unreported += num_lines

    def _report_dropped(self) -> None:
        """Queues the number of dropped lines and the newest of them, whatever is queued."""
        self._is_full = False
        if self._num_unreported:
            num_lines = self._num_unreported
            self._num_unreported = 0
            self._append(f"{self._describe(num_lines)}\n".encode())
        while self._last_words:
            self._append(self._last_words.popleft())

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
        """As many whole texts as are written in one piece, one at least."""
        parts = [self._texts.popleft()]
        num_bytes = len(parts[0])
        while self._texts and num_bytes + len(self._texts[0]) <= _BATCH_BYTES:
            parts.append(self._texts.popleft())
            num_bytes += len(parts[-1])
        return b"".join(parts)

    def _write(self, text: bytes) -> int:
        """How many bytes were written: all, unless the file failed (a full disk, a closed pipe)."""
        written = 0
        while written < len(text):
            try:
                written += os.write(self._fd, text[written:])
            except (
                BlockingIOError
            ):  # another process made the file that we share non-blocking
                select.select([], [self._fd], [])
            except OSError:
                break
        return written


class QueuedStream(io.TextIOBase):
    """A text stream whose lines go to an OutputQueue. A line that is not finished stays with the
    thread that writes it until its end or `flush`, so lines of several threads stay whole."""

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
        """Queues the lines that `text` completes. Returns the number of its characters."""
        begun: str = getattr(self._unfinished, "text", "")
        lines, newline, rest = (begun + text).rpartition("\n")
        self._unfinished.text = rest
        if newline:
            self._put(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Queues what this thread has written of a line. Does not wait: see `flush_output`."""
        begun: str = getattr(self._unfinished, "text", "")
        self._unfinished.text = ""
        if begun:
            self._put(begun)

    def _put(self, text: str) -> None:
        self._queue.put(text.encode(errors="backslashreplace"))


_queues: list[OutputQueue] = []  # of this process


def queue_standard_streams(describe: Describe) -> None:
    """From now on `sys.stdout` and `sys.stderr` do not block. Idempotent; streams that are not
    Python's own, such as a test's, are left as they are.

    Args:
        describe: returns the line that reports a number of dropped lines.
    """
    if _queues:
        return
    by_file: dict[
        tuple[int, int], OutputQueue
    ] = {}  # one for both: their order is kept
    for name in ("stdout", "stderr"):
        stream: TextIO = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        found = os.fstat(stream.fileno())
        file = (found.st_dev, found.st_ino)
        if file not in by_file:
            by_file[file] = OutputQueue(stream.fileno(), describe)
        setattr(sys, name, QueuedStream(stream, by_file[file]))
    _queues.extend(by_file.values())
    atexit.register(flush_output)


def flush_output(timeout_s: float = FLUSH_TIMEOUT_S) -> None:
    """Waits for each standard stream until all is written, for `timeout_s` seconds at most. To be
    called before a process ends without Python's own end."""
    for queue in _queues:
        queue.flush(timeout_s)


def num_dropped_lines() -> int:
    """Lines of this process that were dropped since its start."""
    return sum(queue.num_dropped for queue in _queues)
