"""The memory of a region, and the threads that move KV into it and out of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvcache.groups import KVGroups
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.agent import TransferAgent
from kvcache.transfer.local_rank import LocalRank
from kvcache.transfer.move.cuda_placer import placer_for_host
from kvcache.transfer.move.peer_memory import describe_pool
from kvcache.transfer.plan.steps import min_staging_bytes
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import PullSettings
from kvcache.transfer.worker import TransferWorker
from protocol.handshake import AXES
from protocol.ipc.kv_store import RegionSpec


class RegionTooSmall(Exception):
    """The memory of a store cannot hold one sequence of an engine. The message names
    the option and the size that is needed."""


@dataclass(frozen=True, kw_only=True)
class RegionOptions:
    """The options of a store that concern its regions.

    Attributes:
        host_kv_bytes: size of all regions together.
        max_models: maximum number of regions, which have equal shares of the memory.
        host: address that the region's side channel listens on.
        side_channel_port: port of the side channel; 0: any free port.
        transfer, staging_bytes, kv_verify: as in TransferOptions.
        lease_s: how long a leased prefix is kept for an engine that does not respond.
    """

    host_kv_bytes: int
    max_models: int = 1
    host: str = "127.0.0.1"
    side_channel_port: int = 0
    transfer: Literal["auto", "nixl", "mapped"] = "nixl"
    staging_bytes: int = 64 * 2**20
    kv_verify: str = "off"
    lease_s: float = 30.0


def region_layout(spec: RegionSpec, options: RegionOptions) -> KVLayout:
    """Returns the layout of a region. In a block, each head's KV is contiguous.

    Raises:
        RegionTooSmall: the region cannot hold one sequence of `spec.max_model_len`
            tokens.
    """
    compat = spec.compat
    groups = KVGroups.from_wire(compat.kv_windows)

    def with_blocks(num_blocks: int) -> KVLayout:
        return KVLayout(
            order=AXES,
            num_blocks=num_blocks,
            num_heads=compat.total_kv_heads,
            num_layers=spec.group_layers,
            num_components=compat.num_components,
            block_size=spec.block_size,
            head_dim=compat.head_dim,
            dtype=compat.kv_dtype,
        )

    block_bytes = with_blocks(2).block_bytes
    num_blocks = options.host_kv_bytes // options.max_models // block_bytes
    needed = 1 + groups.num_blocks_for(spec.max_model_len, 0, spec.block_size)
    if num_blocks < needed:
        share = "" if options.max_models == 1 else f"/ {options.max_models} (models) "
        raise RegionTooSmall(
            f"--host-kv-bytes {options.host_kv_bytes} {share}of the KV store is too "
            f"small for one sequence of {spec.max_model_len} tokens: use "
            f"--host-kv-bytes {needed * block_bytes * options.max_models} or more, or "
            "a smaller --max-model-len"
        )
    return with_blocks(num_blocks)


class RegionMemory:
    """A pool in host memory, and the coordinator and worker that pull KV into it.

    Args:
        agent: reads the memory of engines, and lets engines read the pool.
        layout: the result of `region_layout`.
        on_event: called by other threads when `coordinator.drain` has events.
    """

    def __init__(
        self,
        spec: RegionSpec,
        layout: KVLayout,
        options: RegionOptions,
        secret: bytes,
        agent: TransferAgent,
        on_event: Callable[[], None],
        *,
        settings: PullSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        compat = spec.compat
        self.groups = KVGroups.from_wire(compat.kv_windows)
        # With several layer groups, all KV scales are 1.
        scales = compat.kv_scales if self.groups.count == 1 else ()
        self.pool = KVPool(layout, "cpu", scales, self.groups)
        maps_only = options.transfer == "mapped"
        staging_bytes = max(options.staging_bytes, min_staging_bytes(layout))
        rank = LocalRank(
            0,
            1,
            compat.total_kv_heads,
            agent,
            self.pool,
            staging_bytes=None if maps_only else staging_bytes,
            placer=(
                None
                if options.transfer == "nixl"
                else placer_for_host(self.pool, maps_only=maps_only)
            ),
            maps_only=maps_only,
        )
        rank.register_pool()
        self.coordinator = PullCoordinator(
            (),
            compat,
            secret,
            settings,
            clock=clock,
            block_size=layout.block_size,
            verify=options.kv_verify,
        )
        self.coordinator.on_event = on_event
        self._worker = TransferWorker(rank, self.coordinator)
        self.metadata = describe_pool(self.pool, 0, agent.metadata(), options.host)
        self._worker.start()
        self.stats = self._worker.stats
        self.close = self._worker.close
