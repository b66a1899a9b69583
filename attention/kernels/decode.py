"""Triton kernels: single queries over a paged pool, whose contexts are cut into pieces.

Elements of FP8 become float16, which represents each of them exactly. The GPU converts
two of them in one instruction. Queries become float16 too, in units of a power of two.
So these kernels round only what bfloat16 kernels round as well, and less of it.

A step's plan was written before the step's first kernel. It is therefore read before
the wait for the predecessor (attention/kernels/launch.py).
"""

from collections.abc import Sequence
from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from attention.base import AttentionKind
from attention.kernels.launch import (
    PDL,
    let_next_begin,
    let_next_begin_and_wait,
    wait,
)

_LOG2_E: Final = 1.4426950408889634
# With more programs than this, programs hide each other's waits: for 16 bits, for FP8.
_CROWDED_PROGRAMS: Final = (512, 768)
# With this many rows, merges fill the GPU although a program takes several heads.
_MANY_ROWS: Final = 32


def _to_float16(x):  # type: ignore[no-untyped-def]
    """e4m3 -> float16, exactly, in the registers that x was loaded to.

    So x goes to shared memory in 16 bits. For values, whose rows are tokens, that is
    the faster way to the matrix units.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high; mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }""",
        "=r,=r,r",
        [x],
        dtype=tl.float16,
        is_pure=False,
        pack=4,
    )


_values_to_float16: Any = triton.jit(_to_float16)


def _block_of(  # type: ignore[no-untyped-def]
    pages, start, end, PAGE: tl.constexpr, TILE: tl.constexpr
):
    """The blocks of a tile's tokens that are before `end`.

    If blocks are whole tiles, this is a single block for all tokens.
    """
    token = start if PAGE % TILE == 0 else start + tl.arange(0, TILE)
    return tl.load(pages + token // PAGE, mask=token < end, other=0)


_block_of_tile: Any = triton.jit(_block_of)


def _extent(  # type: ignore[no-untyped-def]
    work, indptr, indices, last_page_lens, num_pieces, piece, row, PAGE: tl.constexpr
):
    """The extent of a piece and of its context.

    Returns:
        A pointer to the context's pages, the context's tokens, the first token of the
        piece, the end of the piece, and the number of pieces of the context.
    """
    first = tl.load(work + 1 + num_pieces + row)
    num_parts = tl.load(work + 2 + num_pieces + row) - first
    page = tl.load(indptr + row)
    page_end = tl.load(indptr + row + 1)
    length = (page_end - page - 1) * PAGE + tl.load(last_page_lens + row)
    chunk = tl.load(work)
    begin = (piece - first) * chunk
    return indices + page, length, begin, tl.minimum(begin + chunk, length), num_parts


_extent_of_piece: Any = triton.jit(_extent)


def _query(at, in_group, scale, FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """The query heads as columns, and the factor of their products with keys.

    For FP8 the queries become float16 in units that are powers of two, which rounds
    nothing.
    """
    query = tl.load(at, mask=in_group, other=0.0)
    if FP8:
        query = query.to(tl.float32)
        highest = tl.maximum(tl.max(tl.abs(query), 0), 1e-30)
        bits = highest.to(tl.int32, bitcast=True) & 0x7F800000
        unit = bits.to(tl.float32, bitcast=True)[None, :]
        query = (query / unit).to(tl.float16)
        scale = scale * unit
    return query, scale


_query_and_factor: Any = triton.jit(_query)


def _store_result(  # type: ignore[no-untyped-def]
    out, lse, row, heads, in_group, acc, lse_of_heads,
    GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Stores the output and log-sum-exp of some heads of a row, or of a piece."""
    at = row.to(tl.int64) * (GROUP * tl.num_programs(1)) + heads
    target = out + at[None, :] * DIM + tl.arange(0, DIM)[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=in_group[None, :])
    tl.store(lse + at, lse_of_heads, mask=in_group)


_store_heads: Any = triton.jit(_store_result)


def _mask_scores(  # type: ignore[no-untyped-def]
    scores, live, token, length, soft_cap, window,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Caps the scores of a tile and masks the tokens that the query does not see."""
    if CAPPED:  # tanh(x) == 2 * sigmoid(2 * x) - 1
        scores = (2 * tl.sigmoid(2 * scores / soft_cap) - 1) * soft_cap
    seen = live & (token >= length - window) if WINDOWED else live
    return tl.where(seen[:, None], scores, -1e30)


_masked: Any = triton.jit(_mask_scores)


# Heads are columns of the products. Tokens are enough for the rows of the GPU's matrix
# instructions; heads are not. Block ids are loaded one iteration ahead, so that loads
# of keys do not wait for them.
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, work, indptr, indices, last_page_lens,
    out, lse, partials, partial_lses, scale, value_scale, soft_cap, window, num_pieces,
    q_token, cache_block, cache_head, cache_token,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, FP8: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Attends over one piece of one context, for the query heads of one KV head."""
    piece, kv_head = tl.program_id(0), tl.program_id(1)
    planned = tl.load(work + 1 + piece)
    row = tl.maximum(planned, 0)
    pages, length, begin, end, num_parts = _extent_of_piece(
        work, indptr, indices, last_page_lens, num_pieces, piece, row, PAGE
    )
    head, column, tile = tl.arange(0, HEADS), tl.arange(0, DIM), tl.arange(0, TILE)
    in_group, q_heads = head < GROUP, kv_head * GROUP + head
    place = q + row.to(tl.int64) * q_token + q_heads[None, :] * DIM + column[:, None]
    block = _block_of_tile(pages, begin, end, PAGE, TILE)
    if FP8:
        wait()
    else:
        let_next_begin_and_wait()
    if planned < 0:
        return
    query, factor = _query_and_factor(place, in_group[None, :], scale, FP8)
    acc = tl.zeros((DIM, HEADS), tl.float32)
    top = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for start in range(begin, end, TILE):
        token = start + tile
        live = token < end
        offset = start % PAGE + tile if PAGE % TILE == 0 else token % PAGE
        head_start = block.to(tl.int64) * cache_block + kv_head * cache_head
        at = head_start + offset * cache_token
        where = at[:, None] + column[None, :]
        key = tl.load(keys + where, mask=live[:, None], other=0.0).to(query.dtype)
        scores = tl.dot(key, query) * factor
        scores = _masked(
            scores, live, token, length, soft_cap, window, CAPPED, WINDOWED
        )
        new_top = tl.maximum(top, tl.max(scores, 0))
        weights = tl.exp2(scores - new_top[None, :])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 0)
        value = tl.load(values + where, mask=live[:, None], other=0.0)
        if FP8:
            value = _values_to_float16(value)
        acc = tl.dot(tl.trans(value), weights.to(value.dtype), acc * decay[None, :])
        top = new_top
        block = _block_of_tile(pages, start + TILE, end, PAGE, TILE)
    if FP8:
        let_next_begin()  # here, because earlier it would slow the products down
    piece_lse = top + tl.log2(total)
    acc = acc * (value_scale / total)[None, :]
    if num_parts == 1:
        _store_heads(out, lse, row, q_heads, in_group, acc, piece_lse, GROUP, DIM)
    else:
        _store_heads(
            partials, partial_lses, piece, q_heads, in_group, acc, piece_lse, GROUP, DIM
        )


def _merge(  # type: ignore[no-untyped-def]
    work, partials, partial_lses, out, lse, num_pieces, num_heads,
    DIM: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Merges the pieces of a sequence that has several, for some query heads."""
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    first = tl.load(work + 1 + num_pieces + row)
    last = tl.load(work + 2 + num_pieces + row)
    let_next_begin_and_wait()
    if last - first == 1:
        return
    is_head = head < num_heads
    column = tl.arange(0, DIM)
    top = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, DIM), tl.float32)
    for start in range(first, last, PIECES):
        piece = (start + tl.arange(0, PIECES))[:, None]
        place = (piece * num_heads + head[None, :]).to(tl.int64)
        here = (piece < last) & is_head[None, :]
        piece_lse = tl.load(partial_lses + place, mask=here, other=-1e30)
        at = partials + place[:, :, None] * DIM + column[None, None, :]
        part = tl.load(at, mask=here[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(piece_lse, 0))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(piece_lse - new_top[None, :])
        acc = acc * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * decay + tl.sum(weight, 0)
        top = new_top
    place_of_head = row.to(tl.int64) * num_heads + head
    target = out + place_of_head[:, None] * DIM + column[None, :]
    result = acc / total[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_head[:, None])
    tl.store(lse + place_of_head, top + tl.log2(total), mask=is_head)


# Arguments that are not specialized, so that steps of any size use the same kernels.
_PLANNED: Final = ["work", "indptr", "indices", "last_page_lens"]
_attend_kernel: Any = triton.jit(
    _attend,
    do_not_specialize=["window", "num_pieces"],
    do_not_specialize_on_alignment=_PLANNED,
)
_merge_kernel: Any = triton.jit(
    _merge, do_not_specialize=["num_pieces"], do_not_specialize_on_alignment=["work"]
)


def attend(
    q: Tensor, caches: tuple[Tensor, Tensor],
    planned: Sequence[Tensor], num_pieces: int,
    out: Tensor, lse: Tensor, partials: tuple[Tensor, Tensor], kind: AttentionKind,
    *, scale: float, value_scale: float, tile: int, crowded: bool | None = None,
) -> None:  # fmt: skip
    """Attends for one query of each of S sequences.

    Args:
        q, out: [S, HQ, D], heads and elements contiguous; D a power of two.
        caches: [B, H, N, D] of keys and of values, with equal strides; of q's dtype, or
            float8_e4m3fn.
        planned: int32: the result of attention.pieces.plan_pieces, then the step's
            Pages.
        lse: float32 [S, HQ]: filled with base-2 log-sum-exps.
        partials: float32, of num_pieces * HQ * D elements and of num_pieces * HQ.
        scale: Factor of the scores, including the scale of the keys.
        tile: Tokens read at once; pieces are multiples of it.
        crowded: Whether to use many small programs; None: if there are many anyway.
    """
    keys, values = caches
    (num_seqs, num_q_heads, dim) = q.shape
    num_kv_heads = keys.shape[1]
    assert keys.stride() == values.stride() and q.stride()[1:] == (dim, 1)
    group = num_q_heads // num_kv_heads
    is_fp8 = keys.element_size() == 1
    assert is_fp8 or keys.dtype == q.dtype, (keys.dtype, q.dtype)
    if crowded is None:
        crowded = num_pieces * num_kv_heads > _CROWDED_PROGRAMS[is_fp8]
    warps = 2 if is_fp8 else 4 if crowded else 8
    if crowded and is_fp8 and dim <= 128:
        warps = 1
        tile = min(tile, 4096 // dim)
    _attend_kernel[(num_pieces, num_kv_heads)](
        q, keys, values, *planned, out, lse, *partials,
        scale * _LOG2_E, value_scale, kind.soft_cap * _LOG2_E, kind.window or 0,
        num_pieces, q.stride(0), *keys.stride()[:3],
        GROUP=group, HEADS=max(8, triton.next_power_of_2(group)), DIM=dim,
        PAGE=keys.shape[2], TILE=tile, FP8=is_fp8, CAPPED=kind.soft_cap > 0,
        WINDOWED=kind.window is not None,
        num_warps=warps, num_stages=3 if is_fp8 else 2, launch_pdl=PDL,
    )  # fmt: skip
    if crowded or num_seqs >= _MANY_ROWS:
        heads = 4
        pieces = 1024 // dim
        warps = 2
    else:
        heads = 1
        pieces = 4096 // dim
        warps = 1
    _merge_kernel[(num_seqs, triton.cdiv(num_q_heads, heads))](
        planned[0], *partials, out, lse, num_pieces, num_q_heads,
        DIM=dim, HEADS=heads, PIECES=pieces, num_warps=warps, launch_pdl=PDL,
    )  # fmt: skip
