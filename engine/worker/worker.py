"""The process of one rank: loads its shard, allocates its KV, then leads or follows.

engine/process/launch.py starts it as `python -m engine.worker.worker --rank R --sockets
N ...`, with the file descriptors of inherited sockets. The EngineConfig comes as JSON
on standard input instead of the command line, because it contains the cluster secret.
Rank 0 exchanges messages with the HTTP process and plans the steps; the other ranks
execute the steps that rank 0 sends. Every rank exits when its parent exits.
"""

import argparse
import logging
import socket
import sys

import torch

from engine.config import EngineConfig
from engine.geometry import read_config
from engine.worker.kernel_watch import install_kernel_hooks, set_kernel_cache
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
from protocol.process.alarm import end_on_alarm, ignore_alarm
from protocol.process.logging import setup_logging
from protocol.process.vital_threads import end_with_vital_threads

logger = logging.getLogger("baton.engine")


def main() -> None:
    """Runs one rank of an engine until a signal, the HTTP process or rank 0 stops it.
    If the rank fails, reports the reason and exits with status 1."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--sockets", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    rank = arguments.rank
    sockets = [socket.socket(fileno=number) for number in arguments.sockets]
    lifecycle.watch_parent(number=lifecycle.ALARM)
    end_with_vital_threads()
    end_on_alarm()
    config = EngineConfig.model_validate_json(sys.stdin.buffer.read())
    setup_logging(
        config.role, rank=rank, level=config.log_level, log_format=config.log_format
    )
    if config.threads:
        torch.set_num_threads(config.threads)
    code = 0
    try:
        with explaining_failures():
            check_devices(config)
        if config.device == "cuda":
            set_kernel_cache()
            install_kernel_hooks()
        if rank:
            _follow(config, rank, sockets)
        else:
            lead(config, sockets[0], sockets[1:])
    except SystemExit:
        logger.info("rank %d received a signal to stop", rank)
    except Exception as error:
        ignore_alarm()
        code = 1
        if not isinstance(error, CannotStart):
            logger.exception("rank %d failed", rank)
        lifecycle.report_failure(describe_failure(error))
    # Exit directly: the teardown of NIXL and UCX during the interpreter's shutdown can
    # crash after all work is done.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    lifecycle.exit_now(code)


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


if __name__ == "__main__":
    main()
