"""State that several threads work on in turns, and a thread that takes the turns nobody else does.

Whoever has something to say takes a turn in its own thread, under a lock that is held for
microseconds: waking another thread takes longer than most turns. The thread here waits for timers
and sockets.
"""

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvcache.transfer.waker import Alarm, Waker
from kvcache.transfer.wire import HasFileno
from protocol.vital_threads import VitalThread


class Turns:
    """Calls `turn` under the lock, and each of `after` when it is released.

    Args:
        sources: what a turn shall follow on becoming readable; a turn makes them unreadable.
        turn: all that there may be to do, but for calls; must not raise.
        failed: follows on a call that raised.
        deadline: when a turn is due, whatever comes; infinity for never. Called under the lock.
        clock: of the deadline.
    """

    def __init__(
        self,
        name: str,
        sources: Iterable[HasFileno],
        *,
        turn: Callable[[], None],
        failed: Callable[[], None],
        after: Iterable[Callable[[], None]],
        deadline: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turn, self._failed, self._after = turn, failed, tuple(after)
        self._deadline, self._clock = deadline, clock
        self._waker, self._alarm = Waker(), Alarm()
        self._epoll = select.epoll()
        watched: list[HasFileno] = [self._waker, self._alarm, *sources]
        for source in watched:
            self._epoll.register(source.fileno(), select.EPOLLIN)
        self._calls: deque[Callable[[], bool | None]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._wakes_at = 0.0  # when the alarm wakes the thread
        self._stopping = threading.Event()
        self._thread = VitalThread(self._run, name)

    def start(self) -> None:
        self._thread.start()

    def call(self, call: Callable[[], bool | None]) -> None:
        """Makes this and all earlier calls, in order; takes a turn if one is due then. What sources
        say can wait for the thread here: who calls has a step to launch. Any thread.

        Args:
            call: may return True if nothing becomes due sooner by it.
        """
        self._calls.append(call)
        with self._lock:
            if self._closed:
                return
            is_later = self._obey()
        self._finish()  # a link may idle until then
        if not is_later:
            self._take_if_due()

    def _take_if_due(self) -> None:
        with self._lock:
            if self._closed:
                return
            due = self._deadline()
            if is_due := due <= self._clock():
                self._turn()
                due = self._deadline()
            is_called = self._ends_with(due)
        if is_due:
            self._finish()
        if is_called:
            self._waker.wake()

    def take(self, only_if: Callable[[], bool] = lambda: True) -> None:
        """A turn in the calling thread, unless closed; `only_if` is asked under the lock."""
        with self._lock:
            if self._closed or not only_if():
                return
            self._obey()
            self._turn()
            is_called = self._ends_with(self._deadline())
        self._finish()
        if is_called:
            self._waker.wake()

    def _ends_with(self, due: float) -> bool:
        """Lets the thread wake for the deadline, not before; whether a call is left to it."""
        if due < self._wakes_at:
            self._wakes_at = due
            self._alarm.set(due - self._clock())
        return bool(self._calls)

    def _finish(self) -> None:
        for each in self._after:
            each()

    def _obey(self) -> bool:
        """Whether nothing becomes due sooner by what was called."""
        is_later = True
        try:
            while self._calls:
                is_later = bool(self._calls.popleft()()) and is_later
        except Exception:
            self._failed()
            return False
        return is_later

    def close(self, last: Callable[[], None]) -> None:
        """Ends the thread and all turns; `last` is done under the lock."""
        self._stopping.set()
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last()
            self._epoll.close()
            self._waker.close()
            self._alarm.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                self._obey()
                self._turn()
                self._wakes_at = self._deadline()
                self._alarm.set(self._wakes_at - self._clock())
                is_called = bool(self._calls)
            self._finish()
            self._epoll.poll(0 if is_called else None)
            self._waker.clear()
            self._alarm.clear()
