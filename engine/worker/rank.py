"""One rank: its shard of the model, its KV and its service, made one after the other."""

import gc
from collections.abc import Callable

from engine.config import EngineConfig
from engine.worker.kernel_watch import KERNELS
from engine.worker.memory import PoolSize, block_bytes, size_pool
from engine.worker.ranks import RankLinks, blame
from engine.worker.rehearsal import kv_budget_bytes, rehearse
from engine.worker.runner import ModelRunner
from engine.worker.service import KVService, reserved_bytes
from kvcache.prefault import PrefaultThread
from kvcache.transfer.move.peer_memory import describe
from kvcache.transfer.nixl_agent import NixlAgent
from model.config import ModelConfig
from model.parallel import Parallel
from model.sizes import fingerprint
from protocol.handshake import CompatRecord, RankMetadata
from protocol.settings.machine import free_host_bytes


class Rank:
    """Loads the model, allocates as much KV as all ranks can hold, runs every kind of step once,
    and starts the rank's service. All ranks do so together.

    Args:
        tell: told what takes long, in words.

    Attributes:
        size: what this rank alone would hold.
        num_blocks: of the pool.
        metadata: of all ranks, in order.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        rank: int,
        links: RankLinks,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        parallel = _parallel(config, rank, links)
        self.runner = runner = ModelRunner(config, model_config, parallel, tell)
        self._number = rank
        tell("sizing the KV pool")
        self.size = pool_size(config, model_config, runner)
        self.num_blocks = links.agree(self.size.num_blocks, int, min)
        pool = runner.allocate(self.num_blocks).pool
        runner.capture_graphs()
        cuda = pool.device.type == "cuda"
        if cuda:
            tell("running each kind of step once")
            rehearse(runner)
        else:
            PrefaultThread(pool).start()
        device_id = pool.device_id if cuda else None
        agent = NixlAgent(f"{config.engine_id}-{rank}", device_id=device_id)
        self.compat = _compat(config, model_config, runner.groups.to_wire())
        stepping = runner.stepping
        self.service = KVService(
            config,
            rank,
            pool,
            agent,
            self.compat,
            links.pulls,
            busy=lambda: stepping.busy,
        )
        own = [describe(pool, rank, agent.metadata())]
        told = links.agree(
            own, list[RankMetadata], lambda each: [one for (one,) in each]
        )
        self.metadata = sorted(told, key=lambda metadata: metadata.rank)
        self.service.start()

    def blame(self, error: Exception) -> None:
        """Raises RankLost, from what has failed here, where that came of another rank's end."""
        blame(error, self._number, [one.pid for one in self.metadata])

    @staticmethod
    def ready() -> None:
        """Requests come from now on. What is there by now stays: looking through it for garbage
        would hold up steps."""
        KERNELS.is_ready = True
        gc.freeze()


def pool_size(
    config: EngineConfig, model_config: ModelConfig, runner: ModelRunner
) -> PoolSize:
    if config.device == "cuda":
        free_bytes = kv_budget_bytes(runner) - reserved_bytes(config)
    else:
        free_bytes = free_host_bytes() // config.tp
    return size_pool(
        config,
        block_bytes=block_bytes(config, model_config),
        model_max_len=model_config.max_position,
        free_bytes=free_bytes,
        groups=runner.groups,
    )


def _parallel(config: EngineConfig, rank: int, links: RankLinks) -> Parallel:
    device = (
        f"cuda:{config.devices[rank]}" if config.device == "cuda" else config.device
    )
    links.agree(
        0, int, max
    )  # all have started: the group waits for a minute, links for ten
    groups = {"dcp": config.dcp, "ep": config.ep}
    return Parallel.connect(
        rank, config.tp, meeting=config.meeting, device=device, **groups
    )


def _compat(
    config: EngineConfig, model_config: ModelConfig, windows: tuple[int, ...]
) -> CompatRecord:
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
