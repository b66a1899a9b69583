"""A limit on the silence of others that does not count against them when this process is late."""

import asyncio
from collections.abc import Callable

_PARTS = 4


class Countdown:
    """Calls back when `timeout_s` are over, unless cancelled before.

    After the process was stopped, or a long turn of its event loop, a timer is due before anybody
    has looked whether the answer came meanwhile. So the time is over after a number of parts of it,
    between any two of which the loop has looked; a last part that was late is repeated once.
    """

    __slots__ = ("_callback", "_left", "_loop", "_part_s", "_timer")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, timeout_s: float, callback: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._part_s = timeout_s / _PARTS
        self._callback = callback
        self._left = _PARTS
        self._timer = loop.call_later(self._part_s, self._part_is_over)

    def cancel(self) -> None:
        self._timer.cancel()

    def _part_is_over(self) -> None:
        self._left -= 1
        is_late = self._loop.time() > self._timer.when() + self._part_s
        if self._left > 0 or (self._left == 0 and is_late):
            self._timer = self._loop.call_later(self._part_s, self._part_is_over)
        else:
            self._callback()
