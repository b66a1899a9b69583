"""Attention backends by name."""

from collections.abc import Callable

import torch

from attention.base import AttentionBackend
from attention.support import DEFAULT_LIMITS, StepLimits, chosen
from attention.torch_backend import TorchBackend
from kvcache.pool import KVPool


class BackendMissing(ValueError):
    """A backend whose package is not installed; the message says how to get it."""


def create_backend(
    name: str,
    pool: KVPool,
    *,
    num_q_heads: int,
    head_dim: int,
    scale: float,
    dtype: torch.dtype | None = None,
    limits: StepLimits = DEFAULT_LIMITS,
) -> AttentionBackend:
    """The backend `name` over `pool`; "auto" is flashinfer on a GPU and torch elsewhere.

    Args:
        dtype: of the queries; the pool's where not given.
        limits: of the steps to come.

    Raises:
        ValueError: an unknown name, a pool that the backend cannot read, or a missing package.
    """
    make = backend_class(name, pool.device.type, pool.layout.num_components)
    sized = {} if make is TorchBackend else {"limits": limits}  # that one takes what it needs
    return make(pool, num_q_heads=num_q_heads, head_dim=head_dim, scale=scale, dtype=dtype, **sized)


def backend_class(name: str, device: str, num_components: int) -> Callable[..., AttentionBackend]:
    """What makes the backend `name` over pools on `device`: see create_backend.

    Args:
        device: "cpu" or "cuda".
        num_components: of the pool.

    Raises:
        BackendMissing: its package cannot be imported.
        ValueError: an unknown name.
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
