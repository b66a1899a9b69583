"""Whether a rank's engine is computing.

The engine's thread sets this; the rank's transfer thread reads it. A pull concurrent
with a running batch takes only the bandwidth that the batch can spare. A pull into an
idle engine takes all of it.
"""

import time
from collections.abc import Callable

# Decode steps follow one another every 4 to 20 ms. Between two of them the engine is
# not idle, although the last step has ended.
_RECENT_S = 0.025


class StepWatch:
    """The state of one rank; the engine's thread calls `launching` and `launched`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_s = float("-inf")
        self._has_ended: Callable[[], bool] = lambda: True

    def launching(self) -> None:
        """Records that a step is about to begin."""
        self._last_s = self._clock()

    def launched(self, has_ended: Callable[[], bool]) -> None:
        """Records that a step has begun. Any thread may call `has_ended`."""
        self._has_ended = has_ended

    @property
    def busy(self) -> bool:
        """Whether a step runs, or is likely to follow the last one soon."""
        return self._clock() < self._last_s + _RECENT_S or not self._has_ended()
