"""Attention backends by name."""

from collections.abc import Callable
from typing import Any

import torch

from attention.base import AttentionBackend
from attention.support import DEFAULT_LIMITS, StepLimits, Wanted, chosen
from attention.torch_backend import TorchBackend
from kvcache.pool import KVPool


class BackendMissing(ValueError):
    """A backend whose package is not installed; the message says how to get it."""


def create_backend(
    name: str,
    pool: KVPool,
    *,
    limits: StepLimits = DEFAULT_LIMITS,
    beside: AttentionBackend | None = None,
    **options: Any,
) -> AttentionBackend:
    """The backend `name` over `pool`; "auto" is flashinfer on a GPU and torch elsewhere.

    Args:
        limits: of the steps to come.
        beside: another one for them, which runs before or after it: they share a workspace.
        options: num_q_heads, head_dim and scale as of AttentionBackend; dtype, of the queries:
            the pool's where not given.

    Raises:
        UnsupportedPool: the backend cannot read it.
        BackendMissing: its package cannot be imported.
    """
    make = backend_class(name, pool.device.type, pool.layout.num_components)
    if make is TorchBackend:  # which takes what it needs
        return make(pool, **options)
    return make(pool, **options, limits=limits, beside=beside)


def backend_class(
    name: str, device: str, num_components: int
) -> Callable[..., AttentionBackend]:
    """What makes the backend `name` over pools on `device`: see create_backend.

    Args:
        device: "cpu" or "cuda".
        num_components: of the pool.

    Raises:
        BackendMissing: its package cannot be imported.
    """
    if chosen(name, device) == "torch":
        return TorchBackend
    # Imported here, because flashinfer is installed where there is a GPU, and takes seconds.
    try:
        if num_components == 1:
            from attention.flashinfer_mla import FlashInferMLABackend

            return FlashInferMLABackend
        from attention.flashinfer_backend import FlashInferBackend
    except ImportError as error:
        raise BackendMissing(
            f"the attention backend flashinfer is not here ({error}): install it with "
            "pip install flashinfer-python, or use --attention-backend torch"
        ) from error
    return FlashInferBackend


def compile_modules(
    name: str, wanted: Wanted, device: torch.device, *, free_bytes: int
) -> None:
    """Compiles what the backend `name` needs of a library's kernels and is not there yet: minutes,
    the first time. See flashinfer_jit.py for the rest."""
    if chosen(name, wanted.device) == "flashinfer":
        from attention import flashinfer_jit

        modules = flashinfer_jit.modules_for(wanted, device)
        flashinfer_jit.compile_missing(modules, free_bytes)


def watch_modules(told: Callable[[str], None]) -> None:
    """Has `told` called with the name of every module of a library's kernels that is loaded."""
    try:
        from attention import flashinfer_jit
    except ImportError:
        return  # not installed: nothing is loaded
    flashinfer_jit.on_load(told)
