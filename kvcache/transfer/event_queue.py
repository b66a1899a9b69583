"""What the coordinator has to tell its engine, counted on the way in."""

from collections import Counter, deque
from collections.abc import Callable

from kvcache.transfer.pull import Event, PullDone, PullDrained, PullFailed, PullStuck

_EVENT_COUNTERS: dict[type, str] = {
    PullDone: "pulls_done",
    PullFailed: "pulls_failed",
    PullStuck: "pulls_stuck",
    PullDrained: "pulls_drained",
}
_COUNTERS = (
    *_EVENT_COUNTERS.values(),
    "pulls",
    "cancelled",
    "bytes_pulled",
    "descriptors",
    "peer_restarts",
    "connections_lost",
    "refused",
    "internal_errors",
)


class EventQueue:
    """One thread at a time appends, any drains.

    Args:
        on_event: what `tell` calls when there is something new.

    Attributes:
        counters: since the start; of pulls here, of the rest by the coordinator.
    """

    def __init__(self, on_event: Callable[[], None] | None = None) -> None:
        self._on_event = on_event
        self._events: deque[Event] = deque()
        self._untold = False
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))

    def append(self, event: Event) -> None:
        if name := _EVENT_COUNTERS.get(type(event)):
            self.counters[name] += 1
        if isinstance(event, PullDone):
            self.counters["bytes_pulled"] += event.nbytes
            self.counters["descriptors"] += event.descriptors
        self._events.append(event)
        self._untold = True

    def tell(self) -> None:
        """Lets the engine know of events that came since it was told last."""
        if self._untold:
            self._untold = False
            if self._on_event is not None:
                self._on_event()

    def drain(self) -> list[Event]:
        """Events since the last call, in order."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events
