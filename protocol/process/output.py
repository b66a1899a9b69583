"""Standard streams that never block the program that writes to them.

    print, log lines --> bounded queue --> one thread per file --> stdout, stderr

If nothing reads a pipe or a terminal, its writers block as soon as the kernel's buffer
is full (64 KiB for a pipe). With this module, only the writing thread blocks. While the
queue is full, new lines go to a second, short queue, which drops and counts its oldest
lines. When half of the queue has been written, a line with the number of dropped lines
is added, followed by the lines of the second queue.

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
MAX_LAST_TEXTS: Final = 40  # maximum number of texts in the second queue
FLUSH_TIMEOUT_S: Final = 1.0
_BATCH_BYTES: Final = 4096  # PIPE_BUF: writes up to this size are atomic on a pipe

# Returns the line that reports a number of dropped lines.
DescribeDropped = Callable[[int], str]
WrapLine = Callable[[str], str]  # converts a line before it is written


class OutputQueue:
    """A queue of output for one file descriptor, with a thread that writes it.

    Any thread and any signal handler may call `put`.

    Args:
        describe: Returns the line that reports a number of dropped lines.
        max_queued_bytes: Limit on the queue. A single longer text is accepted if the
            queue is empty.
    """

    def __init__(
        self,
        fd: int,
        describe: DescribeDropped,
        *,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        # Number of lines dropped since the start, including lines in failed writes.
        self.num_dropped = 0
        self._fd = fd
        self._describe = describe
        self._max_queued_bytes = max_queued_bytes
        # Reentrant, because a signal handler may interrupt `put` and call it again.
        self._changed = threading.Condition(threading.RLock())
        self._texts: deque[bytes] = deque()
        self._num_bytes = 0  # bytes in `_texts` and in the batch that is being written
        # Set when a text does not fit. New texts then go to `_last_texts` until the
        # queue is half empty or is flushed.
        self._is_full = False
        self._num_unreported = 0  # lines dropped since the last report of dropped lines
        # The newest texts that did not fit into the queue.
        self._last_texts: deque[bytes] = deque(maxlen=MAX_LAST_TEXTS)
        threading.Thread(target=self._run, name=f"output-{fd}", daemon=True).start()

    def put(self, text: bytes) -> None:
        """Queues a text, or keeps it in `_last_texts`. Does not wait for the file."""
        with self._changed:
            is_too_long = self._num_bytes + len(text) > self._max_queued_bytes
            if self._is_full or (self._num_bytes and is_too_long):
                self._is_full = True
                self._keep_last(text)
            else:
                self._append(text)

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Waits until the queue is written, including the texts in `_last_texts`.

        Returns:
            False if the queue was not empty after `timeout_s` seconds.
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

    def _keep_last(self, text: bytes) -> None:
        """Keeps the last _BATCH_BYTES of a text that did not fit into the queue.

        If MAX_LAST_TEXTS texts are kept already, the oldest of them is dropped.
        """
        if len(self._last_texts) == MAX_LAST_TEXTS:
            self._count_dropped(self._last_texts[0])
        self._last_texts.append(text[-_BATCH_BYTES:])

    def _count_dropped(self, text: bytes) -> None:
        num_lines = max(1, text.count(b"\n"))
        self.num_dropped += num_lines
        self._num_unreported += num_lines

    def _report_dropped(self) -> None:
        """Queues a line with the number of dropped lines, if any, and the kept texts.

        From now on, the queue accepts new texts again.
        """
        self._is_full = False
        if self._num_unreported:
            num_lines = self._num_unreported
            self._num_unreported = 0
            self._append(f"{self._describe(num_lines)}\n".encode())
        while self._last_texts:
            self._append(self._last_texts.popleft())

    def _run(self) -> None:
        """Writes the queue, in the queue's own thread."""
        while True:
            with self._changed:
                while not self._texts:
                    self._changed.wait()
                batch = self._next_batch()
            num_written = self._write(batch)
            with self._changed:
                self._num_bytes -= len(batch)
                if num_written < len(batch):
                    self._count_dropped(batch[num_written:])
                if self._num_bytes <= self._max_queued_bytes // 2:
                    self._is_full = False
                    if num_written == len(batch):
                        self._report_dropped()
                self._changed.notify_all()

    def _next_batch(self) -> bytes:
        """Removes and joins texts, up to _BATCH_BYTES, but at least one text."""
        parts = [self._texts.popleft()]
        num_bytes = len(parts[0])
        while self._texts and num_bytes + len(self._texts[0]) <= _BATCH_BYTES:
            parts.append(self._texts.popleft())
            num_bytes += len(parts[-1])
        return b"".join(parts)

    def _write(self, text: bytes) -> int:
        """Writes `text`, and returns the number of bytes written.

        The number is smaller than the length of `text` if the file fails, for example
        because the disk is full or the pipe is closed.
        """
        num_written = 0
        while num_written < len(text):
            try:
                num_written += os.write(self._fd, text[num_written:])
            except BlockingIOError:
                # Another process shares the file and has made it non-blocking.
                select.select([], [self._fd], [])
            except OSError:
                break
        return num_written


class QueuedStream(io.TextIOBase):
    """A text stream that writes its lines to an OutputQueue.

    An incomplete line is stored per thread, until the thread completes the line or
    calls `flush`. Therefore the lines of several threads do not mix.

    Args:
        wrap_line: Converts each line before it is written. With this argument, `flush`
            also ends an incomplete line with a newline.
    """

    def __init__(
        self, stream: TextIO, queue: OutputQueue, wrap_line: WrapLine | None = None
    ) -> None:
        self._stream = stream
        self._queue = queue
        self._wrap_line = wrap_line
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
        """Queues the incomplete line of this thread, without waiting for the file."""
        unfinished: str = getattr(self._unfinished, "text", "")
        self._unfinished.text = ""
        if unfinished:
            self._put(unfinished)

    def _put(self, text: str) -> None:
        if self._wrap_line is not None:
            lines = map(self._wrap_line, text.splitlines())
            text = "".join(f"{line}\n" for line in lines)
        self._queue.put(text.encode(errors="backslashreplace"))


_queues: list[OutputQueue] = []  # the queues of this process's standard streams


def queue_standard_streams(
    describe: DescribeDropped, wrap_line: WrapLine | None = None
) -> None:
    """Replaces `sys.stdout` and `sys.stderr` by QueuedStreams. Idempotent.

    A stream that was already replaced, for example by a test, stays as it is.

    Args:
        describe: Returns the line that reports a number of dropped lines.
        wrap_line: See QueuedStream.
    """
    if _queues:
        return
    # If stdout and stderr are the same file, they share a queue. This keeps the order
    # of their lines.
    queue_by_file: dict[tuple[int, int], OutputQueue] = {}
    for name in ("stdout", "stderr"):
        stream: TextIO = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        status = os.fstat(stream.fileno())
        file = (status.st_dev, status.st_ino)
        if file not in queue_by_file:
            queue_by_file[file] = OutputQueue(stream.fileno(), describe)
        setattr(sys, name, QueuedStream(stream, queue_by_file[file], wrap_line))
    _queues.extend(queue_by_file.values())
    atexit.register(flush_output)


def flush_output(timeout_s: float = FLUSH_TIMEOUT_S) -> None:
    """Waits until all output is written, up to `timeout_s` seconds per standard stream.

    A process that ends without Python's shutdown must call this function first.
    """
    for queue in _queues:
        queue.flush(timeout_s)


def num_dropped_lines() -> int:
    """Returns the number of lines that this process has dropped since its start."""
    return sum(queue.num_dropped for queue in _queues)
