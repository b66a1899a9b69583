"""What runs on each rank for KV to come and go: its pool, which peers may read, and the thread that
reads theirs. `python -m decode_server.service` is the process of a rank."""

from collections.abc import Callable

from engine.config import EngineConfig
from engine.kv.borrower import Borrower
from engine.kv.connector import Connector
from engine.kv.lender import Lender
from engine.kv.rates import Rates
from engine.worker.service import ConnectorFactory, RankContext, RankService
from engine.worker.worker import main
from kvcache.lease_server import LeaseServer
from kvcache.transfer.move.cuda_placer import placer_for
from kvcache.transfer.peer import LocalRank, MappedPath
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import PullSettings
from kvcache.transfer.worker import TransferWorker
from protocol.handshake import EngineMetadata


def _mapped_path(transfer: str, context: RankContext) -> MappedPath | None:
    """The mapped path, unless `--transfer nixl` pins the other one."""
    if transfer == "nixl":
        return None
    busy, convert = lambda: context.stepping.busy, context.config.kv_convert
    placer = placer_for(context.pool, busy=busy, convert=convert)
    return MappedPath(placer, required=transfer == "mapped")


def _staging_bytes(config: EngineConfig) -> int | None:
    """None where nothing is ever staged."""
    return None if config.transfer == "mapped" else config.staging_bytes


class KVFactory(ConnectorFactory):
    """Makes both halves, of every engine."""

    def reserved_bytes(self, config: EngineConfig) -> int:
        return LocalRank.reserved_bytes(_staging_bytes(config))

    def make_service(self, context: RankContext) -> RankService:
        config = context.config
        rank = LocalRank(
            context.rank,
            config.tp,
            context.compat.total_kv_heads,
            context.agent,
            context.pool,
            dcp=config.dcp,
            staging_bytes=_staging_bytes(config),
            convert=config.kv_convert,
            costs=CostModel.configured(config.transfer_costs, context.pool.device.type),
            mapped=_mapped_path(config.transfer, context),
            busy=lambda: context.stepping.busy,
            connect_timeout_s=config.connect_timeout_s,
        )
        rank.offer()
        if context.rank:
            return TransferWorker(rank, config.transfer_address)
        self._coordinator = _coordinator(context)
        return TransferWorker(rank, self._coordinator)

    def make_connector(
        self, context: RankContext, metadata: EngineMetadata, wake: Callable[[], None]
    ) -> Connector:
        config = context.config
        self._coordinator.on_event = wake
        leases = LeaseServer(
            config.side_channel_advertise,
            config.side_channel_port,
            metadata,
            config.cluster_secret,
            on_event=wake,
            bind_host=config.side_channel_host,
            digest=self._coordinator.digest,
            max_tokens=context.pool.layout.num_blocks * config.tokens_per_block,
        )
        leases.start()
        borrower = Borrower(
            self._coordinator,
            config.kv_load_failure_policy,
            config.quarantine_timeout_s,
            _rates(context),
            config.engine_id,
        )
        return Connector(Lender(config, leases), borrower)


def _rates(context: RankContext) -> Rates:
    config, layout, device = context.config, context.pool.layout, context.pool.device.type
    costs = CostModel.configured(config.transfer_costs, device) or DEFAULT_COSTS[device]
    whole = context.pool.groups.windows.count(None) or 1  # of windows the end alone is pulled
    num_bytes = layout.block_bytes * whole * config.tp // config.tokens_per_block
    return Rates(config.borrow_prefixes, num_bytes, costs.bytes_per_s)


def _coordinator(context: RankContext) -> PullCoordinator:
    config = context.config
    return PullCoordinator(
        config.transfer_address,
        config.tp,
        context.compat,
        config.cluster_secret,
        PullSettings(
            handshake_timeout_s=config.handshake_timeout_s,
            pull_timeout_s=config.pull_timeout_s,
            fence_timeout_s=config.fence_timeout_s,
        ),
        convert=config.kv_convert,
        dcp=config.dcp,
        block_size=config.block_size,
        verify=config.kv_verify,
    )


if __name__ == "__main__":
    main(KVFactory())
