"""Cached blocks that eviction has passed over because of their pins."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

# A heap of pins is rebuilt without its stale entries if it has more entries than this
# number, and more than two entries per block.
MIN_REBUILD = 64


class Pin:
    """The pin that one call of SoftPins.pin has given to some blocks.

    Attributes:
        blocks: The blocks that still have this pin.
        spared: The blocks of this pin that eviction has passed over, in the order in
            which that happened. After the end of the pin, a block stays in `spared`
            until the block is used or evicted.
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
        """True if this pin ends earlier, or at the same time but is the older pin."""
        return (self.expires_at_s, self.number) < (other.expires_at_s, other.number)


class SparedBlocks:
    """Blocks that eviction has passed over, in the order in which their pins end.

    The heap has one entry per pin. The entry of a pin without spared blocks is stale. A
    stale entry stays until it reaches the head of the heap, or the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._pins: dict[int, Pin] = {}  # the pins by block id
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
