"""Connects an engine to the KV store of its host, and offers KV to the store."""

import time

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
from protocol.process.logging import get_logger
from protocol.settings.machine import is_local

logger = get_logger(__name__)


def _initial_stats() -> dict[str, float]:
    names = [
        "baton_host_kv_up",
        "baton_host_kv_capacity_tokens",
        "baton_host_kv_evicted_blocks",
        "baton_host_kv_demoted_bytes",
        "baton_host_kv_demotions_pending",
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

# Pause between two calls of PullCoordinator.connect for a region. A later call has an
# effect only if the handshake has failed or the connection was lost.
_RECONNECT_S = 2.0


class HostTier:
    """Offers KV to the KV store, and provides the region for lookups of prompts.

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
        self._region: StoreRegion | None = None  # as of the last call of `poll`
        self._region_began_s = 0.0
        self._next_connect_s = 0.0
        self._is_readable_logged = False
        self._rates = rates
        self.demoter = Demoter(self._get_region, coordinator, leases)
        link.start()

    def poll(self) -> None:
        """Connects to a new region before the first lookup, because a server with a GPU
        locks all memory of the region, which takes long. Lets the demoter send its
        offers."""
        now_s = time.monotonic()
        region = self._link.region
        if region != self._region:
            self._region = region
            self._region_began_s = now_s
            self._next_connect_s = now_s
            self._is_readable_logged = False
        if region is not None and not self._coordinator.is_prepared(region.hint()):
            if now_s >= self._next_connect_s:
                self._next_connect_s = now_s + _RECONNECT_S
                self._coordinator.connect(region.hint())
        elif region is not None and not self._is_readable_logged:
            self._is_readable_logged = True
            logger.info(
                "this server reads KV from the KV store now; connecting took %.1f s",
                now_s - self._region_began_s,
            )
        self.demoter.poll()

    def _get_region(self) -> StoreRegion | None:
        """Returns the region of the store; None while the store cannot be used."""
        return self._link.region

    def get_readable_region(self) -> StoreRegion | None:
        """Returns the region of the store if pulls from it can begin at once. Otherwise
        returns None, so that no request waits for a connection to the region."""
        region = self._link.region
        if region is None or not self._coordinator.is_prepared(region.hint()):
            return None
        return region

    def stats(self) -> dict[str, float]:
        """The metric values by series (protocol.metrics)."""
        return {
            **NO_STORE_STATS,
            "baton_host_kv_up": float(self.get_readable_region() is not None),
            **self._link.stats,
            **self.demoter.stats(),
        }

    def report(self) -> HostTierReport | None:
        """Describes the store for proxies; None while it cannot be read."""
        region = self.get_readable_region()
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
