"""Counts the GPU kernels that this process loads before the engine is ready, and logs
each kernel that it loads later as an error.

A kernel that is compiled while requests wait delays all these requests for seconds.
Every kernel that requests can need therefore runs once before a server is ready
(engine/worker/warm_up.py). The errors name the kernels that the warm-up missed.
"""

import contextlib
import logging
import os
from typing import Any

from protocol.settings.machine import cache_dir

logger = logging.getLogger("baton.engine")


class KernelWatch:
    """Counts the kernels that one process loads.

    Attributes:
        is_ready: whether the engine is ready. Requests then wait for each kernel that
            is loaded.
        num_at_start: kernels loaded before the engine was ready.
        num_late: kernels loaded after the engine was ready.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self.num_at_start = 0
        self.num_late = 0

    def record(self, name: str) -> None:
        """Counts a kernel or module that is about to be loaded, and logs it as an error
        if the engine is ready. A kernel that is not in the cache is compiled as
        well."""
        if not self.is_ready:
            self.num_at_start += 1
            logger.debug("kernel %s", name)
            return
        self.num_late += 1
        logger.error(
            "kernel %s is loaded, perhaps compiled, while requests wait, because the "
            "warm-up did not run it before this server was ready; please report this "
            "line with the server's options and the request",
            name,
        )


KERNELS = KernelWatch()


def set_kernel_cache() -> None:
    """Makes Triton and FlashInfer cache compiled kernels under `~/.cache`, or in the
    folder that BATON_CACHE names.

    Must be called before Triton or FlashInfer is imported. Cached kernels never go
    stale. Triton names a kernel by a digest of everything that the kernel depends on.
    FlashInfer names a kernel by FlashInfer's version and the GPU.
    """
    # Without a home folder, the compilers choose their own folders or report an error.
    with contextlib.suppress(OSError):
        folder = str(cache_dir())
        os.environ.setdefault("TRITON_CACHE_DIR", f"{folder}/triton")
        # FlashInfer's own default is ~/.cache/flashinfer.
        if "BATON_CACHE" in os.environ:
            os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", folder)


def install_kernel_hooks() -> None:
    """Makes Triton and FlashInfer report to KERNELS every kernel that they load."""
    from triton import knobs  # imported here, because only GPU machines have triton

    from attention.registry import watch_modules

    def record_load(_module: Any, _function: Any, name: str, *_: Any) -> None:
        KERNELS.record(name)

    def record_compilation(*, src: Any, cache_hit: bool, times: Any, **_: Any) -> None:
        if not cache_hit:
            logger.debug("compiled %s in %.2f s", src.name, times.total / 1e6)

    knobs.compilation.listener = record_compilation
    knobs.runtime.kernel_load_start_hook.add(record_load)
    watch_modules(KERNELS.record)
