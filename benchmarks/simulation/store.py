"""A simulated KV store of a host. The host's servers pull evicted prefixes from it."""

from collections.abc import Sequence

from benchmarks.simulation.times import EngineTimes
from protocol.messages import HostTierReport
from proxy.placement.prefix_index import PrefixIndex


class SimulatedStore:
    """The KV store of one host, to which each server adds every block that it caches.

    Args:
        host: number of the host.
        num_tokens: tokens that the store can hold.
    """

    def __init__(self, host: int, num_tokens: int, times: EngineTimes) -> None:
        # This index covers only this store, which is server 0 of the index.
        self._cache = PrefixIndex(num_tokens // times.block_tokens)
        self.report = HostTierReport(
            store=f"store-{host}",
            num_tokens=num_tokens,
            start_s=times.lookup_s,
            token_s=times.stored_token_s,
        )

    def cached_blocks(self, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks of a prompt that the store has."""
        return int(self._cache.depths(hashes).get(0, 0))

    def cache(self, hashes: Sequence[int]) -> None:
        """Add blocks to the store."""
        self._cache.add(0, hashes)
