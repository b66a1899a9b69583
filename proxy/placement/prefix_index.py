"""An index of the prefixes in each server's KV cache, as the proxy infers them."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

# Each call of `add` deletes at most this many blocks of removed servers, which takes
# less than a millisecond.
_DELETIONS_PER_ADD = 1024

# For one prompt: the number of leading blocks that a server has, by the server's index.
Depths = dict[int, float]


class PrefixIndex:
    """The blocks that each server has, as chained hashes.

    Each server's blocks are evicted in the order of their last use, as in the server's
    own cache. Servers are identified by ServerLoad.index. A set of servers is an
    integer with one bit for each server. A lookup therefore takes one operation per
    block, regardless of the number of servers.

    Args:
        max_blocks: limit for all servers together.
    """

    def __init__(self, max_blocks: int = 250_000) -> None:
        self._max_blocks = max_blocks
        self._servers: dict[int, int] = {}  # bits of the servers, by hash
        # The hashes of each server, least recently used first.
        self._recent: dict[int, OrderedDict[int, None]] = {}
        self._num_blocks = 0
        # The hashes that are still to be deleted, by the index of the removed server.
        self._removed: dict[int, OrderedDict[int, None]] = {}
        # The set of the servers in `_removed`, with one bit for each server.
        self._removed_bits = 0

    def __len__(self) -> int:
        return self._num_blocks

    def add(
        self, server: int, hashes: Sequence[int], max_blocks: int | None = None
    ) -> None:
        """Record that the server uses these blocks now.

        Args:
            max_blocks: capacity of this server's cache; None if it is not known.
        """
        self._delete_some_removed()
        if server in self._removed:
            return
        recent = self._recent.setdefault(server, OrderedDict())
        bit = 1 << server
        for block in reversed(hashes):  # the first block of a prefix is evicted last
            if block in recent:
                recent.move_to_end(block)
            else:
                recent[block] = None
                self._servers[block] = self._servers.get(block, 0) | bit
                self._num_blocks += 1
        capacity = self._max_blocks if max_blocks is None else max_blocks
        while len(recent) > capacity:
            self._drop(server, next(iter(recent)))
        self._shrink()

    def _shrink(self) -> None:
        """Evict blocks of the servers with most blocks, until `max_blocks` are left."""
        while self._recent:
            excess = self._num_blocks - self._max_blocks
            if excess <= 0:
                return
            largest = max(self._recent, key=lambda server: len(self._recent[server]))
            for _ in range(min(excess, len(self._recent[largest]))):
                self._drop(largest, next(iter(self._recent[largest])))
            if not self._recent[largest]:
                del self._recent[largest]

    def has(self, server: int, block: int) -> bool:
        return block in self._recent.get(server, ())

    def remove(self, server: int, hashes: Sequence[int]) -> None:
        """Record that the server does not have these blocks after all."""
        for block in hashes:
            if self.has(server, block):
                self._drop(server, block)

    def remove_server(self, server: int) -> None:
        """Drop all blocks of a server that has restarted or left.

        Deleting all blocks at once would block the event loop for a tenth of a second.
        The blocks are only hidden here, and later calls of `add` delete them. Until
        they are deleted, `add` records no new blocks of this server.
        """
        if blocks := self._recent.pop(server, None):
            self._removed[server] = blocks
            self._removed_bits |= 1 << server

    def _delete_some_removed(self) -> None:
        num_left = _DELETIONS_PER_ADD
        while self._removed and num_left:
            server, blocks = next(iter(self._removed.items()))
            while blocks and num_left:
                block, _ = blocks.popitem()
                self._clear_bit(server, block)
                num_left -= 1
            if not blocks:
                del self._removed[server]
                self._removed_bits &= ~(1 << server)

    def depths(self, hashes: Sequence[int]) -> Depths:
        """Return how many leading blocks of a prompt each server has.

        Servers without any of these blocks are left out.
        """
        depths: Depths = {}
        remaining = ~self._removed_bits
        for depth, block in enumerate(hashes):
            holders = remaining & self._servers.get(block, 0)
            if holders != remaining:
                if depth:
                    for server in _bits(remaining & ~holders):
                        depths[server] = depth
                if not holders:
                    return depths
                remaining = holders
        if remaining > 0:
            for server in _bits(remaining):
                depths[server] = len(hashes)
        return depths

    def _drop(self, server: int, block: int) -> None:
        del self._recent[server][block]
        self._clear_bit(server, block)

    def _clear_bit(self, server: int, block: int) -> None:
        self._num_blocks -= 1
        servers = self._servers[block] & ~(1 << server)
        if servers:
            self._servers[block] = servers
        else:
            del self._servers[block]


def _bits(mask: int) -> Iterator[int]:
    """Yield the positions of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
