"""Starts the process that compiles kernels for a rank, and waits for it."""

import logging
import os
import sys

from engine.config import EngineConfig
from protocol.process import lifecycle

logger = logging.getLogger("baton.engine")

# With fewer processors, the compiling processes would only delay the rank.
_MIN_PROCESSORS = 4
# Maximum wait for the shadow process. The process itself stops waiting for compilers a
# minute after it has found all kernels.
_TIMEOUT_S = 120.0


class Shadow:
    """The process that runs shadow.py for one rank."""

    def __init__(self, config: EngineConfig) -> None:
        self._child = lifecycle.spawn(
            [sys.executable, "-m", "engine.worker.compile.shadow"],
            name="kernels",
            stdin=config.model_dump_json().encode(),
            capture=False,
        )

    def wait(self) -> None:
        """Waits until the process has ended, at most _TIMEOUT_S. The rank compiles
        missing kernels itself."""
        if not self._child.exited.wait(_TIMEOUT_S):
            logger.warning("kernels were not compiled within %g s", _TIMEOUT_S)
            self._child.kill()
        elif self._child.process.returncode != 0:
            logger.warning(
                "kernels were not compiled ahead, so this start takes longer: %s",
                self._child.reason(),
            )


def start_shadow(config: EngineConfig) -> Shadow | None:
    """Starts the shadow process. Returns None if this host has too few processors."""
    if len(os.sched_getaffinity(0)) < _MIN_PROCESSORS:
        return None
    return Shadow(config)
