"""The KV service of a rank: makes the rank's pool readable by peers, and runs the
thread that reads the pools of peers.
"""

from collections.abc import Callable, Sequence
from socket import socket

from engine.config import EngineConfig
from engine.kv.connector import Connector, connector_of
from engine.kv.rates import Rates
from kvcache.lease_server import LeaseServer
from kvcache.pool import KVPool
from kvcache.transfer.agent import TransferAgent
from kvcache.transfer.local_rank import DraftRank, LocalRank
from kvcache.transfer.move.cuda_placer import Placer, placer_for
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import PullSettings
from kvcache.transfer.worker import TransferWorker
from model.config import ModelConfig
from model.sizes import fingerprint
from protocol.handshake import CompatRecord, EngineMetadata


def reserved_bytes(config: EngineConfig) -> int:
    """Bytes of device memory that a rank's KV service takes besides the KV pool."""
    return LocalRank.reserved_bytes(_staging_bytes(config))


def _staging_bytes(config: EngineConfig) -> int | None:
    """The size of the staging memory; None if `--transfer mapped` needs no staging."""
    return None if config.transfer == "mapped" else config.staging_bytes


def _make_placer(
    config: EngineConfig,
    pool: KVPool,
    draft: DraftRank | None,
    is_busy: Callable[[], bool],
) -> Placer | None:
    """Makes the placer, which maps the memory of peers and copies KV out of it. Returns
    None with --transfer nixl, which maps no memory."""
    if config.transfer == "nixl":
        return None
    return placer_for(
        pool,
        is_busy=is_busy,
        convert=config.kv_convert,
        extra_layouts=[draft.endpoint.layout] if draft is not None else [],
    )


class KVService:
    """The KV service of one rank. The constructor registers `pool` with `agent`. Once
    `start` has been called, only the service may use the agent.

    Args:
        compat: the properties of this engine's KV that a peer's KV must share.
        links: sockets over which this engine's ranks coordinate pulls. Rank 0 has one
            to every other rank; every other rank has one to rank 0.
        is_busy: returns whether this rank is computing a step.
        draft: this rank's draft KV, which peers with the same drafter can pull; None if
            there is no such KV.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        pool: KVPool,
        agent: TransferAgent,
        compat: CompatRecord,
        links: Sequence[socket],
        is_busy: Callable[[], bool],
        draft: DraftRank | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._draft = draft
        self._costs = CostModel.configured(config.transfer_costs, pool.device.type)
        placer = _make_placer(config, pool, draft, is_busy)
        local = LocalRank(
            rank,
            config.tp,
            compat.total_kv_heads,
            agent,
            pool,
            dcp=config.dcp,
            staging_bytes=_staging_bytes(config),
            convert=config.kv_convert,
            costs=self._costs,
            placer=placer,
            maps_only=config.transfer == "mapped",
            is_busy=is_busy,
            connect_timeout_s=config.connect_timeout_s,
            draft=draft,
        )
        local.register_pool()
        if rank:
            self._worker = TransferWorker(local, *links)
        else:
            settings = PullSettings(
                handshake_timeout_s=config.handshake_timeout_s,
                pull_timeout_s=config.pull_timeout_s,
                fence_timeout_s=config.fence_timeout_s,
            )
            self._coordinator = PullCoordinator(
                links,
                compat,
                config.cluster_secret,
                settings,
                convert=config.kv_convert,
                dcp=config.dcp,
                block_size=config.block_size,
                verify=config.kv_verify,
                draft=draft.kv if draft is not None else None,
            )
            self._worker = TransferWorker(local, self._coordinator)
        self.start = self._worker.start
        self.stats = self._worker.stats
        self.close = self._worker.close

    def make_connector(
        self, metadata: EngineMetadata, wake: Callable[[], None], max_model_len: int
    ) -> Connector:
        """Starts the lease server and makes the engine's connector. Called once, on
        rank 0. Also sets `side_channel_port`, the lease server's port.

        Args:
            metadata: the description of this engine that peers receive in handshakes.
            wake: makes the core poll the connector; may be called from any thread.
            max_model_len: largest number of tokens of a sequence.
        """
        config = self._config
        layout = self._pool.layout
        self._coordinator.on_event = wake
        leases = LeaseServer(
            config.side_channel_advertise,
            config.side_channel_port,
            metadata,
            config.cluster_secret,
            on_event=wake,
            bind_host=config.side_channel_host,
            start_digest=self._coordinator.digest,
            max_lookup_tokens=layout.num_blocks * config.tokens_per_block,
        )
        leases.start()
        self.side_channel_port = leases.address[1]
        costs = self._costs or DEFAULT_COSTS[self._pool.device.type]
        # The bytes per token exclude KV groups with an attention window, because a pull
        # reads only the last tokens of such a group.
        num_full_groups = self._pool.groups.windows.count(None) or 1
        group_bytes = layout.block_bytes * num_full_groups
        bytes_per_token = group_bytes * config.tp // config.tokens_per_block
        draft_bytes = self._draft.endpoint.layout.token_bytes if self._draft else 0
        return connector_of(
            config,
            metadata.compat,
            layout,
            self._coordinator,
            leases,
            Rates(
                config.borrow_prefixes,
                bytes_per_token,
                costs.bytes_per_s,
                draft_bytes_per_token=draft_bytes * config.tp,
            ),
            max_model_len,
        )


def compat_record(
    config: EngineConfig, model_config: ModelConfig, windows: tuple[int, ...]
) -> CompatRecord:
    """Describes this engine's KV. Peers compare the record with that of their own KV.

    Args:
        windows: the attention windows of the KV groups, as from KVGroups.to_wire.
    """
    return CompatRecord(
        model_fingerprint=fingerprint(
            model_config,
            config.model_dir,
            load_format=config.load_format,
            seed=config.seed,
        ),
        kv_dtype=config.kv_dtype,
        num_layers=model_config.num_layers,
        total_kv_heads=model_config.kv_heads_total,
        num_components=model_config.kv_components,
        head_dim=model_config.kv_dim,
        rope=model_config.rope_canonical,
        kv_scales=config.scales,
        kv_windows=windows,
    )
