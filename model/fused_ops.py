"""Fused kernels for the decoder's small operations, on NVIDIA GPUs, in 16 bits: flashinfer's and,
for few rows, our own.

A decode step of a small batch is bound by reading weights, so every further kernel and every
further pass over activations counts. Layers ask `works` once, when they are made, and use plain
torch if it says no: on the CPU, in float32, or without flashinfer.
"""

import functools
from typing import Any, Final

import torch

from protocol.logging import get_logger

logger = get_logger(__name__)

_DTYPES: Final = (torch.bfloat16, torch.float16)
_ROPE_HEAD_DIMS: Final = (64, 128, 256)
_VECTOR_BYTES: Final = 16  # what the kernels load at a time


@functools.cache
def _flashinfer() -> Any:
    """The package, or None where it is not installed."""
    try:
        import flashinfer
        import flashinfer.activation
        import flashinfer.norm
        import flashinfer.rope
    except ImportError as error:
        logger.warning(
            "no fused kernels, steps are slower: flashinfer cannot be imported: %s; "
            "install it with pip install flashinfer-python",
            error,
        )
        return None
    return flashinfer


@functools.cache
def kernels() -> Any:
    """Our own Triton kernels. Imported on first use: Triton is where CUDA builds of torch are."""
    from model import fused_kernels

    return fused_kernels


@functools.cache
def one_row() -> Any:
    """Triton kernels for the products of one row; imported on first use, too."""
    from model import one_row

    return one_row


def one_row_works(weight: torch.Tensor, *, gated: bool = False) -> bool:
    """Whether `one_row().product` can take the matrix."""
    return works(weight.device, weight.dtype) and bool(one_row().works(weight, gated=gated))


@functools.cache
def gated_product() -> Any:
    """The Triton kernel for many rows of a gated product; imported on first use, too."""
    from model import gated_product

    return gated_product


def gated_rows_work(weight: torch.Tensor) -> bool:
    """Whether `gated_product().silu_product` can take the matrix."""
    return works(weight.device, weight.dtype) and bool(gated_product().works(weight))


def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the functions below can be called for tensors there."""
    return device.type == "cuda" and dtype in _DTYPES and _flashinfer() is not None


def works_for_width(weight: torch.Tensor, width: int) -> bool:
    """`works`, for rows of `width` elements like those of `weight`."""
    is_aligned = width * weight.element_size() % _VECTOR_BYTES == 0
    return is_aligned and works(weight.device, weight.dtype)


def rope_works(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    return head_dim in _ROPE_HEAD_DIMS and works(device, dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, n] or [T, heads, n], whose last dimension is contiguous, normed over it."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _flashinfer().norm.rmsnorm(x, weight, eps, out=out)  # type: ignore[no-any-return]


def rotate_in_place(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, rows: torch.Tensor
) -> None:
    """Rotates halves of q and k [T, heads, dim], strided views allowed.

    Args:
        cos_sin: float32 [n, dim], cosines then sines.
        rows: int32 [T], each token's row of cos_sin.
    """
    _flashinfer().rope.apply_rope_with_cos_sin_cache_inplace(
        rows, q, k, q.shape[-1], cos_sin, is_neox=True
    )


def first_largest(logits: torch.Tensor) -> torch.Tensor:
    """[R, V] of any float dtype, on a GPU -> int64 [R], the first of the largest; NaN is smaller
    than any number."""
    return kernels().first_largest(logits)  # type: ignore[no-any-return]


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 n] -> silu of the first half times the second, [T, n]."""
    if gate_up.shape[0] <= kernels().MAX_SILU_ROWS:
        return kernels().silu_and_mul(gate_up)  # type: ignore[no-any-return]
    return _flashinfer().activation.silu_and_mul(gate_up)  # type: ignore[no-any-return]
