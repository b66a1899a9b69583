"""FlashInfer's compiled modules: made side by side before the first step needs one, and watched.

Left to themselves, modules are compiled one after the other, each when it is first called. They are
kept in `~/.cache/flashinfer`, by version and GPU architecture; FLASHINFER_WORKSPACE_BASE replaces
the home directory in that.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from flashinfer.jit import core, env, gen_batch_mla_module, gen_batch_prefill_module
from flashinfer.jit.attention import modules as generators
from flashinfer.utils import is_sm90a_supported

from attention.support import LATENT_DIM, ROPE_DIM, Wanted

logger = logging.getLogger("baton.engine")

_BYTES_OF_A_COMPILER: Final = 4 * 2**30  # of memory, ample


def modules_for(wanted: Wanted, device: torch.device) -> dict[str, Any]:
    """What steps over such a pool load: FlashInfer's JitSpecs, by short names of ours. One that is
    forgotten here is compiled all the same, later and by itself."""
    q, kv = (getattr(torch, name) for name in (wanted.dtype, wanted.kv_dtype))
    hopper = is_sm90a_supported(device)
    if wanted.is_latent:
        backend, sizes = "fa3" if hopper else "fa2", (LATENT_DIM, ROPE_DIM, False)
        attention = gen_batch_mla_module(backend, q, q, q, torch.int32, *sizes)
        return {f"{backend} for latents": attention}
    found = {}
    for window, soft_cap in wanted.kinds:
        # No position encoding, and no 16-bit products of queries and keys.
        options = (
            torch.int32,
            wanted.head_dim,
            wanted.head_dim,
            0,
            window,
            soft_cap,
            False,
        )
        names = [
            name for name, has in (("window", window), ("soft cap", soft_cap)) if has
        ]
        suffix = " with " + " and ".join(names) if names else ""
        if not hopper or kv != q:
            module = generators._gen_batch_prefill_primary_module(
                "fa2", q, kv, q, *options
            )
            found[f"fa2{suffix}"] = module
        if hopper:
            found[f"fa3{suffix}"] = gen_batch_prefill_module("fa3", q, q, q, *options)
    return found


def compile_missing(modules: Mapping[str, Any], free_bytes: int) -> None:
    """Compiles, all at once, those that are not there yet. Other processes may do the same: each
    module is compiled by one of them.

    Args:
        free_bytes: of this machine's memory.
    """
    missing = [name for name, spec in modules.items() if not spec.is_compiled]
    if not missing:
        return
    logger.info(
        "compiling the attention modules %s into %s, once: this takes a minute or two, and "
        "`baton warm` does it ahead",
        ", ".join(missing),
        env.FLASHINFER_JIT_DIR,
    )
    jobs = max(1, free_bytes // _BYTES_OF_A_COMPILER // len(missing))
    if jobs < (os.cpu_count() or 1):
        os.environ.setdefault("MAX_JOBS", str(jobs))  # of each module
    with ThreadPoolExecutor(len(missing), "compile") as pool:
        list(pool.map(lambda name: _compile(name, modules[name]), missing))


def _compile(name: str, spec: Any) -> None:
    started_s = time.monotonic()
    spec.build(need_lock=True)
    logger.info("compiled %s in %.0f s", name, time.monotonic() - started_s)


def on_load(told: Callable[[str], None]) -> None:
    """Has `told` called with the name of every module that this process loads, before it does."""
    load = core.JitSpec.build_and_load

    def build_and_load(spec: Any) -> Any:
        told(spec.name)
        return load(spec)

    core.JitSpec.build_and_load = build_and_load
