"""Combines the lender and the borrower component into the KVConnector of one engine."""

from typing import Any

from engine.config import EngineConfig
from engine.core.connector import CoreServices, KVConnector
from engine.core.sequence import Sequence
from engine.kv.borrower import Borrower
from engine.kv.host_tier import NO_STORE_STATS, HostTier
from engine.kv.lender import Lender
from engine.kv.rates import Rates
from engine.kv.store_link import StoreLink
from kvcache.layout import KVLayout
from kvcache.lease_server import LeaseServer
from kvcache.transfer.pulls.coordinator import PullCoordinator
from protocol.handshake import CompatRecord
from protocol.ipc.kv_store import RegionSpec
from protocol.messages import HostTierReport, RemotePrefill
from protocol.settings.addresses import split_address


class Connector(KVConnector):
    """The connector of every engine. The lender handles requests with KV that other
    engines will pull; the borrower handles requests with KV on another engine.

    Args:
        host_tier: connects the engine to the host's KV store; None without a store.
    """

    def __init__(
        self, lender: Lender, borrower: Borrower, host_tier: HostTier | None = None
    ) -> None:
        self._lender = lender
        self._borrower = borrower
        self._host_tier = host_tier

    def bind(self, core: CoreServices) -> None:
        self._lender.bind(core)
        self._borrower.bind(core)
        if self._host_tier is not None:
            demoter = self._host_tier.demoter
            demoter.bind(core, self._lender.references)
            self._lender.on_lease_ended = demoter.on_lease_ended
            self._borrower.on_promoted = demoter.on_promoted

    def on_add(self, sequence: Sequence) -> None:
        pull = sequence.pull
        if pull is not None and self._lender.end_local_lease(pull.remote):
            # This engine itself computed the prompt, so its prefix cache has the KV.
            sequence.pull = None
        self._lender.offer_prompt(sequence)
        self._borrower.on_add(sequence)

    def on_receive(self, sequence: Sequence) -> None:
        self._borrower.on_receive(sequence)

    def on_computed(self, sequence: Sequence) -> None:
        if sequence.request.transfer_id is not None:
            self._lender.on_computed(sequence)
        if self._host_tier is not None:
            self._host_tier.demoter.on_published(sequence)

    def on_end(self, sequence: Sequence) -> None:
        if sequence.request.transfer_id is not None:
            self._lender.on_end(sequence)
        if self._host_tier is not None:
            self._host_tier.demoter.on_end(sequence)

    def on_finish(self, sequence: Sequence) -> dict[str, Any] | None:
        self._borrower.on_finish(sequence)
        return self._lender.on_finish(sequence)

    def on_abort(self, sequence: Sequence) -> bool:
        return self._borrower.on_abort(sequence)

    def on_abort_unknown(self, request_id: str) -> None:
        self._lender.on_abort_unknown(request_id)

    def on_release(self, remote: RemotePrefill) -> None:
        if not self._lender.end_local_lease(remote):
            self._borrower.on_release(remote)

    def poll(self) -> None:
        self._lender.poll()
        self._borrower.poll()
        if self._host_tier is not None:
            self._host_tier.poll()

    def stats(self) -> dict[str, float]:
        tier_stats = NO_STORE_STATS
        if self._host_tier is not None:
            tier_stats = self._host_tier.stats()
        return {**self._lender.stats(), **self._borrower.stats(), **tier_stats}

    def host_tier_report(self) -> HostTierReport | None:
        return None if self._host_tier is None else self._host_tier.report()

    def close(self) -> None:
        if self._host_tier is not None:
            self._host_tier.close()
        self._lender.close()


def connector_of(
    config: EngineConfig,
    compat: CompatRecord,
    layout: KVLayout,
    coordinator: PullCoordinator,
    leases: LeaseServer,
    rates: Rates,
    max_model_len: int,
) -> Connector:
    """Makes the connector of an engine, and connects it to the host's KV store if
    there is one.

    Args:
        layout: the layout of rank 0's pool.
        max_model_len: largest number of tokens of a sequence.
    """
    host_tier = None
    if config.host_kv is not None:
        spec = RegionSpec(
            compat=compat,
            group_layers=layout.num_layers,
            block_size=layout.block_size,
            max_model_len=max_model_len,
        )
        link = StoreLink(
            split_address(config.host_kv),
            config.cluster_secret,
            config.engine_id,
            spec,
            config.dcp,
        )
        host_tier = HostTier(link, coordinator, leases, rates)
    borrower = Borrower(
        coordinator,
        config.kv_load_failure_policy,
        config.quarantine_timeout_s,
        rates,
        config.engine_id,
        host_tier.get_readable_region if host_tier else lambda: None,
    )
    return Connector(Lender(config, leases), borrower, host_tier)
