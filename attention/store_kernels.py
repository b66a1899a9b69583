"""Triton kernels that store a step's keys and values: rotated, or scaled and clamped to FP8.

Libraries take two kernels and two passes over the keys to rotate and store; torch would take six to
store FP8. With programmatic dependent launch a rotation starts before its predecessor has ended,
and waits before it reads anything; its successor may do the same.
"""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

_HEADS: Final = 8  # of one program


def _rotate_and_store(  # type: ignore[no-untyped-def]
    q, k, v, cos_sin, slots, keys, values,
    q_token, k_token, v_token, block_stride, head_stride, slot_stride, block_size,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    KEEP_K: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_parts: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (NUM_KV + HEADS - 1) // HEADS
    half = tl.arange(0, HALF)[None, :]
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    if STORE:
        slot = tl.load(slots + token).to(tl.int64)
        at = (slot // block_size) * block_stride + (slot % block_size) * slot_stride
    cos = tl.load(cos_sin + token * 2 * HALF + half)
    sin = tl.load(cos_sin + token * 2 * HALF + HALF + half)
    if part < q_parts:
        head = (part * HEADS + tl.arange(0, HEADS))[:, None]
        source = q + token * q_token + head * 2 * HALF + half
        low = tl.load(source, mask=head < NUM_Q, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=head < NUM_Q, other=0.0).to(tl.float32)
        dtype = q.dtype.element_ty
        tl.store(source, (low * cos - high * sin).to(dtype), mask=head < NUM_Q)
        tl.store(source + HALF, (high * cos + low * sin).to(dtype), mask=head < NUM_Q)
    elif part < q_parts + kv_parts:
        head = ((part - q_parts) * HEADS + tl.arange(0, HEADS))[:, None]
        source = k + token * k_token + head * 2 * HALF + half
        low = tl.load(source, mask=head < NUM_KV, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=head < NUM_KV, other=0.0).to(tl.float32)
        dtype = k.dtype.element_ty
        new_low, new_high = (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)
        if STORE:
            into = keys + at + head * head_stride + half
            tl.store(into, new_low, mask=head < NUM_KV)
            tl.store(into + HALF, new_high, mask=head < NUM_KV)
        if KEEP_K:
            tl.store(source, new_low, mask=head < NUM_KV)
            tl.store(source + HALF, new_high, mask=head < NUM_KV)
    elif STORE:
        head = ((part - q_parts - kv_parts) * HEADS + tl.arange(0, HEADS))[:, None]
        source = v + token * v_token + head * 2 * HALF + half
        into = values + at + head * head_stride + half
        tl.store(into, tl.load(source, mask=head < NUM_KV), mask=head < NUM_KV)
        tl.store(into + HALF, tl.load(source + HALF, mask=head < NUM_KV), mask=head < NUM_KV)


_kernel: Any = triton.jit(_rotate_and_store)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    also_k: bool = False,
) -> None:
    """Rotates q in place, and stores k, rotated, and v by slot.

    Args:
        q: [T, HQ, D]; k, v: [T, H, D]; views whose last two dimensions are contiguous.
        cos_sin: float32 [T, D], cosines then sines of half the elements each.
        slots: int32 [T].
        keys, values: [B, H, N, D], of equal strides, the last of them 1.
        also_k: whether k is to be rotated in place, too; else it stays as it is.
    """
    block_stride, head_stride, slot_stride, element_stride = keys.stride()
    assert keys.stride() == values.stride() and element_stride == 1, keys.stride()
    assert keys.dtype == k.dtype and v.stride()[1:] == (v.shape[2], 1), (keys.dtype, v.stride())
    strides = (block_stride, head_stride, slot_stride, keys.shape[2])
    _launch(q, k, cos_sin, (v, v.stride(0), slots, keys, values, strides), keep_k=also_k)


def rotate(q: Tensor, k: Tensor, cos_sin: Tensor) -> None:
    """Rotates q and k in place; as of `rotate_and_store`."""
    _launch(q, k, cos_sin, (None, 0, None, None, None, (0, 0, 0, 0)), keep_k=True)


def _launch(q: Tensor, k: Tensor, cos_sin: Tensor, stored: Any, *, keep_k: bool) -> None:
    v, v_token, slots, keys, values, strides = stored
    num_q, num_kv, dim = q.shape[1], k.shape[1], q.shape[2]
    assert q.stride()[1:] == k.stride()[1:] == (dim, 1), (q.stride(), k.stride())
    kv_parts = triton.cdiv(num_kv, _HEADS) * (1 if v is None else 2)
    _kernel[q.shape[0], triton.cdiv(num_q, _HEADS) + kv_parts](
        q, k, v, cos_sin, slots, keys, values, q.stride(0), k.stride(0), v_token, *strides,
        NUM_Q=num_q, NUM_KV=num_kv, HALF=dim // 2, HEADS=_HEADS, KEEP_K=keep_k,
        STORE=v is not None, num_warps=2, launch_pdl=True,
    )  # fmt: skip


def _store_fp8(  # type: ignore[no-untyped-def]
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


_fp8_kernel: Any = triton.jit(_store_fp8)


def store_fp8(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    caches: tuple[Tensor, Tensor],
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
    _fp8_kernel[(num_tokens, num_heads)](
        keys, values, slots, *caches, *scales, *(1.0 / scale for scale in scales),
        caches[0].shape[2], keys.stride(0), values.stride(0), block, head, token,
        DIM=head_dim, READ_BACK=read_back, num_warps=1,
    )  # fmt: skip
