"""The process of one rank: loads its shard, allocates its KV, then leads or follows.

Started as `python -m engine.worker.worker --rank R --sockets N ...`, by the numbers of sockets that
it inherits, with the EngineConfig as JSON on its standard input: it holds the cluster secret. Rank
0 talks to the HTTP process and decides; the others execute what it sends. All watch their parent
and end with it.
"""

import argparse
import logging
import socket
import sys

import torch

from engine.config import EngineConfig
from engine.geometry import read_config
from engine.worker.kernel_watch import keep_kernels, watch_kernels
from engine.worker.leader import lead
from engine.worker.load import CannotStart, check_devices, reason_of, starting
from engine.worker.rank import Rank
from engine.worker.ranks import RankLinks
from protocol.process import lifecycle
from protocol.process.lifecycle import (
    end_on_alarm,
    end_with_vital_threads,
    ignore_alarm,
)
from protocol.process.logging import setup_logging

logger = logging.getLogger("baton.engine")


def main() -> None:
    """Runs one rank of an engine until it is told to stop; exits non-zero with a reason if it
    cannot go on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--sockets", type=int, nargs="+", required=True)
    given = parser.parse_args()
    rank, sockets = (
        given.rank,
        [socket.socket(fileno=number) for number in given.sockets],
    )
    lifecycle.watch_parent(number=lifecycle.ALARM)
    end_with_vital_threads()
    end_on_alarm()
    config = EngineConfig.model_validate_json(sys.stdin.buffer.read())
    setup_logging(config.role, rank=rank, level=config.log_level)
    if config.threads:
        torch.set_num_threads(config.threads)
    code = 0
    try:
        with starting():
            check_devices(config)
        if config.device == "cuda":
            keep_kernels()
            watch_kernels()
        if rank:
            _follow(config, rank, sockets)
        else:
            lead(config, sockets[0], sockets[1:])
    except SystemExit:
        logger.info("rank %d is told to end", rank)
    except Exception as error:
        ignore_alarm()
        code = 1
        if not isinstance(error, CannotStart):
            logger.exception("rank %d ends", rank)
        lifecycle.report_failure(reason_of(error))
    # Tearing down NIXL and UCX from interpreter shutdown can crash after everything is done.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    lifecycle.exit_now(code)


def _follow(config: EngineConfig, number: int, sockets: list[socket.socket]) -> None:
    links = RankLinks(number, sockets)
    with starting():
        model_config = read_config(config.model_dir, config)
        rank = Rank(config, model_config, number, links)
    rank.ready()
    try:
        links.follow(rank.runner)
    except Exception as error:
        rank.blame(error)
        raise
    finally:
        rank.service.close()
        links.close()


if __name__ == "__main__":
    main()
