"""Shows a rank's transfer thread whether the engine computes a batch on the rank.

The engine's thread records its steps in a StepWatch. While a batch runs, a pull limits
its use of memory bandwidth, because the batch needs the bandwidth. While the engine is
idle, there is no limit.
"""

import time
from collections.abc import Callable

# For this long after a step has begun, the engine counts as busy. Decode steps begin
# every 4 to 20 ms, and between two steps the engine is not idle, although no step runs.
_RECENT_S = 0.025


class StepWatch:
    """The latest step of one rank.

    Only the engine's thread calls `launching` and `launched`. Any thread may read
    `is_busy`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_launch_s = float("-inf")
        self._has_ended: Callable[[], bool] = lambda: True

    def launching(self) -> None:
        """Records that a step is about to begin."""
        self._last_launch_s = self._clock()

    def launched(self, has_ended: Callable[[], bool]) -> None:
        """Records that a step has begun.

        Args:
            has_ended: Returns True once the step has ended. Any thread may call it.
        """
        self._has_ended = has_ended

    @property
    def is_busy(self) -> bool:
        """Whether a step runs, or has begun within the last _RECENT_S."""
        is_recent = self._clock() < self._last_launch_s + _RECENT_S
        return is_recent or not self._has_ended()
