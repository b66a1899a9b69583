"""One Triton kernel that scales, clamps and stores a step's keys and values in an FP8 pool.

In torch it would be six small kernels per layer, which would slow down a decode step.
"""

from typing import Any

import torch
import triton
import triton.language as tl


def _store(  # type: ignore[no-untyped-def]
    keys, values, slots, key_cache, value_cache, key_scale, value_scale, key_factor, value_factor,
    block_size, key_token, value_token, cache_block, cache_head, cache_token,
    DIM: tl.constexpr, READ_BACK: tl.constexpr,
):  # fmt: skip
    """One head of one token; names of the form x_axis are strides in elements."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, DIM)
    slot = tl.load(slots + token).to(tl.int64)
    place = slot // block_size * cache_block + head * cache_head
    place += slot % block_size * cache_token + column
    key_at = keys + token * key_token + head * DIM + column
    value_at = values + token * value_token + head * DIM + column
    # The conversion to FP8 saturates.
    key = (tl.load(key_at).to(tl.float32) * key_factor).to(key_cache.dtype.element_ty)
    value = (tl.load(value_at).to(tl.float32) * value_factor).to(value_cache.dtype.element_ty)
    tl.store(key_cache + place, key)
    tl.store(value_cache + place, value)
    if READ_BACK:
        tl.store(key_at, (key.to(tl.float32) * key_scale).to(keys.dtype.element_ty))
        tl.store(value_at, (value.to(tl.float32) * value_scale).to(values.dtype.element_ty))


_store_kernel: Any = triton.jit(_store)


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[float, float],
    *,
    read_back: bool = False,
) -> None:
    """Stores a step's tokens.

    Args:
        read_back: whether keys and values become, in place, what is stored of them.
        keys, values: [T, H, D], heads and elements contiguous; D a power of 2.
        slots: int32 [T].
        caches: float8_e4m3fn [B, H, N, D] of keys and of values, with equal strides.
    """
    num_tokens, num_heads, head_dim = keys.shape
    for rows in (keys, values):
        assert rows.stride()[1:] == (head_dim, 1), rows.stride()
    assert caches[0].stride() == caches[1].stride()
    block, head, token, _ = caches[0].stride()
    _store_kernel[(num_tokens, num_heads)](
        keys, values, slots, *caches, *scales, *(1.0 / scale for scale in scales),
        caches[0].shape[2], keys.stride(0), values.stride(0), block, head, token,
        DIM=head_dim, READ_BACK=read_back, num_warps=1,
    )  # fmt: skip
