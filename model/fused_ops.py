"""Fused kernels for the decoder's small operations, on NVIDIA GPUs, in 16 bits.

A decode step of a small batch is bound by reading weights, so every further kernel and every
further pass over activations counts. Layers ask `works` once, when they are made, and use plain
torch if it says no: on the CPU or in float32.
"""

import functools
from typing import Any, Final

import torch
from torch import Tensor

_DTYPES: Final = (torch.bfloat16, torch.float16)
_ROPE_HEAD_DIMS: Final = (64, 128, 256)


@functools.cache
def kernels() -> Any:
    """Our own Triton kernels. Imported on first use: Triton is where CUDA builds of torch are."""
    from model import fused_kernels

    return fused_kernels


@functools.cache
def _rotation() -> Any:
    """The kernel of the attention backends that rotate; imported on first use, too."""
    from attention import store_kernels

    return store_kernels


def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the functions below can be called for tensors there."""
    return device.type == "cuda" and dtype in _DTYPES


def rope_works(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    return head_dim in _ROPE_HEAD_DIMS and works(device, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, n] or [T, heads, n], whose last dimension is contiguous, normed over it."""
    return kernels().rms_norm(x, weight, eps)  # type: ignore[no-any-return]


def rotate_in_place(q: Tensor, k: Tensor, cos_sin: Tensor) -> None:
    """Rotates halves of q and k [T, heads, dim], views whose last two dimensions are contiguous.

    Args:
        cos_sin: float32 [T, dim], cosines then sines.
    """
    _rotation().rotate(q, k, cos_sin)


def first_largest(logits: Tensor) -> Tensor:
    """[R, V] of any float dtype, on a GPU -> int64 [R], the first of the largest; NaN is smaller
    than any number."""
    return kernels().first_largest(logits)  # type: ignore[no-any-return]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 n] -> silu of the first half times the second, [T, n]."""
    return kernels().silu_and_mul(gate_up)  # type: ignore[no-any-return]
