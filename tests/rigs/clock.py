"""A clock that tests can move forward, stop and continue."""

import time


class Clock:
    """The monotonic clock plus the seconds that a test has skipped.

    A test waits until an event has happened, and only then skips to the end of a time
    limit. So the limit cannot end before the event, even on a slow machine.
    """

    def __init__(self) -> None:
        self._skipped_s = 0.0
        self._stopped_at_s: float | None = None

    def __call__(self) -> float:
        return (self._stopped_at_s or time.monotonic()) + self._skipped_s

    def set_stopped(self, is_stopped: bool) -> None:
        """Stop the clock, or let it continue.

        No time limit ends while the clock is stopped. When it continues, it jumps ahead
        by the time for which it was stopped.
        """
        self._stopped_at_s = time.monotonic() if is_stopped else None

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds
