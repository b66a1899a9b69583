"""Soft pins: until its pin ends, a cached block is evicted later than unpinned blocks.

A pin is no promise. Blocks without a pin are evicted first; if only pinned blocks are
left, the pin that ends first loses its blocks (kvcache/blocks.py). A pin belongs to an
owner, such as an API key. One owner may pin at most OWNER_SHARE of the pool, so that no
client can take the cache from all others.

No timer ends a pin. Expired pins are removed before blocks are pinned or evicted, and
before pins are counted.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from kvcache.pins.spared_blocks import MIN_REBUILD, Pin

OWNER_SHARE = 0.5  # largest share of the pool that one owner may pin


class SoftPins:
    """The pins of a pool's blocks. A block has at most one pin.

    All blocks of one `pin` call share one Pin, so the call costs O(1) per block.

    Args:
        capacity: Number of blocks of the pool.
        clock: Returns the time in seconds.

    Attributes:
        num_refused: Number of blocks that were not pinned because of OWNER_SHARE.
    """

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self._max_per_owner = int(capacity * OWNER_SHARE)
        self._clock = clock
        self._pins: dict[int, Pin] = {}  # the pins by block id
        # A heap of pins, ordered by their ends. A pin may have no blocks left.
        self._heap: list[Pin] = []
        self._num_by_owner: Counter[str] = Counter()  # number of pinned blocks
        self._num_calls = 0
        self.num_refused = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[int]:
        return iter(self._pins)

    def __contains__(self, block: int) -> bool:
        return block in self._pins

    def pin_of(self, block: int) -> Pin:
        return self._pins[block]

    def remove_expired(self) -> None:
        now_s = self._clock()
        while self._heap and self._heap[0].expires_at_s <= now_s:
            for block in tuple(heappop(self._heap).blocks):
                self.remove(block)

    def pin(self, blocks: Sequence[int], seconds: float, owner: str) -> list[int]:
        """Pins blocks for `seconds`. Returns the blocks whose pin is new or longer.

        If a block already has a pin, the block keeps the pin that ends later, and
        counts towards the share of that pin's owner.

        Args:
            blocks: The blocks of a prefix, in order. If the owner's share does not
                suffice, the last blocks are refused, because lookups cannot find a
                prefix without its first blocks.
        """
        self.remove_expired()
        self._num_calls += 1
        pin = Pin(owner, self._clock() + seconds, self._num_calls)
        num_left = self._max_per_owner - self._num_by_owner[owner]
        accepted = []
        for block in blocks:
            old = self._pins.get(block)
            if old is not None and old.expires_at_s >= pin.expires_at_s:
                continue
            if old is not None and old.owner == owner:
                old.blocks.remove(block)  # already counts towards the owner's share
            elif num_left <= 0:
                self.num_refused += 1
                continue
            else:
                num_left -= 1
                if old is not None:
                    self.remove(block)
            self._pins[block] = pin
            accepted.append(block)
        if accepted:
            pin.blocks = set(accepted)
            self._num_by_owner[owner] = self._max_per_owner - num_left
            heappush(self._heap, pin)
            self._rebuild_if_stale()
        return accepted

    def remove(self, block: int) -> None:
        """Removes the pin of a block, which must have one."""
        pin = self._pins.pop(block)
        pin.blocks.remove(block)
        self._num_by_owner[pin.owner] -= 1
        if not self._num_by_owner[pin.owner]:
            del self._num_by_owner[pin.owner]

    def _rebuild_if_stale(self) -> None:
        if len(self._heap) > max(MIN_REBUILD, 2 * len(self._pins)):
            self._heap = [pin for pin in self._heap if pin.blocks]
            heapify(self._heap)

    def find_inconsistency(self) -> str | None:
        """Recounts the pins; returns a description of an inconsistency, or None."""
        blocks = {block: pin for pin in self._heap for block in pin.blocks}
        if blocks != self._pins:
            return "the pins by block and the pins by end differ"
        recount = Counter(pin.owner for pin in self._pins.values())
        if recount != self._num_by_owner:
            return f"owners have {recount} pins, but {self._num_by_owner} is recorded"
        if max(recount.values(), default=0) > self._max_per_owner:
            return f"an owner has more than {self._max_per_owner} pins: {recount}"
        return None
