"""Creates attention backends by name, and compiles their kernels."""

from collections.abc import Callable
from typing import Any

import torch

from attention.base import AttentionBackend
from attention.support import (
    DEFAULT_LIMITS,
    AttentionSpec,
    StepLimits,
    resolve_backend_name,
)
from attention.torch_backend import TorchBackend
from kvcache.pool import KVPool


class BackendMissing(ValueError):
    """A backend's package cannot be imported; the message says how to install it."""


def create_backend(
    name: str,
    pool: KVPool,
    *,
    limits: StepLimits = DEFAULT_LIMITS,
    shared_with: AttentionBackend | None = None,
    **options: Any,
) -> AttentionBackend:
    """Creates the backend `name` over `pool`.

    Args:
        name: "flashinfer", "torch" or "auto": flashinfer on a GPU and torch elsewhere.
        limits: The largest steps that will be planned.
        shared_with: A backend for the same steps. The new backend uses its workspace,
            so the two must not run concurrently.
        options: num_q_heads, head_dim, scale and layers, as in AttentionBackend; dtype:
            of the queries, by default the pool's.

    Raises:
        UnsupportedPool: The backend cannot read the pool.
        BackendMissing: The backend's package cannot be imported.
    """
    make = backend_class(name, pool.device.type, pool.layout.num_components)
    if make is TorchBackend:  # TorchBackend has no workspace to size or share
        return make(pool, **options)
    return make(pool, **options, limits=limits, shared_with=shared_with)


def backend_class(
    name: str, device: str, num_components: int
) -> Callable[..., AttentionBackend]:
    """Returns the class of a backend over pools on `device`.

    Args:
        name: As for create_backend.
        device: "cpu" or "cuda".
        num_components: Components of the pool's layout: 2 for keys and values, 1 for
            latents (MLA).

    Raises:
        BackendMissing: The backend's package cannot be imported.
    """
    if resolve_backend_name(name, device) == "torch":
        return TorchBackend
    # Imported here, because flashinfer is installed on GPU machines only and its import
    # takes seconds.
    try:
        if num_components == 1:
            from attention.flashinfer_mla import FlashInferMLABackend

            return FlashInferMLABackend
        from attention.flashinfer_backend import FlashInferBackend
    except ImportError as error:
        raise BackendMissing(
            f"attention backend flashinfer cannot be imported ({error}): install it "
            "with pip install flashinfer-python, or use --attention-backend torch"
        ) from error
    return FlashInferBackend


def compile_modules(
    name: str, spec: AttentionSpec, device: torch.device, *, free_bytes: int
) -> None:
    """Compiles those kernel modules of the backend `name` that are not compiled yet.

    Compiling all modules takes minutes. flashinfer_jit.py describes where compiled
    modules are cached.

    Args:
        spec: The pool and the queries that the modules serve.
        device: The GPU that will run the modules.
        free_bytes: Free memory of this machine, which bounds the compiler processes.
    """
    if resolve_backend_name(name, spec.device) == "flashinfer":
        from attention import flashinfer_jit

        modules = flashinfer_jit.modules_for(spec, device)
        flashinfer_jit.compile_missing(modules, free_bytes)


def are_modules_compiled(name: str, spec: AttentionSpec, device: torch.device) -> bool:
    """Returns whether all kernel modules of the backend `name` are compiled."""
    if resolve_backend_name(name, spec.device) != "flashinfer":
        return True
    from attention import flashinfer_jit

    modules = flashinfer_jit.modules_for(spec, device)
    return all(module.is_compiled for module in modules.values())


def watch_modules(on_load: Callable[[str], None]) -> None:
    """Makes this process call `on_load` with the name of each kernel module it loads.

    Each call happens just before a backend loads the module.
    """
    try:
        from attention import flashinfer_jit
    except ImportError:
        return  # flashinfer cannot be imported, so no module is ever loaded
    flashinfer_jit.watch_loads(on_load)
