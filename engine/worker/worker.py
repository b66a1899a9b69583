"""The process of one rank: loads its shard, allocates its KV, then leads or follows.

Started as `python -m <server>.role --rank R` with the EngineConfig as JSON on its standard input
(it holds the cluster secret, which does not belong on a command line). Rank 0 talks to the HTTP
process and decides; the others execute what it sends. All watch their parent and end with it.
"""

import argparse
import contextlib
import gc
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch

from engine.config import EngineConfig
from engine.core.connector import KVConnector
from engine.core.core import EngineCore
from engine.core.scheduler import Scheduler, SchedulerLimits
from engine.process.host_memory import free_host_bytes
from engine.process.transport import EngineTransport
from engine.text.grammar import GrammarCompiler
from engine.worker.kernel_watch import KERNELS, keep_kernels, watch_kernels
from engine.worker.memory import MemoryTooSmall, PoolSize, longest_sequence, size_pool
from engine.worker.ranks import Follower, Leader
from engine.worker.runner import ModelRunner, check_devices
from kvcache.blocks import BlockAllocator
from kvcache.pool import KVPool
from kvcache.prefault import PrefaultThread
from kvcache.prefix import PrefixIndex
from kvcache.stepping import Stepping
from kvcache.transfer.agent import TransferAgent
from kvcache.transfer.move.peer_memory import offer
from kvcache.transfer.nixl_agent import NixlAgent
from kvcache.transfer.processes import own_record
from kvcache.transfer.threads import allow_short_naps
from model.config import ModelConfig, load_config
from model.fingerprint import fingerprint
from model.parallel import Parallel
from protocol.handshake import (
    PROTOCOL_VERSION,
    CompatRecord,
    EngineMetadata,
    RankMetadata,
)
from protocol.ipc.listening import CannotListen
from protocol.messages import EngineReady
from protocol.process import lifecycle
from protocol.process.logging import setup_logging
from protocol.process.sigterm import end_on_sigterm, ignore_sigterm
from protocol.process.vital_threads import end_with_vital_threads

logger = logging.getLogger("baton.engine")


@dataclass(frozen=True)
class RankContext:
    """What a role finds on one rank once its KV is allocated."""

    config: EngineConfig
    rank: int
    pool: KVPool
    agent: TransferAgent
    compat: CompatRecord
    stepping: Stepping  # whether the rank computes


class RankService(ABC):
    """What a role runs on a rank beside the engine. Making it registers the rank's KV with the
    rank's agent, which the service owns from `start` on."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class ConnectorFactory(ABC):
    """Makes the role-specific parts of an engine process."""

    def reserved_bytes(self, config: EngineConfig) -> int:
        """What the service of a rank takes of its device's memory, beside the KV pool."""
        return 0

    @abstractmethod
    def make_service(self, context: RankContext) -> RankService:
        """Called on every rank, once."""

    @abstractmethod
    def make_role(
        self, context: RankContext, metadata: EngineMetadata, transport: EngineTransport
    ) -> KVConnector:
        """Called on rank 0, after `make_service`."""


def main(factory: ConnectorFactory) -> None:
    """Runs one rank of an engine until it is told to stop; exits non-zero with a reason if it
    cannot go on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    rank = parser.parse_args().rank
    lifecycle.watch_parent()
    end_with_vital_threads()
    end_on_sigterm()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    setup_logging(config.role, rank=rank, level=config.log_level)
    if config.threads:
        torch.set_num_threads(config.threads)
    code = 0
    try:
        with _starting():
            check_devices(config)
        if config.device == "cuda":
            keep_kernels()
            watch_kernels()
        _lead(config, factory) if rank == 0 else _follow(config, rank, factory)
    except SystemExit:
        logger.info("rank %d ends on SIGTERM", rank)
    except Exception as error:
        ignore_sigterm()
        code = 1
        if not isinstance(error, CannotStart):
            logger.exception("rank %d ends", rank)
        lifecycle.report_failure(_reason(error))
    # Tearing down NIXL and UCX from interpreter shutdown can crash after everything is done.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class CannotStart(Exception):
    """What an option, the model or this machine does not permit, in a sentence for the user."""


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Tells what explains itself, while starting, from our own bugs."""
    try:
        yield
    except (ValueError, MemoryTooSmall, CannotListen) as error:
        raise CannotStart(str(error)) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, CannotStart):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _lead(config: EngineConfig, factory: ConnectorFactory) -> None:
    transport = EngineTransport(config.http_address)
    leader = Leader(config.control_address, config.tp)
    try:
        with _starting():
            core, role, service, ready = _build_leader(config, factory, leader, transport)
    except Exception as error:
        ignore_sigterm()
        transport.send_failed(_reason(error))
        transport.close()
        raise
    KERNELS.ready()
    transport.send_ready(ready)
    allow_short_naps()
    gc.freeze()  # what is there by now stays: looking through it took milliseconds of some steps
    try:
        core.run()
    except Exception as error:
        leader.others.blame(error)
        transport.send_failed(_reason(error))
        raise
    finally:
        role.close()
        service.close()
        leader.close()
        transport.close()


def _build_leader(
    config: EngineConfig, factory: ConnectorFactory, leader: Leader, transport: EngineTransport
) -> tuple[EngineCore, KVConnector, RankService, EngineReady]:
    model_config = load_config(config.model_dir)
    grammars = GrammarCompiler(config.model_dir, model_config.vocab_size, transport.wake)
    parallel = _parallel(config, 0, 0, leader.share_port)
    runner = ModelRunner(config, model_config, parallel)
    size = _pool_size(config, model_config, runner, factory)
    num_blocks = leader.agree_on_blocks(size.num_blocks)
    max_len = longest_sequence(config, size, num_blocks, model_config.max_position)
    compat = _compat(config, model_config)
    context, service, own = _allocate(config, 0, runner, num_blocks, compat, factory)
    leader.runner = runner
    metadata = EngineMetadata(
        protocol_version=PROTOCOL_VERSION,
        engine_id=config.engine_id,
        incarnation=config.incarnation,
        compat=compat,
        tp_size=config.tp,
        dcp_size=config.dcp,
        ranks=leader.collect(own),
    )
    service.start()
    role = factory.make_role(context, metadata, transport)
    core = EngineCore(_scheduler(config, num_blocks, max_len), leader, role, transport, grammars)
    ready = EngineReady(
        num_blocks=num_blocks - 1,
        block_size=config.tokens_per_block,
        max_model_len=max_len,
        vocab_size=model_config.vocab_size,
        side_channel_port=role.side_channel_port(),
    )
    return core, role, service, ready


def _follow(config: EngineConfig, rank: int, factory: ConnectorFactory) -> None:
    follower = Follower(config.control_address, rank)
    with _starting():
        model_config = load_config(config.model_dir)
        runner = ModelRunner(config, model_config, _parallel(config, rank, follower.join()))
        size = _pool_size(config, model_config, runner, factory)
        num_blocks = follower.agree_on_blocks(size.num_blocks)
        compat = _compat(config, model_config)
        _, service, own = _allocate(config, rank, runner, num_blocks, compat, factory)
        service.start()
    gc.freeze()  # as on rank 0
    KERNELS.ready()
    follower.announce(own)
    try:
        follower.run(runner)
    except Exception as error:
        follower.others.blame(error)
        raise
    finally:
        service.close()
        follower.close()


def _parallel(
    config: EngineConfig, rank: int, port: int, on_listening: Callable[[int], None] | None = None
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


def _pool_size(
    config: EngineConfig, model_config: ModelConfig, runner: ModelRunner, factory: ConnectorFactory
) -> PoolSize:
    if config.device == "cuda":
        free_bytes = runner.kv_budget_bytes() - factory.reserved_bytes(config)
    else:
        free_bytes = free_host_bytes() // config.tp
    return size_pool(
        config,
        block_bytes=runner.layout(num_blocks=2).block_bytes,
        model_max_len=model_config.max_position,
        free_bytes=free_bytes,
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


def _allocate(
    config: EngineConfig,
    rank: int,
    runner: ModelRunner,
    num_blocks: int,
    compat: CompatRecord,
    factory: ConnectorFactory,
) -> tuple[RankContext, RankService, RankMetadata]:
    """Allocates a rank's KV, registers it with an agent, and says how to reach it."""
    pool = runner.allocate(num_blocks).pool
    runner.capture_graphs()
    cuda = pool.device.type == "cuda"
    if cuda:
        runner.rehearse()
    else:
        PrefaultThread(pool).start()
    agent = NixlAgent(
        f"{config.engine_id}-{rank}",
        device_id=pool.device_id if cuda else None,
        set_device=torch.cuda.set_device,
    )
    context = RankContext(config, rank, pool, agent, compat, runner.stepping)
    service = factory.make_service(context)
    own = RankMetadata(
        rank=rank,
        agent_metadata=agent.metadata(),
        base_address=pool.base_address,
        nbytes=pool.nbytes,
        device_id=pool.device_id,
        device_kind=config.device,
        layout=pool.layout.to_record(),
        extra=offer(pool),
        process=own_record(),
    )
    return context, service, own


def _scheduler(config: EngineConfig, num_blocks: int, max_model_len: int) -> Scheduler:
    prefix: PrefixIndex | None = None
    allocator = BlockAllocator(num_blocks)
    if config.enable_prefix_caching:
        prefix = PrefixIndex(allocator, config.tokens_per_block)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.tokens_per_block,
    )
    return Scheduler(limits, allocator, prefix)
