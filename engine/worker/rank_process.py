"""Runs one rank of an engine: rank 0 leads, the other ranks follow.

Rank 0 exchanges messages with the HTTP process and plans the steps; the other ranks
execute the steps that rank 0 sends.
"""

import logging
import socket

import torch

from engine.config import EngineConfig
from engine.geometry import read_config
from engine.worker.compile.launch import Shadow
from engine.worker.compile.processes import compute_cache_keys
from engine.worker.kernel_watch import install_kernel_hooks
from engine.worker.leader import lead
from engine.worker.load import (
    CannotStart,
    check_devices,
    describe_failure,
    explaining_failures,
)
from engine.worker.rank import Rank
from engine.worker.ranks import RankLinks, let_other_nodes_report
from protocol.process import lifecycle
from protocol.process.alarm import ignore_alarm

logger = logging.getLogger("baton.engine")


def run_rank(
    config: EngineConfig,
    rank: int,
    sockets: list[socket.socket],
    shadow: Shadow | None,
) -> int:
    """Runs a rank until a signal, the HTTP process or rank 0 stops it.

    Args:
        sockets: on rank 0, the socket to the HTTP process, followed by the sockets to
            the other ranks; on another rank, the sockets to rank 0. See RankLinks.
        shadow: the process that compiles kernels for this rank; None if there is none.

    Returns:
        The exit status of the process: 1 if the rank failed, else 0. The reason of a
        failure has been reported.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        with explaining_failures():
            check_devices(config)
        if config.device == "cuda":
            install_kernel_hooks()
            compute_cache_keys()
        if shadow is not None:
            shadow.wait()
        if rank:
            _follow(config, rank, sockets)
        else:
            lead(config, sockets[0], sockets[1:])
    except SystemExit:
        logger.info("rank %d received a signal to stop", rank)
    except Exception as error:
        ignore_alarm()
        if not isinstance(error, CannotStart):
            logger.exception("rank %d failed", rank)
        lifecycle.report_failure(describe_failure(error))
        return 1
    return 0


def _follow(config: EngineConfig, number: int, sockets: list[socket.socket]) -> None:
    links = RankLinks(number, sockets)
    try:
        with explaining_failures():
            model_config = read_config(config.model_dir, config)
            rank = Rank(config, model_config, number, links)
    except Exception as error:
        if config.nnodes > 1 and not isinstance(error, CannotStart):
            let_other_nodes_report()
        raise
    rank.set_ready()
    try:
        links.run_steps(rank.runner)
    except Exception as error:
        rank.raise_if_rank_lost(error)
        raise
    finally:
        rank.service.close()
        links.close()
