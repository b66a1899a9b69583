"""Runs the preparation of requests on threads, so that no stream and no health check waits for it.

    run          tokenizing: the library computes without the GIL, so several threads are useful
    run_python   parsing, rendering: Python code, of which many threads would starve the event loop
    either one   very long texts, one at a time: tokenizing takes hundreds of times their memory

Work waits for its turn on the event loop, not in a thread. The work of a request whose client has
gone leaves the line at once. A thread cannot be interrupted: work that has begun ends at its next
call of `check_wanted`, and counts as running until then.
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

INLINE_CHARS = 2048  # shorter texts are worked on at once: a thread would take longer
LONG_CHARS = 1 << 20  # longer texts are worked on one at a time
MAX_WAITING_CHARS = 1 << 26  # of all texts that wait for a thread or have one
_NUM_PYTHON = (
    2  # each of these threads may hold the GIL for 5 ms before the event loop gets it
)
_MIN_TOKENIZING = (
    4  # threads, however few cores there are: long texts let short ones pass
)
_MAX_TOKENIZING = 16

_T = TypeVar("_T")


class WorkAbandoned(Exception):
    """The client that wanted this work has gone. Raised in the thread of the work only."""


_abandoned = contextvars.ContextVar[threading.Event | None]("abandoned", default=None)


def check_wanted() -> None:
    """Raises WorkAbandoned in a thread whose work nobody waits for any more. Long work calls it
    between its steps."""
    event = _abandoned.get()
    if event is not None and event.is_set():
        raise WorkAbandoned


class TextWorkers:
    """The threads of one application. For one event loop."""

    def __init__(self) -> None:
        num_tokenizing = max(_MIN_TOKENIZING, min(available_cores(), _MAX_TOKENIZING))
        self._tokenizing = asyncio.Semaphore(num_tokenizing)
        self._python = asyncio.Semaphore(_NUM_PYTHON)
        self._long = asyncio.Semaphore(1)
        num_threads = num_tokenizing + _NUM_PYTHON + 1
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._num_chars = 0  # waiting or being worked on

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """The result of work that takes as much as tokenizing `size` characters. Raises QueueFull
        where too much of that waits already."""
        return await self._run(size, work, self._tokenizing)

    async def run_python(self, size: int, work: Callable[[], _T]) -> _T:
        """The same for work that is mostly Python code."""
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
            running.exception()  # marks it as seen: the client may have gone
