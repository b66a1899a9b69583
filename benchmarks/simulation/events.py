"""The simulated clock, and the events that are scheduled."""

import heapq
import itertools
from collections.abc import Callable


class Events:
    """Runs scheduled events in the order of their times.

    Attributes:
        now: the simulated time in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        # Events at the same time happen in the order in which they were scheduled.
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def schedule(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def run(self) -> None:
        """Run all scheduled events, including those that other events schedule."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
