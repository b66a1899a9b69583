"""A clock that tests can skip and stop."""

import time


class Clock:
    """Real time plus the time that a test has skipped.

    A test waits until an event has happened, and then skips to the end of a time limit.
    So a slow machine does not reach the limit before the event.
    """

    def __init__(self) -> None:
        self._skipped_s = 0.0
        self._stopped_at_s: float | None = None

    def __call__(self) -> float:
        return (self._stopped_at_s or time.monotonic()) + self._skipped_s

    def stand(self, still: bool) -> None:
        """Stop the clock, or let it continue. No limit ends while it is stopped."""
        self._stopped_at_s = time.monotonic() if still else None

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds
