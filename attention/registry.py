"""Attention backends by name."""

import torch

from attention.base import AttentionBackend
from attention.torch_backend import TorchBackend
from kvcache.pool import KVPool

NAMES = ("auto", "torch")


def create_backend(
    name: str,
    pool: KVPool,
    *,
    num_q_heads: int,
    head_dim: int,
    scale: float,
    dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """The backend `name` over `pool`; "auto" takes the fastest one that works here.

    Args:
        dtype: of the queries; the pool's where not given.

    Raises:
        ValueError: an unknown name, or a pool that the backend cannot read.
    """
    if name not in NAMES:
        raise ValueError(f"attention_backend={name!r} is not known: use one of {', '.join(NAMES)}")
    return TorchBackend(pool, num_q_heads=num_q_heads, head_dim=head_dim, scale=scale, dtype=dtype)
