"""One rank: its shard of the model, its KV and its service, made one after the other."""

import gc
from collections.abc import Callable

import torch

from engine.config import EngineConfig
from engine.process.host_memory import free_host_bytes
from engine.worker.kernel_watch import KERNELS
from engine.worker.memory import PoolSize, longest_sequence, size_pool
from engine.worker.rehearsal import kv_budget_bytes, rehearse
from engine.worker.runner import ModelRunner
from engine.worker.service import ConnectorFactory, RankContext
from kvcache.prefault import PrefaultThread
from kvcache.transfer.link.nixl_agent import NixlAgent
from kvcache.transfer.move.peer_memory import describe
from model.config import ModelConfig
from model.fingerprint import fingerprint
from model.parallel import Parallel
from protocol.handshake import CompatRecord


class Rank:
    """Loads the model; `allocate` then makes the KV pool, once all ranks agree on its size.

    Args:
        port: where rank 0 waits for the others; not used by rank 0.
        on_listening: called on rank 0 with the port where the others are to come.

    Attributes:
        size: of the pool that this rank's memory allows.
        context, service, metadata: once `allocate` has returned.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        rank: int,
        factory: ConnectorFactory,
        port: int = 0,
        on_listening: Callable[[int], None] | None = None,
    ) -> None:
        self._config = config
        self._model_config = model_config
        self._rank = rank
        self._factory = factory
        parallel = _parallel(config, rank, port, on_listening)
        self.runner = ModelRunner(config, model_config, parallel)
        self.size = pool_size(config, model_config, self.runner, factory)

    def longest_sequence(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that so many blocks hold; logs them."""
        return longest_sequence(
            self._config, self.size, num_blocks, self._model_config.max_position
        )

    def allocate(self, num_blocks: int) -> None:
        """Allocates the KV and registers it with an agent, which the service owns once it runs."""
        config, runner = self._config, self.runner
        pool = runner.allocate(num_blocks).pool
        runner.capture_graphs()
        cuda = pool.device.type == "cuda"
        if cuda:
            rehearse(runner)
        else:
            PrefaultThread(pool).start()
        agent = NixlAgent(
            f"{config.engine_id}-{self._rank}",
            device_id=pool.device_id if cuda else None,
            set_device=torch.cuda.set_device,
        )
        compat = _compat(config, self._model_config)
        self.context = RankContext(config, self._rank, pool, agent, compat, runner.stepping)
        self.service = self._factory.make_service(self.context)
        self.metadata = describe(pool, self._rank, agent.metadata())

    def ready(self) -> None:
        """Requests come from now on. What is there by now stays: looking through it for garbage
        would hold up steps."""
        KERNELS.ready()
        gc.freeze()


def pool_size(
    config: EngineConfig, model_config: ModelConfig, runner: ModelRunner, factory: ConnectorFactory
) -> PoolSize:
    if config.device == "cuda":
        free_bytes = kv_budget_bytes(runner) - factory.reserved_bytes(config)
    else:
        free_bytes = free_host_bytes() // config.tp
    return size_pool(
        config,
        block_bytes=runner.layout(num_blocks=2).block_bytes,
        model_max_len=model_config.max_position,
        free_bytes=free_bytes,
    )


def _parallel(
    config: EngineConfig, rank: int, port: int, on_listening: Callable[[int], None] | None
) -> Parallel:
    if config.tp == 1:
        return Parallel(0, 1)
    device = f"cuda:{config.devices[rank]}" if config.device == "cuda" else config.device
    return Parallel.connect(
        rank,
        config.tp,
        host=config.store_host,
        port=port,
        device=device,
        dcp=config.dcp,
        on_listening=on_listening,
    )


def _compat(config: EngineConfig, model_config: ModelConfig) -> CompatRecord:
    return CompatRecord(
        model_fingerprint=fingerprint(
            model_config, config.model_dir, load_format=config.load_format, seed=config.seed
        ),
        kv_dtype=config.kv_dtype,
        num_layers=model_config.num_layers,
        total_kv_heads=model_config.kv_heads_total,
        num_components=model_config.kv_components,
        head_dim=model_config.kv_dim,
        rope=model_config.rope_canonical,
        kv_scales=tuple(config.kv_scales),
    )
