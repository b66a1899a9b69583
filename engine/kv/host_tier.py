"""The use of the host's KV store by an engine: the link to it, and the demoter."""

from engine.kv.demoter import Demoter
from engine.kv.store_link import StoreLink, StoreRegion
from kvcache.lease_server import LeaseServer
from kvcache.transfer.pulls.coordinator import PullCoordinator


class HostTier:
    """Offers KV to the store, and knows the region in which prompts are looked up.

    Args:
        link: the connection to the store, which this object starts and closes.
    """

    def __init__(
        self, link: StoreLink, coordinator: PullCoordinator, leases: LeaseServer
    ) -> None:
        self._link = link
        self.demoter = Demoter(self.get_region, coordinator, leases)
        link.start()

    def get_region(self) -> StoreRegion | None:
        """Returns the region of the store; None while the store cannot be used."""
        return self._link.region

    def stats(self) -> dict[str, float]:
        """Values by series (protocol.metrics)."""
        return {
            "baton_host_kv_up": float(self._link.region is not None),
            **self._link.stats,
            **self.demoter.stats(),
        }

    def close(self) -> None:
        self._link.close()
