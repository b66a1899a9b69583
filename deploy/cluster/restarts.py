"""Decides whether and when a part of the cluster is restarted after it has ended."""

import time
from collections import deque
from collections.abc import Callable

MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0


class RestartBudget:
    """The restarts of one part within a sliding window.

    Args:
        max_restarts: Maximum number of restarts within the window.
        window_s: Length of the window in seconds.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        max_restarts: int,
        window_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._clock = clock
        self._restarted_at: deque[float] = deque(maxlen=max_restarts)

    @property
    def num_restarts(self) -> int:
        """Number of restarts within the window."""
        start = self._clock() - self.window_s
        while self._restarted_at and self._restarted_at[0] <= start:
            self._restarted_at.popleft()
        return len(self._restarted_at)

    def take(self) -> float | None:
        """Counts a restart, and returns the seconds to wait before it.

        The wait doubles with each restart within the window, up to MAX_BACKOFF_S. The
        result is None if there were `max_restarts` restarts within the window.
        """
        num_restarts = self.num_restarts
        if num_restarts >= self.max_restarts:
            return None
        self._restarted_at.append(self._clock())
        # The exponent is bounded, because max_restarts may be large.
        return min(MIN_BACKOFF_S * 2.0 ** min(num_restarts, 10), MAX_BACKOFF_S)
