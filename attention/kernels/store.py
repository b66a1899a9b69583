"""A Triton kernel that stores a step's keys and values: normed and rotated, scaled and clamped to
FP8, or all of it.

Libraries take two kernels and two passes over the keys to rotate and store; torch would take six to
store FP8.
"""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from attention.base import Turn
from attention.kernels.launch import PDL, let_next_begin_and_wait

_HEADS: Final = 8  # of one program; of few tokens one, which then take less time
_FEW_TOKENS: Final = 32


def _rotated(  # type: ignore[no-untyped-def]
    source, own, angles, norms, eps,
    HALF: tl.constexpr, PAIR: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Both elements of each pair of some heads of one token, normed, and turned by its angles."""
    low, high = tl.load(source, mask=own), tl.load(source + PAIR, mask=own)
    if NORM:
        first, second = low.to(tl.float32), high.to(tl.float32)
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        size = tl.sqrt(squares / (2 * HALF) + eps)[:, None]
        low = (first / size * norms[0].to(tl.float32)).to(low.dtype)
        high = (second / size * norms[1].to(tl.float32)).to(high.dtype)
    if ROTATE:
        first, second = low.to(tl.float32), high.to(tl.float32)
        low = (first * angles[0] - second * angles[1]).to(low.dtype)
        high = (second * angles[0] + first * angles[1]).to(high.dtype)
    return low, high


def _put(  # type: ignore[no-untyped-def]
    x, source, into, own, scale, factor,
    SCALED: tl.constexpr, STORE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Stores elements, and keeps where they came from what is read of them."""
    if STORE:
        kept = (x.to(tl.float32) * factor if SCALED else x).to(into.dtype.element_ty)
        tl.store(into, kept, mask=own)  # the conversion to FP8 saturates
        if SCALED:
            x = (kept.to(tl.float32) * scale).to(x.dtype)
    if KEEP:
        tl.store(source, x, mask=own)


_rotated_heads: Any = triton.jit(_rotated)
_put_heads: Any = triton.jit(_put)


def _rotate_and_store(  # type: ignore[no-untyped-def]
    q, k, v, cos_sin, q_norm, k_norm, eps, slots, keys, values,
    key_scale, value_scale, key_factor, value_factor,
    q_token, k_token, v_token, q_head, k_head, block_stride, head_stride, slot_stride, block_size,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HAS_V: tl.constexpr, HALF: tl.constexpr,
    PAIR: tl.constexpr, HEADS: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
    STORE: tl.constexpr, SCALED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_parts: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (NUM_KV + HEADS - 1) // HEADS
    some, half = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    first = half * (1 if PAIR == HALF else 2)  # of each pair
    at, angles, norms = token, None, None
    if NORM:  # from far, and no kernel of the step writes it: loaded before the wait
        norm = (q_norm if part < q_parts else k_norm) + half
        norms = tl.load(norm), tl.load(norm + HALF)
    if STORE:
        slot = tl.load(slots + token).to(tl.int64)
        at = (slot // block_size) * block_stride + (slot % block_size) * slot_stride
    let_next_begin_and_wait()
    if ROTATE:
        angle = cos_sin + token * 2 * HALF + half
        angles = tl.load(angle), tl.load(angle + HALF)
    if NUM_Q > 0:
        if part < q_parts:
            head = part * HEADS + some
            source, own = q + token * q_token + head * q_head + first, head < NUM_Q
            low, high = _rotated_heads(
                source, own, angles, norms, eps, HALF, PAIR, ROTATE, NORM
            )
            tl.store(source, low, mask=own)
            tl.store(source + PAIR, high, mask=own)
    if (part >= q_parts) & (part < q_parts + kv_parts):
        head = (part - q_parts) * HEADS + some
        source, own = k + token * k_token + head * k_head + first, head < NUM_KV
        low, high = _rotated_heads(
            source, own, angles, norms, eps, HALF, PAIR, ROTATE, NORM
        )
        into = keys + at + head * head_stride + first if STORE else source
        _put_heads(low, source, into, own, key_scale, key_factor, SCALED, STORE, KEEP)
        _put_heads(
            high,
            source + PAIR,
            into + PAIR,
            own,
            key_scale,
            key_factor,
            SCALED,
            STORE,
            KEEP,
        )
    if HAS_V:
        if part >= q_parts + kv_parts:
            head = (part - q_parts - kv_parts) * HEADS + some
            source, own = v + token * v_token + head * 2 * HALF + first, head < NUM_KV
            low, high = tl.load(source, mask=own), tl.load(source + PAIR, mask=own)
            into = values + at + head * head_stride + first
            back: tl.constexpr = KEEP and SCALED
            _put_heads(
                low, source, into, own, value_scale, value_factor, SCALED, STORE, back
            )
            _put_heads(
                high, source + PAIR, into + PAIR, own, value_scale, value_factor, SCALED, STORE,
                back,
            )  # fmt: skip


_kernel: Any = triton.jit(_rotate_and_store)


def store(
    k: Tensor, v: Tensor | None, slots: Tensor | None, caches: tuple[Tensor, ...],
    scales: tuple[float, ...] = (1.0, 1.0),
    *, q: Tensor | None = None, turn: Turn | None = None, interleaved: bool = False,
    read_back: bool = False,
) -> None:  # fmt: skip
    """Stores k and v by slot; with a `turn` changes q, in place, and what is stored of k.

    Args:
        k, v: [T, H, D], D a power of two; elements contiguous, v's heads as well.
        slots: int32 [T].
        caches: of keys, and of values if there are any: [B, H, N, D], of equal strides, the last of
            them 1; of k's dtype, or float8_e4m3fn. None: nothing is stored.
        scales: of the caches' elements, where they are of FP8.
        q: [T, HQ, D], as k.
        interleaved: whether neighbours are turned together, not normed, else halves.
        read_back: whether k and v become, in place, what is read of them later; else they stay.
    """
    q, cos_sin, norms, eps = (None, None, None, 0.0) if turn is None else (q, *turn)
    q_norm, k_norm = norms or (None, None)
    assert all(x.stride(2) == 1 for x in (q, k, v) if x is not None) and not (
        interleaved and norms
    )
    assert v is None or v.stride(1) == k.shape[2], v.stride()
    keys, values = (caches[0], caches[-1]) if caches else (None, None)
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if keys is not None and values is not None:
        assert keys.stride() == values.stride() and keys.stride(3) == 1, keys.stride()
        assert keys.dtype == k.dtype or keys.element_size() == 1, (keys.dtype, k.dtype)
        strides = (*keys.stride()[:3], keys.shape[2])
    num_q, num_kv, half = 0 if q is None else q.shape[1], k.shape[1], k.shape[2] // 2
    heads, warps = (1, 1) if len(k) <= _FEW_TOKENS else (_HEADS, 2)
    parts = triton.cdiv(num_q, heads) + triton.cdiv(num_kv, heads) * (
        1 if v is None else 2
    )
    tokens = [0 if x is None else x.stride(0) for x in (q, k, v)]
    _kernel[k.shape[0], parts](
        q, k, v, cos_sin, q_norm, k_norm, eps, slots, keys, values,
        scales[0], scales[-1], 1 / scales[0], 1 / scales[-1],
        *tokens, 0 if q is None else q.stride(1), k.stride(1), *strides,
        NUM_Q=num_q, NUM_KV=num_kv, HAS_V=v is not None, HALF=half, PAIR=1 if interleaved else half,
        HEADS=heads, ROTATE=cos_sin is not None, NORM=norms is not None, STORE=keys is not None,
        SCALED=keys is not None and keys.dtype != k.dtype, KEEP=read_back,
        num_warps=warps, launch_pdl=PDL,
    )  # fmt: skip


def rotate(q: Tensor, k: Tensor, cos_sin: Tensor, *, interleaved: bool = False) -> None:
    """Rotates q and k in place; as of `store`."""
    turn = Turn(cos_sin)
    store(k, None, None, (), q=q, turn=turn, interleaved=interleaved, read_back=True)
