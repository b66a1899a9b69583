"""Watches what is compiled or loaded for a GPU: at start it is counted, afterwards it is an error.

A kernel that is compiled while requests wait stops all of them for seconds. What requests can need
runs once before a server is ready (engine/worker/rehearsal.py); whatever that missed is named here.
"""

import contextlib
import logging
import os
from typing import Any

from protocol.settings.machine import cache_dir

logger = logging.getLogger("baton.engine")


class KernelWatch:
    """Of one process."""

    def __init__(self) -> None:
        self.num_before = 0  # the engine was ready
        self.num_after = 0
        self.is_ready = (
            False  # once it is, requests wait for what is compiled or loaded
        )

    def saw(self, name: str) -> None:
        """A kernel or module is being loaded, compiled before if it was not kept."""
        if not self.is_ready:
            self.num_before += 1
            logger.debug("kernel %s", name)
            return
        self.num_after += 1
        logger.error(
            "kernel %s is loaded, perhaps compiled, while requests wait: it should have run before "
            "this server was ready; please report this line with the options and the request",
            name,
        )


KERNELS = KernelWatch()


def keep_kernels() -> None:
    """Has compiled kernels kept under `~/.cache`, or where BATON_CACHE says; to be called before
    anything imports their compilers. Both name what they keep by all that it depends on: Triton by
    a digest, FlashInfer by its version and the GPU."""
    with contextlib.suppress(
        OSError
    ):  # no home: they find places of their own, or say so
        folder = str(cache_dir())
        os.environ.setdefault("TRITON_CACHE_DIR", f"{folder}/triton")
        if "BATON_CACHE" in os.environ:  # else it is ~/.cache/flashinfer
            os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", folder)


def watch_kernels() -> None:
    """Has KERNELS told of what Triton and FlashInfer compile or load in this process."""
    from triton import knobs  # only GPU machines have it

    from attention.registry import watch_modules

    def loads(_module: Any, _function: Any, name: str, *_: Any) -> None:
        KERNELS.saw(name)

    knobs.runtime.kernel_load_start_hook.add(loads)
    watch_modules(KERNELS.saw)
