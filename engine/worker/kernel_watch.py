"""Watches kernels that are compiled or loaded for a GPU. Before the engine is ready they
are counted; afterwards each is reported as an error.

A kernel that is compiled while requests wait delays all of them for seconds. Every
kernel that requests can need therefore runs once before a server is ready
(engine/worker/warm_up.py). A kernel that the warm-up missed is named here.
"""

import contextlib
import logging
import os
from typing import Any

from protocol.settings.machine import cache_dir

logger = logging.getLogger("baton.engine")


class KernelWatch:
    """The kernels that one process loads.

    Attributes:
        is_ready: whether requests may wait for what is loaded from now on.
        num_at_start: kernels loaded before that.
        num_late: kernels loaded since then.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self.num_at_start = 0
        self.num_late = 0

    def record(self, name: str) -> None:
        """A kernel or module is about to be loaded. It is compiled before, unless it is
        in the cache."""
        if not self.is_ready:
            self.num_at_start += 1
            logger.debug("kernel %s", name)
            return
        self.num_late += 1
        logger.error(
            "kernel %s is loaded, perhaps compiled, while requests wait: the warm-up "
            "should have run it before this server was ready; please report this line "
            "with the options and the request",
            name,
        )


KERNELS = KernelWatch()


def set_kernel_cache() -> None:
    """Has compiled kernels cached under `~/.cache`, or in the folder of BATON_CACHE.

    Must be called before anything imports the compilers. Both name cached kernels by
    all that they depend on: Triton by a digest, FlashInfer by its version and the GPU.
    """
    # Without a home folder, the compilers choose their own folders or report an error.
    with contextlib.suppress(OSError):
        folder = str(cache_dir())
        os.environ.setdefault("TRITON_CACHE_DIR", f"{folder}/triton")
        # FlashInfer's own default is ~/.cache/flashinfer.
        if "BATON_CACHE" in os.environ:
            os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", folder)


def watch_kernels() -> None:
    """Records in KERNELS what Triton and FlashInfer load in this process."""
    from triton import knobs  # only installed on GPU machines

    from attention.registry import watch_modules

    def record_load(_module: Any, _function: Any, name: str, *_: Any) -> None:
        KERNELS.record(name)

    knobs.runtime.kernel_load_start_hook.add(record_load)
    watch_modules(KERNELS.record)
