"""Triton kernels that attend for single queries over a paged pool.

Contexts are cut into pieces (attention/pieces.py). One kernel attends over each piece,
and another merges the pieces of a sequence.

FP8 elements are converted to float16, which represents each of them exactly. The GPU
converts two elements in one instruction. Queries are first divided by a power of two
for each head, so that float16 can hold them. Only elements below 2^-17 of the largest
element of a head lose bits. These kernels round at the same points as bfloat16 kernels,
and lose less precision at each of these points.

A step's plan is written before the step's first kernel runs. So the kernels read the
plan before they wait for the preceding kernel (attention/kernels/launch.py).
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
_LOG2_E_IN_KERNEL: Any = tl.constexpr(_LOG2_E)
# If a launch has more programs than this, programs with fewer warps are faster, because
# many programs hide each other's waits for memory. The limits are for 16-bit KV and for
# FP8 KV.
_MIN_SMALL_PROGRAMS: Final = (512, 768)
# With at least this many rows, merges fill the GPU even if each program merges several
# heads.
_MANY_ROWS: Final = 32


def _to_float16(x):  # type: ignore[no-untyped-def]
    """Converts e4m3 to float16, exactly, before Triton moves x to shared memory.

    In shared memory, x then has 16 bits. The rows of values are tokens. For such
    operands, the matrix units are faster with 16 bits in shared memory than with 8.
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
    """Loads the block id of each token of a tile; 0 for tokens at or past `end`.

    If the block size is a multiple of the tile, this is one block id for all tokens.
    """
    token = start if PAGE % TILE == 0 else start + tl.arange(0, TILE)
    return tl.load(pages + token // PAGE, mask=token < end, other=0)


_block_of_tile: Any = triton.jit(_block_of)


def _extent(  # type: ignore[no-untyped-def]
    work, indptr, indices, last_page_lens, num_pieces, piece, row, PAGE: tl.constexpr
):
    """Loads the extent of a piece and of its context.

    Returns:
        A pointer to the context's block ids, the number of the context's tokens, the
        first token of the piece, the last token + 1, and the number of pieces of the
        context.
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


def _query(  # type: ignore[no-untyped-def]
    pointers, in_group, scale, FP8: tl.constexpr
):
    """Loads the query heads as columns.

    For FP8 KV, the queries of each head are divided by a power of two, the unit, before
    they are converted to float16. So the largest elements lose no bit.

    Returns:
        The queries, and the factor of their products with keys: `scale` times the unit.
    """
    query = tl.load(pointers, mask=in_group, other=0.0)
    if FP8:
        query = query.to(tl.float32)
        highest = tl.maximum(tl.max(tl.abs(query), 0), 1e-30)
        bits = highest.to(tl.int32, bitcast=True) & 0x7F800000
        unit = bits.to(tl.float32, bitcast=True)[None, :]
        query = (query / unit).to(tl.float16)
        scale = scale * unit
    return query, scale


_query_and_factor: Any = triton.jit(_query)


def _add_sinks(total, top, sinks, heads, exists):  # type: ignore[no-untyped-def]
    """Returns the sum of a softmax with the sinks of some heads, if there are any.

    `total` is the sum without the sinks, relative to the largest score, `top`.
    """
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=exists, other=0.0)
        total += tl.exp2(sink * _LOG2_E_IN_KERNEL - top)
    return total


_with_sinks: Any = triton.jit(_add_sinks)


def _store_result(  # type: ignore[no-untyped-def]
    out, lse, sinks, row, heads, in_group, acc, top, total, value_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Divides the sums of some heads, and stores their outputs and log-sum-exps.

    Args:
        row: A row of the step, or a piece if `out` and `lse` are partial results.
        sinks: None for partial results, and for layers without sinks.
        acc, total: The sums of weighted values and of weights, relative to `top`.
    """
    row_heads = row.to(tl.int64) * (GROUP * tl.num_programs(1)) + heads
    tl.store(lse + row_heads, top + tl.log2(total), mask=in_group)
    total = _with_sinks(total, top, sinks, heads, in_group)
    result = acc * (value_scale / total)[None, :]
    target = out + row_heads[None, :] * DIM + tl.arange(0, DIM)[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=in_group[None, :])


_store_heads: Any = triton.jit(_store_result)


def _mask_scores(  # type: ignore[no-untyped-def]
    scores, seen, soft_cap, CAPPED: tl.constexpr
):
    """Applies the soft cap to a tile's scores and masks tokens that are not `seen`."""
    if CAPPED:  # tanh(x) == 2 * sigmoid(2 * x) - 1
        scores = (2 * tl.sigmoid(2 * scores / soft_cap) - 1) * soft_cap
    return tl.where(seen[:, None], scores, -1e30)


_masked: Any = triton.jit(_mask_scores)


def _wait_before_queries(FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits for the preceding kernel. With FP8 KV, the next kernel begins at the end of
    the products, because an earlier begin would slow them down."""
    if FP8:
        wait()
    else:
        let_next_begin_and_wait()


_wait_for_queries: Any = triton.jit(_wait_before_queries)


# In the matrix products, rows are tokens and columns are heads. The GPU's matrix
# instructions need more rows than a KV head has query heads. Block ids are loaded one
# iteration ahead, so that loads of keys do not wait for block ids.
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, sinks, work, indptr, indices, last_page_lens,
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
    source = q + row.to(tl.int64) * q_token + q_heads[None, :] * DIM + column[:, None]
    block = _block_of_tile(pages, begin, end, PAGE, TILE)
    _wait_for_queries(FP8)
    if planned < 0:
        return
    query, factor = _query_and_factor(source, in_group[None, :], scale, FP8)
    acc = tl.zeros((DIM, HEADS), tl.float32)
    top = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for start in range(begin, end, TILE):
        token = start + tile
        live = token < end
        seen = live & (token >= length - window) if WINDOWED else live
        offset = start % PAGE + tile if PAGE % TILE == 0 else token % PAGE
        head_start = block.to(tl.int64) * cache_block + kv_head * cache_head
        token_offsets = head_start + offset * cache_token
        element_offsets = token_offsets[:, None] + column[None, :]
        key = tl.load(keys + element_offsets, mask=live[:, None], other=0.0)
        scores = tl.dot(key.to(query.dtype), query) * factor
        scores = _masked(scores, seen, soft_cap, CAPPED)
        new_top = tl.maximum(top, tl.max(scores, 0))
        weights = tl.exp2(scores - new_top[None, :])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 0)
        # A pulled block may contain NaN or infinity before the window.
        value = tl.load(values + element_offsets, mask=seen[:, None], other=0.0)
        if FP8:
            value = _values_to_float16(value)
        acc = tl.dot(tl.trans(value), weights.to(value.dtype), acc * decay[None, :])
        top = new_top
        block = _block_of_tile(pages, start + TILE, end, PAGE, TILE)
    if FP8:
        let_next_begin()
    if num_parts == 1:
        _store_heads(
            out, lse, sinks, row, q_heads, in_group, acc, top, total, value_scale,
            GROUP, DIM,
        )  # fmt: skip
    else:
        _store_heads(
            partials, partial_lses, None, piece, q_heads, in_group, acc, top, total,
            value_scale, GROUP, DIM,
        )  # fmt: skip


def _merge(  # type: ignore[no-untyped-def]
    work, partials, partial_lses, out, lse, sinks, num_pieces, num_heads,
    DIM: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of a sequence's pieces, for some query heads.

    If the sequence has a single piece, `_attend` has stored the result already.
    """
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
        piece_heads = (piece * num_heads + head[None, :]).to(tl.int64)
        is_partial = (piece < last) & is_head[None, :]
        piece_lse = tl.load(partial_lses + piece_heads, mask=is_partial, other=-1e30)
        pointers = partials + piece_heads[:, :, None] * DIM + column[None, None, :]
        part = tl.load(pointers, mask=is_partial[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(piece_lse, 0))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(piece_lse - new_top[None, :])
        acc = acc * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * decay + tl.sum(weight, 0)
        top = new_top
    row_heads = row.to(tl.int64) * num_heads + head
    target = out + row_heads[:, None] * DIM + column[None, :]
    tl.store(lse + row_heads, top + tl.log2(total), mask=is_head)
    total = _with_sinks(total, top, sinks, head, is_head)
    result = acc / total[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_head[:, None])


# Triton does not specialize kernels by these arguments, so that steps of any size use
# the same compiled kernels.
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
    *, scale: float, value_scale: float, tile: int, sinks: Tensor | None = None,
    small_programs: bool | None = None,
) -> None:  # fmt: skip
    """Attends for one query of each of S sequences.

    Args:
        q, out: [S, HQ, D], heads and elements contiguous; D a power of two.
        caches: [B, H, N, D] of keys and of values, with equal strides; of q's dtype, or
            float8_e4m3fn.
        planned: int32: the result of attention.pieces.plan_pieces, then the three
            arrays of the step's Pages.
        num_pieces: `max_pieces` of plan_pieces.
        lse: float32 [S, HQ]: filled with base-2 log-sum-exps, without sinks.
        partials: Memory for partial outputs and partial log-sum-exps, float32 of at
            least num_pieces * HQ * D and num_pieces * HQ elements.
        scale: Factor of the scores, including the FP8 scale of the keys.
        value_scale: FP8 scale of the values; 1.0 for all other dtypes.
        tile: Tokens read at once; the length of pieces is a multiple of `tile`.
        sinks: float32 [HQ], a logit for each head; see attention.base.LayerAttention.
        small_programs: Whether programs have fewer warps, and for some FP8 heads
            shorter tiles, which is faster for many programs. None: decided by their
            number.
    """
    keys, values = caches
    (num_seqs, num_q_heads, dim) = q.shape
    num_kv_heads = keys.shape[1]
    assert keys.stride() == values.stride() and q.stride()[1:] == (dim, 1)
    group = num_q_heads // num_kv_heads
    is_fp8 = keys.element_size() == 1
    assert is_fp8 or keys.dtype == q.dtype, (keys.dtype, q.dtype)
    if small_programs is None:
        small_programs = num_pieces * num_kv_heads > _MIN_SMALL_PROGRAMS[is_fp8]
    warps = 2 if is_fp8 else 4 if small_programs else 8
    if small_programs and is_fp8 and dim <= 128:
        warps = 1
        tile = min(tile, 4096 // dim)
    _attend_kernel[(num_pieces, num_kv_heads)](
        q, keys, values, sinks, *planned, out, lse, *partials,
        scale * _LOG2_E, value_scale, kind.soft_cap * _LOG2_E, kind.window or 0,
        num_pieces, q.stride(0), *keys.stride()[:3],
        GROUP=group, HEADS=max(8, triton.next_power_of_2(group)), DIM=dim,
        PAGE=keys.shape[2], TILE=tile, FP8=is_fp8, CAPPED=kind.soft_cap > 0,
        WINDOWED=kind.window is not None,
        num_warps=warps, num_stages=3 if is_fp8 else 2, launch_pdl=PDL,
    )  # fmt: skip
    heads, pieces, warps = _merge_tile(dim, small_programs or num_seqs >= _MANY_ROWS)
    _merge_kernel[(num_seqs, triton.cdiv(num_q_heads, heads))](
        planned[0], *partials, out, lse, sinks, num_pieces, num_q_heads,
        DIM=dim, HEADS=heads, PIECES=pieces, num_warps=warps, launch_pdl=PDL,
    )  # fmt: skip


def _merge_tile(dim: int, many_programs: bool) -> tuple[int, int, int]:
    """Returns the heads that a program merges, the pieces that it reads at a time, and
    its warps."""
    if many_programs:
        return 4, 1024 // dim, 2
    return 1, 4096 // dim, 1
