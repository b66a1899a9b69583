"""One rank: its shard of the model, its KV pool and its KV service, created in this
order."""

import gc
from collections.abc import Callable

from engine.config import EngineConfig
from engine.worker import ranks
from engine.worker.draft_runner import DraftRunner
from engine.worker.drafting.load_draft import allocate_pools, draft_rank, load_draft
from engine.worker.kernel_watch import KERNELS
from engine.worker.memory import (
    MemoryGauge,
    PoolSize,
    block_bytes,
    decide_max_model_len,
    size_pool,
)
from engine.worker.ranks import RankLinks, connect_ranks
from engine.worker.runner import ModelRunner
from engine.worker.service import KVService, compat_record, reserved_bytes
from engine.worker.warm_up import kv_budget_bytes, warm_up
from kvcache.prefault import PrefaultThread
from kvcache.transfer.move.peer_memory import describe_pool
from kvcache.transfer.nixl_agent import NixlAgent
from model.config import ModelConfig
from protocol.handshake import (
    DIGEST_VERSION,
    PROTOCOL_VERSION,
    EngineMetadata,
    RankMetadata,
)
from protocol.settings.machine import free_host_bytes


class Rank:
    """Loads the model, allocates as many KV blocks as every rank can hold, runs every
    kind of step once (only on a GPU), and starts the rank's KV service. All ranks must
    be created at the same time, because they wait for each other.

    Args:
        report: called with a description of each slow part of the start, when that part
            begins.

    Attributes:
        draft: the draft model of this rank; None if there is none.
        pool_size: the size of the KV pool that this rank can hold, regardless of the
            other ranks.
        num_blocks: the number of blocks of every rank's pool, on which all ranks
            agreed.
        metadata: descriptions of all ranks, by rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        rank: int,
        links: RankLinks,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        parallel = connect_ranks(config, rank, links)
        self.runner = ModelRunner(config, model_config, parallel, report)
        self.draft = load_draft(self.runner, report)
        # Wait here until every rank has loaded its model, because the first collective
        # would wait only one minute for rank 0. One node may take minutes longer than
        # another to compile kernels and to read the weights.
        links.agree(0, int, max)
        self._number = rank
        self._node_ranks = config.node_ranks
        self._has_other_nodes = config.nnodes > 1
        report("sizing the KV pool")
        self.pool_size = measure_pool_size(
            config, model_config, self.runner, self.draft
        )
        self.num_blocks = links.agree(self.pool_size.num_blocks, int, min)
        pool = allocate_pools(self.runner, self.draft, self.num_blocks)
        self._memory_gauge = MemoryGauge(pool.device)
        on_gpu = pool.device.type == "cuda"
        if on_gpu:
            report("running each kind of step once")
            warm_up(self.runner)
        else:
            PrefaultThread(pool).start()
        device_id = pool.device_id if on_gpu else None
        agent = NixlAgent(f"{config.engine_id}-{rank}", device_id=device_id)
        self.compat = compat_record(config, model_config, self.runner.groups.to_wire())
        draft = draft_rank(self.draft, pool, rank)
        self._draft_kv = draft.kv if draft is not None else None
        step_watch = self.runner.step_watch
        self.service = KVService(
            config,
            rank,
            pool,
            agent,
            self.compat,
            links.pulls,
            is_busy=lambda: step_watch.is_busy,
            draft=draft,
        )
        metadata = describe_pool(
            pool,
            rank,
            agent.metadata(),
            _host_of(config),
            draft.pool if draft is not None else None,
        )
        self.metadata = _share_metadata(links, metadata)
        self.service.start()

    def raise_if_rank_lost(self, error: Exception) -> None:
        """Raises RankLost if `error`, which this rank raised, was caused by the exit of
        another rank."""
        pids = [
            metadata.pid if metadata.rank in self._node_ranks else None
            for metadata in self.metadata
        ]
        ranks.raise_if_rank_lost(
            error, self._number, pids, has_other_nodes=self._has_other_nodes
        )

    def engine_metadata(self) -> EngineMetadata:
        """The description of the engine that peers receive in handshakes."""
        config = self.runner.config
        return EngineMetadata(
            protocol_version=PROTOCOL_VERSION,
            engine_id=config.engine_id,
            incarnation=config.incarnation,
            compat=self.compat,
            tp_size=config.tp,
            dcp_size=config.dcp,
            ranks=self.metadata,
            digests=DIGEST_VERSION,
            draft=self._draft_kv,
        )

    def decide_max_model_len(self) -> int:
        """The largest number of tokens of a sequence, prompt and outputs."""
        return decide_max_model_len(
            self.runner.config,
            self.pool_size,
            self.num_blocks,
            self.runner.model_config.max_position,
            self.runner.groups,
        )

    @staticmethod
    def set_ready() -> None:
        """Must be called just before the first request may arrive. Each kernel that is
        loaded afterwards counts as loaded late. Garbage collection skips all objects
        that already exist, because scanning them would delay steps."""
        KERNELS.is_ready = True
        gc.freeze()

    def stats(self) -> dict[str, float]:
        """Returns this rank's values by metric series (protocol.metrics): the number of
        kernels loaded since `set_ready`, the memory in use, and the pulls by
        transport."""
        return {
            "baton_kernels_loaded_late": float(KERNELS.num_late),
            **self._memory_gauge.values(),
            **self.service.stats(),
        }


def measure_pool_size(
    config: EngineConfig,
    model_config: ModelConfig,
    runner: ModelRunner,
    draft: DraftRunner | None = None,
) -> PoolSize:
    """Returns the size of the largest pool that this rank can hold, or of the pool that
    the options request. On a GPU, runs the largest step to measure its memory. A block
    includes the KV of the draft model, if there is one."""
    if config.device == "cuda":
        free_bytes = kv_budget_bytes(runner) - reserved_bytes(config)
    else:
        free_bytes = free_host_bytes() // config.ranks_per_node
    bytes_per_block = block_bytes(config, model_config)
    if draft is not None:
        bytes_per_block += draft.bytes_per_block
        free_bytes -= draft.scratch_bytes
    return size_pool(
        config,
        block_bytes=bytes_per_block,
        model_max_len=model_config.max_position,
        free_bytes=free_bytes,
        groups=runner.groups,
    )


def _share_metadata(links: RankLinks, metadata: RankMetadata) -> list[RankMetadata]:
    """Sends this rank's description to all ranks. Returns the descriptions of all
    ranks, by rank."""

    def concatenate(lists: list[list[RankMetadata]]) -> list[RankMetadata]:
        return [metadata for one_rank in lists for metadata in one_rank]

    shared = links.agree([metadata], list[RankMetadata], concatenate)
    return sorted(shared, key=lambda metadata: metadata.rank)


def _host_of(config: EngineConfig) -> str:
    """The address of this rank's host, which peers show in error messages."""
    return config.node_host or config.side_channel_advertise
