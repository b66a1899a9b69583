"""The simulated clock, and what happens at which time."""

import heapq
import itertools
from collections.abc import Callable


class Events:
    """Events in order of time.

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
        """Run all events, and those that they schedule."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
