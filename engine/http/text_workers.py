"""Prepares requests on threads, so that no stream or health check is delayed.

    run          tokenizing: the library releases the GIL, so several threads are
                 useful
    run_python   parsing, rendering: Python code; many threads would starve the event
                 loop
    both         very long texts run one at a time: tokenizing takes hundreds of times
                 their memory

Work waits for its turn on the event loop, not in a thread. Waiting work of a client
that disconnects leaves the queue at once. A thread cannot be interrupted: running work
ends at its next call of `check_wanted`, and counts as running until then.
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

INLINE_CHARS = 2048  # shorter texts run on the event loop, which is quicker
LONG_CHARS = 1 << 20  # longer texts run one at a time
MAX_WAITING_CHARS = 1 << 26  # of all texts that wait for a thread or have one
# Each of these threads may hold the GIL for 5 ms before the event loop gets it.
_NUM_PYTHON = 2
# Threads for tokenizing. The minimum, for few cores, lets short texts overtake long
# ones.
_MIN_TOKENIZING = 4
_MAX_TOKENIZING = 16

_T = TypeVar("_T")


class WorkAbandoned(Exception):
    """The client of this work has disconnected. Raised only in the work's thread."""


_abandoned = contextvars.ContextVar[threading.Event | None]("abandoned", default=None)


def check_wanted() -> None:
    """Raise WorkAbandoned in a thread whose client has disconnected.

    Long work calls it between its steps.
    """
    event = _abandoned.get()
    if event is not None and event.is_set():
        raise WorkAbandoned


class TextWorkers:
    """The threads of one application, for one event loop."""

    def __init__(self) -> None:
        num_tokenizing = max(_MIN_TOKENIZING, min(available_cores(), _MAX_TOKENIZING))
        self._tokenizing = asyncio.Semaphore(num_tokenizing)
        self._python = asyncio.Semaphore(_NUM_PYTHON)
        self._long = asyncio.Semaphore(1)
        num_threads = num_tokenizing + _NUM_PYTHON + 1
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._num_chars = 0  # of texts that wait or are worked on

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Return the result of work.

        Args:
            size: the work takes as long as to tokenize so many characters.

        Raises:
            QueueFull: too much work waits already.
        """
        return await self._run(size, work, self._tokenizing)

    async def run_python(self, size: int, work: Callable[[], _T]) -> _T:
        """Like `run`, for work that is mostly Python code."""
        return await self._run(size, work, self._python)

    async def _run(
        self, size: int, work: Callable[[], _T], lane: asyncio.Semaphore
    ) -> _T:
        if size <= INLINE_CHARS:
            return work()
        if self._num_chars and self._num_chars + size > MAX_WAITING_CHARS:
            raise QueueFull(
                f"texts of {self._num_chars} characters wait already; try again soon"
            )
        if size > LONG_CHARS:
            lane = self._long
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
        context = contextvars.copy_context()
        context.run(_abandoned.set, abandoned)
        return context

    def _release(
        self, lane: asyncio.Semaphore, size: int, running: "asyncio.Future[Any]"
    ) -> None:
        lane.release()
        self._num_chars -= size
        if not running.cancelled():
            # Marks the exception as retrieved: the client may have disconnected.
            running.exception()
