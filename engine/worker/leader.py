"""Rank 0 of an engine: builds the engine together with the other ranks, then runs the
engine core."""

from collections.abc import Sequence
from socket import socket

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.core.core_grammar import CoreGrammars
from engine.core.scheduler import Scheduler, SchedulerLimits
from engine.geometry import read_config
from engine.process.transport import EngineTransport
from engine.speculation.build import make_speculator
from engine.text.grammar import GrammarCompiler
from engine.worker.load import CannotStart, describe_failure, explaining_failures
from engine.worker.rank import Rank
from engine.worker.ranks import RankExecutor, RankLinks, let_other_nodes_report
from protocol.ipc.wire import allow_short_naps
from protocol.messages import EngineFailed, EngineProgress, EngineReady
from protocol.pairing import kv_digest
from protocol.process.alarm import ignore_alarm


def lead(
    config: EngineConfig, http_socket: socket, rank_sockets: Sequence[socket]
) -> None:
    """Runs rank 0 until the HTTP process closes its end of `http_socket`.

    Args:
        http_socket: connects this rank with the HTTP process.
        rank_sockets: connect this rank with the other ranks; see RankLinks.
    """
    transport = EngineTransport(http_socket)
    links = RankLinks(0, rank_sockets)
    try:
        with explaining_failures():
            core, rank, ready = _build(config, links, transport)
    except Exception as error:
        ignore_alarm()
        if config.nnodes > 1 and not isinstance(error, CannotStart):
            let_other_nodes_report()
        transport.send(EngineFailed(describe_failure(error)))
        transport.close()
        raise
    rank.set_ready()
    transport.send(ready)
    allow_short_naps()
    try:
        core.run()
    except Exception as error:
        rank.raise_if_rank_lost(error)
        transport.send(EngineFailed(describe_failure(error)))
        raise
    finally:
        core.connector.close()
        rank.service.close()
        links.close()
        transport.close()


def _build(
    config: EngineConfig, links: RankLinks, transport: EngineTransport
) -> tuple[EngineCore, Rank, EngineReady]:
    def report(progress: str) -> None:
        transport.send(EngineProgress(progress))

    model_config = read_config(config.model_dir, config)
    compiler = GrammarCompiler(
        config.model_dir, model_config.vocab_size, transport.wake
    )
    rank = Rank(config, model_config, 0, links, report)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=rank.decide_max_model_len(),
        block_size=config.tokens_per_block,
        step_target=config.step_target,
        groups=rank.runner.groups,
        max_proposals=config.max_step_proposals,
    )
    connector = rank.service.make_connector(
        rank.engine_metadata(), transport.wake, limits.max_model_len
    )
    executor = RankExecutor(rank.runner, links)
    times = executor.measure_steps(limits.step_target)
    core = EngineCore(
        Scheduler(
            limits,
            rank.num_blocks,
            caches_prefixes=config.enable_prefix_caching,
            step_times=times,
        ),
        executor,
        connector,
        transport,
        CoreGrammars(compiler, config.grammar_timeout_s),
        make_speculator(config, limits, executor, rank.draft),
        rank_stats=rank.stats,
    )
    ready = EngineReady(
        num_blocks=(rank.num_blocks - 1) // limits.groups.count,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=model_config.vocab_size,
        geometry={
            **config.geometry,
            "kv_digest": kv_digest(rank.compat, config.kv_convert),
            "side_channel_port": rank.service.side_channel_port,
        },
    )
    return core, rank, ready
