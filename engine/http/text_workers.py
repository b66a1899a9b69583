"""Prepares requests in threads, so that the event loop's streams are not delayed.

    run          is for tokenizing. It has many threads, because the tokenizer library
                 releases the GIL.
    run_python   is for parsing and rendering. It has few threads, because this work is
                 Python code, and many threads would starve the event loop of the GIL.
    both         process very long texts one at a time, because tokenizing takes
                 hundreds of times the memory of the text.

Waiting work occupies no thread: it waits on the event loop. Waiting work is dropped at
once when its client disconnects. A thread cannot be interrupted, so running work stops
only when it calls `raise_if_abandoned`. Until then, it still occupies its thread.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from protocol.errors import QueueFull
from protocol.settings.machine import available_cores

# Texts of at most this length are processed on the event loop, which is quicker than
# handing them to a thread.
INLINE_CHARS = 2048
LONG_CHARS = 1 << 20  # texts above this length are processed one at a time
# Maximum number of characters in all waiting and running texts together.
MAX_WAITING_CHARS = 1 << 26
# Threads for Python code. Each may hold the GIL for 5 ms before the event loop gets it.
_NUM_PYTHON_THREADS = 2
# Threads for tokenizing: one for each core, within these limits. On a machine with few
# cores, the minimum lets short texts overtake long texts.
_MIN_TOKENIZING_THREADS = 4
_MAX_TOKENIZING_THREADS = 16

_T = TypeVar("_T")


class WorkAbandoned(Exception):
    """Raised in a worker thread when the client of the thread's work disconnected."""


_abandoned = contextvars.ContextVar[threading.Event | None]("abandoned", default=None)


def raise_if_abandoned() -> None:
    """Raise WorkAbandoned if the client of the current work has disconnected.

    Long work calls this function between its steps.
    """
    event = _abandoned.get()
    if event is not None and event.is_set():
        raise WorkAbandoned


class TextWorkers:
    """The threads that prepare the requests of one application, for one event loop."""

    def __init__(self) -> None:
        num_tokenizing = min(available_cores(), _MAX_TOKENIZING_THREADS)
        num_tokenizing = max(_MIN_TOKENIZING_THREADS, num_tokenizing)
        self._tokenizing_lane = asyncio.Semaphore(num_tokenizing)
        self._python_lane = asyncio.Semaphore(_NUM_PYTHON_THREADS)
        self._long_lane = asyncio.Semaphore(1)
        num_threads = num_tokenizing + _NUM_PYTHON_THREADS + 1
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._num_chars = 0  # the sum of the sizes of waiting and running work

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread, or on the event loop if it is small.

        Args:
            size: the estimated cost of the work, as the number of characters that could
                be tokenized in the same time.
            work: a function without arguments.

        Returns:
            The result of `work`.

        Raises:
            QueueFull: too much work is already waiting.
        """
        return await self._run(size, work, self._tokenizing_lane)

    async def run_python(self, size: int, work: Callable[[], _T]) -> _T:
        """Run `work`, which is mostly Python code. See `run`."""
        return await self._run(size, work, self._python_lane)

    async def _run(
        self, size: int, work: Callable[[], _T], lane: asyncio.Semaphore
    ) -> _T:
        if size <= INLINE_CHARS:
            return work()
        if self._num_chars and self._num_chars + size > MAX_WAITING_CHARS:
            raise QueueFull(
                f"texts with {self._num_chars} characters in all are already waiting "
                "to be tokenized; try again soon"
            )
        if size > LONG_CHARS:
            lane = self._long_lane
        self._num_chars += size
        try:
            await lane.acquire()
        except BaseException:
            self._num_chars -= size
            raise
        abandoned = threading.Event()
        running = asyncio.get_running_loop().run_in_executor(
            self._executor, partial(self._context(abandoned).run, work)
        )
        running.add_done_callback(partial(self._release, lane, size))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            abandoned.set()
            raise

    @staticmethod
    def _context(abandoned: threading.Event) -> contextvars.Context:
        """Return a context in which `raise_if_abandoned` checks `abandoned`."""
        context = contextvars.copy_context()
        context.run(_abandoned.set, abandoned)
        return context

    def _release(
        self, lane: asyncio.Semaphore, size: int, running: "asyncio.Future[Any]"
    ) -> None:
        lane.release()
        self._num_chars -= size
        if not running.cancelled():
            # Mark the exception as retrieved. If the client has disconnected, no task
            # retrieves it, and asyncio would log an error.
            running.exception()
