"""The process of one rank: loads its shard of the model, allocates KV, and runs steps.

engine/process/launch.py starts this process as `python -m engine.worker.worker --rank R
--sockets N ...`, with the file descriptors of inherited sockets. The EngineConfig is
passed as JSON on standard input instead of the command line, because it contains the
cluster secret. Every rank exits when its parent exits.
"""

import argparse
import logging
import socket
import sys

from engine.config import EngineConfig
from engine.worker.compile.launch import start_shadow
from engine.worker.kernel_watch import set_kernel_cache
from protocol.process import lifecycle
from protocol.process.alarm import end_on_alarm
from protocol.process.logging import setup_logging
from protocol.process.vital_threads import end_with_vital_threads


def main() -> None:
    """Runs one rank of an engine; exits with status 1 if the rank fails."""
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
    shadow = None
    if config.device == "cuda":
        set_kernel_cache()
        if rank == config.node_ranks[0]:
            shadow = start_shadow(config)
    # Imported only after the shadow process was started: this import takes seconds,
    # during which the shadow imports its own modules.
    from engine.worker.rank_process import run_rank

    code = run_rank(config, rank, sockets, shadow)
    # Exit directly: the teardown of NIXL and UCX during the interpreter's shutdown can
    # crash after all work is done.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    lifecycle.exit_now(code)


if __name__ == "__main__":
    main()
