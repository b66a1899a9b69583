"""Compiles FlashInfer's modules ahead of the first step, in parallel.

By default FlashInfer compiles modules one after the other, each when it is first
called. It caches compiled modules in `~/.cache/flashinfer`, by version and GPU
architecture. The environment variable FLASHINFER_WORKSPACE_BASE replaces the home
directory in that path.
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

from attention.support import LATENT_DIM, ROPE_DIM, AttentionSpec

logger = logging.getLogger("baton.engine")

_COMPILER_BYTES: Final = 4 * 2**30  # memory of one compiler process, with a margin
_NO_POSITION_ENCODING: Final = 0


def modules_for(spec: AttentionSpec, device: torch.device) -> dict[str, Any]:
    """Returns the modules that steps with `spec` load: JitSpecs by short names.

    FlashInfer compiles any other module when that module is first called.
    """
    q_dtype = getattr(torch, spec.dtype)
    kv_dtype = getattr(torch, spec.kv_dtype)
    is_hopper = is_sm90a_supported(device)
    if spec.is_latent:
        backend = "fa3" if is_hopper else "fa2"
        module = gen_batch_mla_module(
            backend, q_dtype, q_dtype, q_dtype, torch.int32, LATENT_DIM, ROPE_DIM, False
        )
        return {f"{backend} for latents": module}
    # For each backend: the function that makes its module, and the dtype of its KV.
    variants = {}
    if not is_hopper or kv_dtype != q_dtype:
        variants["fa2"] = (generators._gen_batch_prefill_primary_module, kv_dtype)
    if is_hopper:
        variants["fa3"] = (gen_batch_prefill_module, q_dtype)
    modules = {}
    for has_window, has_soft_cap in spec.kinds:
        features = []
        if has_window:
            features.append("window")
        if has_soft_cap:
            features.append("soft cap")
        suffix = " with " + " and ".join(features) if features else ""
        for backend, (generate, stored_dtype) in variants.items():
            modules[f"{backend}{suffix}"] = generate(
                backend,
                q_dtype,
                stored_dtype,
                q_dtype,
                torch.int32,
                spec.head_dim,
                spec.head_dim,
                _NO_POSITION_ENCODING,
                has_window,
                has_soft_cap,
                False,  # products of queries and keys are not summed in 16 bits
            )
    return modules


def compile_missing(modules: Mapping[str, Any], free_bytes: int) -> None:
    """Compiles all modules that are not compiled yet, in parallel.

    Several processes may call this concurrently. A lock makes sure that only one of
    them compiles a module.

    Args:
        modules: JitSpecs by short names; see `modules_for`.
        free_bytes: Free memory of this machine, which bounds the compiler processes.
    """
    missing = [name for name, spec in modules.items() if not spec.is_compiled]
    if not missing:
        return
    logger.info(
        "compiling the attention modules %s into %s: this takes a minute or two, once; "
        "`baton warm` does it ahead of time",
        ", ".join(missing),
        env.FLASHINFER_JIT_DIR,
    )
    jobs = max(1, free_bytes // _COMPILER_BYTES // len(missing))
    if jobs < (os.cpu_count() or 1):
        # MAX_JOBS limits the compiler processes of each module, not of all modules.
        os.environ.setdefault("MAX_JOBS", str(jobs))
    with ThreadPoolExecutor(len(missing), "compile") as pool:
        list(pool.map(lambda name: _compile(name, modules[name]), missing))


def _compile(name: str, spec: Any) -> None:
    started_s = time.monotonic()
    spec.build(need_lock=True)
    logger.info("compiled %s in %.0f s", name, time.monotonic() - started_s)


def watch_loads(on_load: Callable[[str], None]) -> None:
    """Makes this process call `on_load` with a module's name before it is loaded."""
    load = core.JitSpec.build_and_load

    def build_and_load(spec: Any) -> Any:
        on_load(spec.name)
        return load(spec)

    core.JitSpec.build_and_load = build_and_load
