"""A Triton kernel that stores a step's keys and values in the pool.

On request, the kernel also normalizes and rotates queries and keys. If the pool is in
FP8, the kernel converts keys and values to FP8 with a scale. Libraries need two kernels
and two passes over the keys to rotate and store. Torch would need six kernels to store
FP8.
"""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from attention.base import RopeNormArgs
from attention.kernels.launch import PDL, let_next_begin_and_wait

# Number of heads that one program processes. For steps of at most _FEW_TOKENS tokens,
# programs of one head are faster.
_HEADS: Final = 8
_FEW_TOKENS: Final = 32


def _rotated(  # type: ignore[no-untyped-def]
    source, is_head, angles, norms, eps,
    HALF: tl.constexpr, PAIR: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Loads some heads of one token; normalizes and rotates them on request.

    Returns:
        The first elements and the second elements of all pairs that are rotated.
    """
    low = tl.load(source, mask=is_head)
    high = tl.load(source + PAIR, mask=is_head)
    if NORM:
        first = low.to(tl.float32)
        second = high.to(tl.float32)
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        size = tl.sqrt(squares / (2 * HALF) + eps)[:, None]
        low = (first / size * norms[0].to(tl.float32)).to(low.dtype)
        high = (second / size * norms[1].to(tl.float32)).to(high.dtype)
    if ROTATE:
        first = low.to(tl.float32)
        second = high.to(tl.float32)
        low = (first * angles[0] - second * angles[1]).to(low.dtype)
        high = (second * angles[0] + first * angles[1]).to(high.dtype)
    return low, high


def _put(  # type: ignore[no-untyped-def]
    x, source, into, is_head, scale, factor,
    SCALED: tl.constexpr, STORE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Stores elements in the cache.

    With KEEP, also overwrites the source with the values that later steps will read.
    """
    if STORE:
        stored = (x.to(tl.float32) * factor if SCALED else x).to(into.dtype.element_ty)
        tl.store(into, stored, mask=is_head)  # the conversion to FP8 saturates
        if SCALED:
            x = (stored.to(tl.float32) * scale).to(x.dtype)
    if KEEP:
        tl.store(source, x, mask=is_head)


_rotated_heads: Any = triton.jit(_rotated)
_put_heads: Any = triton.jit(_put)


def _put_pairs(  # type: ignore[no-untyped-def]
    low, high, source, into, is_head, scale, factor,
    PAIR: tl.constexpr, SCALED: tl.constexpr, STORE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Stores the first and the second elements of pairs; see `_put`."""
    _put_heads(low, source, into, is_head, scale, factor, SCALED, STORE, KEEP)
    _put_heads(
        high, source + PAIR, into + PAIR, is_head, scale, factor, SCALED, STORE, KEEP
    )


_put_pairs_of_heads: Any = triton.jit(_put_pairs)


def _rotate_and_store(  # type: ignore[no-untyped-def]
    q, k, v, cos_sin, q_norm, k_norm, eps, slots, keys, values,
    key_scale, value_scale, key_factor, value_factor,
    q_token, k_token, v_token, q_head, k_head,
    block_stride, head_stride, slot_stride, block_size,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HAS_V: tl.constexpr, HALF: tl.constexpr,
    PAIR: tl.constexpr, HEADS: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
    STORE: tl.constexpr, SCALED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_parts: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (NUM_KV + HEADS - 1) // HEADS
    some, half = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    first = half * (1 if PAIR == HALF else 2)  # the first element of each pair
    start, angles, norms = token, None, None
    if NORM:
        # The weights can be loaded before the wait, because no kernel writes them.
        norm = (q_norm if part < q_parts else k_norm) + half
        norms = tl.load(norm), tl.load(norm + HALF)
    if STORE:
        slot = tl.load(slots + token).to(tl.int64)
        start = (slot // block_size) * block_stride + (slot % block_size) * slot_stride
    let_next_begin_and_wait()
    if ROTATE:
        angle = cos_sin + token * 2 * HALF + half
        angles = tl.load(angle), tl.load(angle + HALF)
    if NUM_Q > 0:
        if part < q_parts:
            head = part * HEADS + some
            source = q + token * q_token + head * q_head + first
            is_head = head < NUM_Q
            low, high = _rotated_heads(
                source, is_head, angles, norms, eps, HALF, PAIR, ROTATE, NORM
            )
            tl.store(source, low, mask=is_head)
            tl.store(source + PAIR, high, mask=is_head)
    if (part >= q_parts) & (part < q_parts + kv_parts):
        head = (part - q_parts) * HEADS + some
        source, is_head = k + token * k_token + head * k_head + first, head < NUM_KV
        low, high = _rotated_heads(
            source, is_head, angles, norms, eps, HALF, PAIR, ROTATE, NORM
        )
        into = keys + start + head * head_stride + first if STORE else source
        _put_pairs_of_heads(
            low, high, source, into, is_head, key_scale, key_factor,
            PAIR, SCALED, STORE, KEEP,
        )  # fmt: skip
    if HAS_V:
        if part >= q_parts + kv_parts:
            head = (part - q_parts - kv_parts) * HEADS + some
            source = v + token * v_token + head * 2 * HALF + first
            is_head = head < NUM_KV
            low = tl.load(source, mask=is_head)
            high = tl.load(source + PAIR, mask=is_head)
            into = values + start + head * head_stride + first
            keep: tl.constexpr = KEEP and SCALED
            _put_pairs_of_heads(
                low, high, source, into, is_head, value_scale, value_factor,
                PAIR, SCALED, STORE, keep,
            )  # fmt: skip


_kernel: Any = triton.jit(_rotate_and_store)


def store(
    k: Tensor, v: Tensor | None, slots: Tensor | None, caches: tuple[Tensor, ...],
    scales: tuple[float, ...] = (1.0, 1.0),
    *, q: Tensor | None = None, rope_norm: RopeNormArgs | None = None,
    interleaved: bool = False, read_back: bool = False,
) -> None:  # fmt: skip
    """Stores k and v in the slots of their tokens.

    With `rope_norm`, normalizes and rotates q in place, and stores k after normalizing
    and rotating it.

    Args:
        k, v: [T, H, D], D a power of two. The elements of a head are contiguous, and so
            are the heads of v. v is None for latents.
        slots: int32 [T]; None if nothing is stored.
        caches: The keys' cache, and the values' if v is given: [B, H, N, D] with equal
            strides and contiguous elements; of k's dtype, or float8_e4m3fn. Empty:
            nothing is stored.
        scales: FP8 scales of the caches.
        q: [T, HQ, D], elements contiguous. Unchanged without `rope_norm`.
        interleaved: Whether neighboring elements are rotated against each other, which
            excludes norms. Otherwise the halves of a head are rotated against each
            other.
        read_back: Whether to overwrite k and v with the values that later steps will
            read from the caches.
    """
    cos_sin = norms = q_norm = k_norm = None
    eps = 0.0
    if rope_norm is None:
        q = None
    else:
        cos_sin, norms, eps = rope_norm
    if norms:
        q_norm, k_norm = norms
    assert all(x.stride(2) == 1 for x in (q, k, v) if x is not None)
    assert not (interleaved and norms)
    assert v is None or v.stride(1) == k.shape[2], v.stride()
    keys, values = (caches[0], caches[-1]) if caches else (None, None)
    block_stride = head_stride = slot_stride = 0
    if keys is not None and values is not None:
        assert keys.stride() == values.stride() and keys.stride(3) == 1, keys.stride()
        assert keys.dtype == k.dtype or keys.element_size() == 1, (keys.dtype, k.dtype)
        block_stride, head_stride, slot_stride, _ = keys.stride()
    num_q = 0 if q is None else q.shape[1]
    num_kv = k.shape[1]
    half = k.shape[2] // 2
    heads, warps = (1, 1) if len(k) <= _FEW_TOKENS else (_HEADS, 2)
    kv_parts = triton.cdiv(num_kv, heads) * (1 if v is None else 2)
    q_token, q_head = (0, 0) if q is None else q.stride()[:2]
    _kernel[k.shape[0], triton.cdiv(num_q, heads) + kv_parts](
        q, k, v, cos_sin, q_norm, k_norm, eps, slots, keys, values,
        scales[0], scales[-1], 1 / scales[0], 1 / scales[-1],
        q_token, k.stride(0), 0 if v is None else v.stride(0), q_head, k.stride(1),
        block_stride, head_stride, slot_stride, 0 if keys is None else keys.shape[2],
        NUM_Q=num_q, NUM_KV=num_kv, HAS_V=v is not None, HALF=half,
        PAIR=1 if interleaved else half, HEADS=heads, ROTATE=cos_sin is not None,
        NORM=norms is not None, STORE=keys is not None,
        SCALED=keys is not None and keys.dtype != k.dtype, KEEP=read_back,
        num_warps=warps, launch_pdl=PDL,
    )  # fmt: skip


def rotate(q: Tensor, k: Tensor, cos_sin: Tensor, *, interleaved: bool = False) -> None:
    """Rotates q and k in place; see `store` for q, k and interleaved.

    Args:
        cos_sin: See RopeNormArgs.
    """
    rope_norm = RopeNormArgs(cos_sin)
    store(
        k,
        None,
        None,
        (),
        q=q,
        rope_norm=rope_norm,
        interleaved=interleaved,
        read_back=True,
    )
