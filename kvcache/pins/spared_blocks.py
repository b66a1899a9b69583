"""Cached blocks that eviction has passed over because of their pins."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

# The heap is rebuilt if it has more than twice as many entries as there are blocks, but
# not while it has fewer entries than this.
MIN_REBUILD = 64


class Pin:
    """What one call has pinned.

    Attributes:
        blocks: The blocks that still have this pin.
        spared: The blocks of this pin that eviction has passed over, in that order. A
            block stays here when its pin has ended, until it is used or evicted.
        is_queued: Whether the heap of SparedBlocks has an entry for this pin.
    """

    __slots__ = ("blocks", "expires_at_s", "is_queued", "number", "owner", "spared")

    def __init__(self, owner: str, expires_at_s: float, number: int) -> None:
        self.owner = owner
        self.expires_at_s = expires_at_s
        self.number = number
        self.blocks: set[int] = set()
        self.spared: dict[int, None] = {}
        self.is_queued = False

    def __lt__(self, other: "Pin") -> bool:
        """Whether this pin ends first; of two with the same end, the older one."""
        return (self.expires_at_s, self.number) < (other.expires_at_s, other.number)


class SparedBlocks:
    """Blocks in the order in which their pins end.

    The heap has one entry per pin. The entry of a pin without spared blocks is stale;
    it stays until it reaches the head or the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._pins: dict[int, Pin] = {}  # by block
        self._heap: list[Pin] = []

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pins)

    def __contains__(self, block: int) -> bool:
        return block in self._pins

    def pin_of(self, block: int) -> Pin:
        """The pin that a block had when eviction passed over it."""
        return self._pins[block]

    def add(self, block: int, pin: Pin) -> None:
        self._pins[block] = pin
        pin.spared[block] = None
        if not pin.is_queued:
            pin.is_queued = True
            heappush(self._heap, pin)
            self._rebuild_if_stale()

    def remove(self, block: int) -> None:
        del self._pins.pop(block).spared[block]

    def first(self) -> int | None:
        """The block whose pin ends first; None if there is no block."""
        while self._heap:
            pin = self._heap[0]
            if pin.spared:
                return next(iter(pin.spared))
            heappop(self._heap).is_queued = False
        return None

    def _rebuild_if_stale(self) -> None:
        if len(self._heap) <= max(MIN_REBUILD, 2 * len(self._pins)):
            return
        for pin in self._heap:
            pin.is_queued = bool(pin.spared)
        self._heap = [pin for pin in self._heap if pin.is_queued]
        heapify(self._heap)
