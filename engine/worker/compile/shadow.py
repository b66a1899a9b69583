"""Finds the Triton kernels that a rank is going to need, and lets other processes
compile them. This module runs in its own process, the shadow of the rank.

Triton compiles a kernel at its first launch. That takes about 0.3 s, most of it in
Python, so threads would not help. The 52 kernels of an 8B model with FP8 weights take
17 s one after the other. This process makes the same model as the rank, but with random
weights and only the first layers, and runs the steps of the warm-up without launching
kernels. Triton reports each kernel that it would have to compile. While this process
runs, the rank imports its modules. The rank then finds the kernels in Triton's cache on
disk.

This process only saves time: the rank compiles every kernel that it does not find in
the cache.
"""

import logging
import os
import sys
import time

from engine.config import EngineConfig
from engine.worker.compile.processes import KernelCompilers, KernelRequest
from protocol.process import lifecycle
from protocol.process.logging import setup_logging

logger = logging.getLogger("baton.engine")

# Maximum number of compiling processes. A model needs about 60 kernels, so more
# processes would compile fewer than eight each, and each process takes 0.5 GiB of
# memory.
_MAX_PROCESSES = 8


def main() -> None:
    """Compiles the kernels of the rank whose EngineConfig is on standard input."""
    lifecycle.watch_parent()
    config = EngineConfig.model_validate_json(sys.stdin.buffer.read())
    setup_logging(config.role, level=config.log_level, log_format=config.log_format)
    num_processors = len(os.sched_getaffinity(0))
    compilers = KernelCompilers(max(1, min(_MAX_PROCESSES, num_processors - 2)))
    started_s = time.monotonic()
    requests: list[KernelRequest] = []

    def record(request: KernelRequest) -> None:
        requests.append(request)
        compilers.submit(request)

    # Imported here, while the compiling processes import their modules, because these
    # imports take seconds. At the top of this module they would delay the compiling
    # processes, which import this module, too.
    from engine.worker.compile.shadow_model import run_steps
    from engine.worker.compile.skipping import skipping_kernels

    imported_s = time.monotonic()
    with skipping_kernels(record):
        run_steps(config)
    recorded_s = time.monotonic()
    num_compiled = compilers.wait()
    logger.info(
        "compiled %d of %d kernels: %.1f s for imports, %.1f s to find the kernels, "
        "%.1f s to finish compiling",
        num_compiled,
        len(requests),
        imported_s - started_s,
        recorded_s - imported_s,
        time.monotonic() - recorded_s,
    )
    compilers.close()
    lifecycle.exit_now(0)


if __name__ == "__main__":
    main()
