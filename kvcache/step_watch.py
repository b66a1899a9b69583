"""Whether a rank's engine is computing: set by its engine's thread, read by its transfer thread.

A pull beside a running batch takes the bandwidth that the batch can spare; a pull into an idle
engine takes all of it.
"""

import time
from collections.abc import Callable

# Decode steps follow one another at a distance of 4 to 20 ms: between two of them the engine is
# not idle, though the last one has ended.
_RECENT_S = 0.025


class StepWatch:
    """One rank's; `launching` and `launched` belong to the engine's thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_s = float("-inf")
        self._has_ended: Callable[[], bool] = lambda: True

    def launching(self) -> None:
        """A step is about to begin."""
        self._last_s = self._clock()

    def launched(self, has_ended: Callable[[], bool]) -> None:
        """It has begun; `has_ended` is asked by any thread."""
        self._has_ended = has_ended

    @property
    def busy(self) -> bool:
        """A step runs, or another one is likely to follow the last."""
        return self._clock() < self._last_s + _RECENT_S or not self._has_ended()
