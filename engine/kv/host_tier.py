"""The use of the host's KV store by an engine: the link to it, and the demoter."""

from engine.kv.demoter import DEMOTION_OUTCOMES, Demoter
from engine.kv.rates import Rates
from engine.kv.store_link import StoreLink, StoreRegion
from kvcache.blocks import BlockState
from kvcache.lease_server import LeaseServer
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import key_of
from protocol.ipc.kv_store import OFFER_OUTCOMES
from protocol.messages import HostTierReport
from protocol.metrics import stat_key
from protocol.settings.machine import is_local


def _initial_stats() -> dict[str, float]:
    names = [
        "baton_host_kv_up",
        "baton_host_kv_capacity_tokens",
        "baton_host_kv_evicted_blocks",
        "baton_host_kv_demoted_bytes",
    ]
    for state in BlockState:
        names.append(stat_key("baton_host_kv_blocks", state=state.name.lower()))
    for outcome in OFFER_OUTCOMES:
        names.append(stat_key("baton_host_kv_offers", outcome=outcome))
    for outcome in DEMOTION_OUTCOMES:
        names.append(stat_key("baton_host_kv_demotions", outcome=outcome))
    return dict.fromkeys(names, 0.0)


# The values of an engine that uses no store, by series. They are exposed from the
# start, because a Prometheus rate() misses the event with which a counter appears.
NO_STORE_STATS = _initial_stats()


class HostTier:
    """Offers KV to the store, and knows the region in which prompts are looked up.

    Args:
        link: the connection to the store, which this object starts and closes.
        rates: measured durations of pulls.
    """

    def __init__(
        self,
        link: StoreLink,
        coordinator: PullCoordinator,
        leases: LeaseServer,
        rates: Rates,
    ) -> None:
        self._link = link
        self._coordinator = coordinator
        self._connected_id = ""  # of the last region that was connected
        self._rates = rates
        self.demoter = Demoter(self.get_region, coordinator, leases)
        link.start()

    def poll(self) -> None:
        """Connects to a new region ahead of the first pull, because a GPU locks all of
        the region's memory then. Lets the demoter send its offers."""
        region = self._link.region
        if region is not None and region.engine_id != self._connected_id:
            self._connected_id = region.engine_id
            self._coordinator.connect(region.hint())
        self.demoter.poll()

    def get_region(self) -> StoreRegion | None:
        """Returns the region of the store; None while the store cannot be used."""
        return self._link.region

    def stats(self) -> dict[str, float]:
        """Values by series (protocol.metrics)."""
        return {
            **NO_STORE_STATS,
            "baton_host_kv_up": float(self._link.region is not None),
            **self._link.stats,
            **self.demoter.stats(),
        }

    def report(self) -> HostTierReport | None:
        """Describes the store for proxies; None while it cannot be used."""
        region = self._link.region
        if region is None:
            return None
        cost = self._rates.pull_cost(key_of(region.hint()))
        if cost is None:
            return None
        host, port = region.address
        return HostTierReport(
            store=region.engine_id,
            num_tokens=region.num_tokens,
            start_s=cost.start_s,
            token_s=cost.token_s,
            host="" if is_local(host) else host,
            port=port,
            incarnation=region.incarnation,
        )

    def close(self) -> None:
        self._link.close()
