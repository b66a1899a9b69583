"""Triton kernels that attend for single queries over a paged pool.

Contexts are cut into pieces (attention/pieces.py). One kernel attends over each piece,
and another (merge.py) merges the pieces of a context. The rows of a run share a
context: each of them sees one token more than the row before it.

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
from attention.kernels.merge import merge
from attention.kernels.sinks import with_sinks

_LOG2_E: Final = 1.4426950408889634
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
    work, of_row, num_rows, indptr, indices, last_page_lens, piece, row,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Loads the extent of a piece and of its context.

    Args:
        of_row: the plan's four arrays [num_rows]; see `pieces.plan_pieces`.
        row: the first row of the piece's run.

    Returns:
        A pointer to the context's block ids, the number of tokens that the first row of
        the run sees, the first token of the piece, the last token + 1, the number of
        rows of the run, and the index of the piece among the pieces of the context.
    """
    run_rows = tl.load(of_row + row)
    index = piece - tl.load(of_row + num_rows + row)
    last_row = row + run_rows - 1
    page = tl.load(indptr + last_row)
    page_end = tl.load(indptr + last_row + 1)
    length = (page_end - page - 1) * PAGE + tl.load(last_page_lens + last_row)
    chunk = tl.load(work)
    begin = index * chunk
    end = tl.minimum(begin + chunk, length)
    return indices + page, length - run_rows + 1, begin, end, run_rows, index


_extent_of_piece: Any = triton.jit(_extent)


def _query(  # type: ignore[no-untyped-def]
    heads, is_used, scale, DIM: tl.constexpr, FP8: tl.constexpr
):
    """Loads the query heads of the rows of a run as columns.

    For FP8 KV, the queries of each column are divided by a power of two, the unit,
    before they are converted to float16. So the largest elements lose no bit.

    Args:
        heads: pointers to the heads.

    Returns:
        The queries, and the factor of their products with keys: `scale` times the unit.
    """
    pointers = heads[None, :] + tl.arange(0, DIM)[:, None]
    query = tl.load(pointers, mask=is_used[None, :], other=0.0)
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
    out, lse, sinks, rows, heads, is_used, acc, top, total, value_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Divides the sums of some columns, and stores their outputs and log-sum-exps.

    Args:
        rows: Rows of the step, or indices of partial results.
        sinks: None for partial results, and for layers without sinks.
        acc, total: The sums of weighted values and of weights, relative to `top`. If a
            column sees no token, both are 0.
    """
    row_heads = rows.to(tl.int64) * (GROUP * tl.num_programs(1)) + heads
    tl.store(lse + row_heads, top + tl.log2(total), mask=is_used)
    total = with_sinks(total, top, sinks, heads, is_used)
    result = acc * (value_scale / tl.maximum(total, 1e-30))[None, :]
    target = out + row_heads[None, :] * DIM + tl.arange(0, DIM)[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_used[None, :])


_store_columns: Any = triton.jit(_store_result)


def _store_piece_result(  # type: ignore[no-untyped-def]
    out, lse, partials, partial_lses, sinks, of_row, num_rows, row, index, run_rows,
    within, heads, acc, top, total, value_scale, GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Stores the results of a piece: final if the context has no other piece, else
    partial.

    Args:
        row: The first row of the piece's run.
        index: The index of the piece among the pieces of the context.
        within: The index of each column's row in the run.
    """
    is_used = within < run_rows
    if tl.load(of_row + 2 * num_rows + row) == 1:
        _store_columns(
            out, lse, sinks, row + within, heads, is_used, acc, top, total, value_scale,
            GROUP, DIM,
        )  # fmt: skip
    else:
        results = tl.load(of_row + 3 * num_rows + row) + index * run_rows + within
        _store_columns(
            partials, partial_lses, None, results, heads, is_used, acc, top, total,
            value_scale, GROUP, DIM,
        )  # fmt: skip


_store_piece: Any = triton.jit(_store_piece_result)


def _mask_scores(  # type: ignore[no-untyped-def]
    scores, seen, soft_cap, CAPPED: tl.constexpr
):
    """Applies the soft cap to a tile's scores, and masks those that are not `seen`."""
    if CAPPED:  # tanh(x) == 2 * sigmoid(2 * x) - 1
        scores = (2 * tl.sigmoid(2 * scores / soft_cap) - 1) * soft_cap
    return tl.where(seen, scores, -1e30)


_masked: Any = triton.jit(_mask_scores)


def _wait_before_queries(FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits for the preceding kernel. With FP8 KV, the next kernel begins at the end of
    the products, because an earlier begin would slow them down."""
    if FP8:
        wait()
    else:
        let_next_begin_and_wait()


_wait_for_queries: Any = triton.jit(_wait_before_queries)


def _visible(  # type: ignore[no-untyped-def]
    token, end, first_length, lengths, window, WINDOWED: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Returns which tokens of a tile some row of the run sees, and which of them each
    column sees.

    Args:
        end: All rows of the run see the tokens before `end`, except for their windows.
        first_length: The number of tokens that the first row of the run sees.
        lengths: The number of tokens that each column's row sees.
    """
    live = token < end
    if WINDOWED:
        live = live & (token >= first_length - window)
    seen = live[:, None]
    if WINDOWED and SHARED:
        seen = seen & (token[:, None] >= lengths[None, :] - window)
    return live, seen


_visible_tokens: Any = triton.jit(_visible)


def _add_last_tokens(  # type: ignore[no-untyped-def]
    query, factor, acc, top, total, keys, values, pages, begin, end, lengths,
    soft_cap, window, cache_block, cache_token,
    DIM: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, FP8: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Adds the tokens of a run that not all of its rows see: the proposals.

    The values of a proposal may be infinity or NaN. They must not change the rows that
    do not see the proposal, but 0 * infinity is NaN. Therefore such values are replaced
    by 0, and the columns that see them become NaN.

    Args:
        begin, end: The tokens, at most TOKENS.

    Returns:
        The new acc, top and total.
    """
    token = begin + tl.arange(0, TOKENS)
    live = token < end
    seen = live[:, None] & (token[:, None] < lengths[None, :])
    if WINDOWED:
        seen = seen & (token[:, None] >= lengths[None, :] - window)
    block = tl.load(pages + token // PAGE, mask=live, other=0)
    token_offsets = block.to(tl.int64) * cache_block + token % PAGE * cache_token
    offsets = token_offsets[:, None] + tl.arange(0, DIM)[None, :]
    key = tl.load(keys + offsets, mask=live[:, None], other=0.0)
    scores = tl.dot(key.to(query.dtype), query) * factor
    scores = _masked(scores, seen, soft_cap, CAPPED)
    new_top = tl.maximum(top, tl.max(scores, 0))
    weights = tl.where(seen, tl.exp2(scores - new_top[None, :]), 0.0)
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, 0)
    value = tl.load(values + offsets, mask=live[:, None], other=0.0)
    if FP8:
        value = _values_to_float16(value)
    is_finite = tl.abs(value.to(tl.float32)) < float("inf")
    value = tl.where(is_finite, value, 0.0)
    acc = tl.dot(tl.trans(value), weights.to(value.dtype), acc * decay[None, :])
    is_broken = tl.max(tl.where(is_finite, 0, 1), 1)
    sees_broken = tl.max(tl.where(seen, is_broken[:, None], 0), 0)
    acc = tl.where(sees_broken[None, :] > 0, float("nan"), acc)
    return acc, new_top, total


_added_last_tokens: Any = triton.jit(_add_last_tokens)


# In the matrix products, a row is a token, and a column is a query head of one of the
# run's rows. The GPU's matrix instructions need more rows than there are columns. Block
# ids are loaded one iteration ahead, so that loads of keys do not wait for block ids.
def _attend_rows(  # type: ignore[no-untyped-def]
    heads, keys, values, pages, run_rows, within, first_length, begin, end, block,
    scale, soft_cap, window, cache_block, cache_token,
    COLUMNS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    LAST_TOKENS: tl.constexpr, FP8: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Attends over one piece, for some columns.

    Args:
        heads: A pointer to the query head of each column.
        within: The index of each column's row in the run.
        block: The block of the first tile.
        LAST_TOKENS: At least the maximum number of rows of a run.
        SHARED: Whether the run has several rows.

    Returns:
        The sums of weighted values, the largest scores, and the sums of weights.
    """
    query, factor = _query_and_factor(heads, within < run_rows, scale, DIM, FP8)
    acc = tl.zeros((DIM, COLUMNS), tl.float32)
    top = tl.full((COLUMNS,), -1e30, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    lengths = first_length + within
    common_end = tl.minimum(end, first_length)
    tile = tl.arange(0, TILE)
    for start in range(begin, common_end, TILE):
        token = start + tile
        live, seen = _visible_tokens(
            token, common_end, first_length, lengths, window, WINDOWED, SHARED
        )
        offset = start % PAGE + tile if PAGE % TILE == 0 else token % PAGE
        token_offsets = block.to(tl.int64) * cache_block + offset * cache_token
        element_offsets = token_offsets[:, None] + tl.arange(0, DIM)[None, :]
        key = tl.load(keys + element_offsets, mask=live[:, None], other=0.0)
        scores = tl.dot(key.to(query.dtype), query) * factor
        scores = _masked(scores, seen, soft_cap, CAPPED)
        new_top = tl.maximum(top, tl.max(scores, 0))
        weights = tl.exp2(scores - new_top[None, :])
        if WINDOWED:  # a column may see no token of a tile, or of all tiles so far
            weights = tl.where(seen, weights, 0.0)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 0)
        # A pulled block may contain NaN or infinity before the window.
        value = tl.load(values + element_offsets, mask=live[:, None], other=0.0)
        if FP8:
            value = _values_to_float16(value)
        acc = tl.dot(tl.trans(value), weights.to(value.dtype), acc * decay[None, :])
        top = new_top
        block = _block_of_tile(pages, start + TILE, common_end, PAGE, TILE)
    if SHARED:
        if end > first_length:
            acc, top, total = _added_last_tokens(
                query, factor, acc, top, total, keys, values, pages,
                tl.maximum(begin, first_length), end, lengths, soft_cap, window,
                cache_block, cache_token, DIM, PAGE, LAST_TOKENS, FP8, CAPPED, WINDOWED,
            )  # fmt: skip
    return acc, top, total


_attended_rows: Any = triton.jit(_attend_rows)


def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, sinks, work, indptr, indices, last_page_lens,
    out, lse, partials, partial_lses, scale, value_scale, soft_cap, window, num_pieces,
    num_rows, q_token, cache_block, cache_head, cache_token,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, LAST_TOKENS: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Attends over one piece, for the rows of its run and the heads of one KV head.

    SHARED: the launch computes runs of several rows. Otherwise it computes single rows.
    One kernel for both would take more registers and memory than single rows need.
    """
    piece, kv_head = tl.program_id(0), tl.program_id(1)
    planned = tl.load(work + 1 + piece)
    row = tl.maximum(planned, 0)
    of_row = work + 1 + num_pieces
    pages, first_length, begin, end, run_rows, index = _extent_of_piece(
        work, of_row, num_rows, indptr, indices, last_page_lens, piece, row, PAGE
    )
    block = _block_of_tile(pages, begin, tl.minimum(end, first_length), PAGE, TILE)
    _wait_for_queries(FP8)
    if planned < 0 or (run_rows > 1) != SHARED:
        return
    within = tl.arange(0, COLUMNS) // GROUP
    head = kv_head * GROUP + tl.arange(0, COLUMNS) % GROUP
    acc, top, total = _attended_rows(
        q + (row + within).to(tl.int64) * q_token + head * DIM,
        keys + kv_head * cache_head, values + kv_head * cache_head, pages, run_rows,
        within, first_length, begin, end, block, scale, soft_cap, window, cache_block,
        cache_token, COLUMNS, DIM, PAGE, TILE, LAST_TOKENS, FP8, CAPPED, WINDOWED,
        SHARED,
    )  # fmt: skip
    if FP8:
        let_next_begin()
    _store_piece(
        out, lse, partials, partial_lses, sinks, of_row, num_rows, row, index,
        run_rows, within, head, acc, top, total, value_scale, GROUP, DIM,
    )  # fmt: skip


# Triton does not specialize kernels by these arguments, so that steps of any size use
# the same compiled kernels.
_PLANNED: Final = ["work", "indptr", "indices", "last_page_lens"]
_attend_kernel: Any = triton.jit(
    _attend,
    do_not_specialize=["window", "num_pieces", "num_rows"],
    do_not_specialize_on_alignment=_PLANNED,
)


def attend(
    q: Tensor, caches: tuple[Tensor, Tensor],
    planned: Sequence[Tensor], num_pieces: int,
    out: Tensor, lse: Tensor, partials: tuple[Tensor, Tensor], kind: AttentionKind,
    *, scale: float, value_scale: float, tile: int, max_run_rows: int,
    sinks: Tensor | None = None, small_programs: bool | None = None,
) -> None:  # fmt: skip
    """Attends for S rows with one query each.

    Args:
        q, out: [S, HQ, D], heads and elements contiguous; D a power of two.
        caches: [B, H, N, D] of keys and of values, with equal strides; of q's dtype, or
            float8_e4m3fn.
        planned: int32: the result of attention.pieces.plan_pieces, then the three
            arrays of the step's Pages.
        num_pieces: `max_pieces` of plan_pieces.
        lse: float32 [S, HQ]: filled with base-2 log-sum-exps, without sinks.
        partials: Memory for partial outputs and log-sum-exps, float32 of at least
            R * HQ * D and R * HQ elements, where R is `max_results` of plan_pieces.
        scale: Factor of the scores, including the FP8 scale of the keys.
        value_scale: FP8 scale of the values; 1.0 for all other dtypes.
        tile: Tokens read at once; the length of pieces is a multiple of `tile`.
        max_run_rows: The maximum number of rows of a run. If it is 1, no kernel for
            runs of several rows is launched.
        sinks: float32 [HQ], a logit for each head; see attention.base.LayerAttention.
        small_programs: Whether programs have fewer warps, and for some FP8 heads
            shorter tiles, which is faster for many programs. None: decided by their
            number.
    """
    keys, values = caches
    (num_rows, num_q_heads, dim) = q.shape
    num_kv_heads = keys.shape[1]
    assert keys.stride() == values.stride() and q.stride()[1:] == (dim, 1)
    group = num_q_heads // num_kv_heads
    is_fp8 = keys.element_size() == 1
    assert is_fp8 or keys.dtype == q.dtype, (keys.dtype, q.dtype)
    if small_programs is None:
        small_programs = num_pieces * num_kv_heads > _MIN_SMALL_PROGRAMS[is_fp8]
    # For each launch: the rows of a run, the tile, and the warps.
    launches = [(1, *_single_row_tile(tile, dim, small_programs, is_fp8))]
    if max_run_rows > 1 and num_rows > 1:
        launches.append((max_run_rows, tile, 4 if small_programs else 8))
    for run_rows, launch_tile, warps in launches:
        _attend_kernel[(num_pieces, num_kv_heads)](
            q, keys, values, sinks, *planned, out, lse, *partials,
            scale * _LOG2_E, value_scale, kind.soft_cap * _LOG2_E, kind.window or 0,
            num_pieces, num_rows, q.stride(0), *keys.stride()[:3],
            GROUP=group, COLUMNS=max(8, triton.next_power_of_2(group * run_rows)),
            LAST_TOKENS=max(16, triton.next_power_of_2(run_rows)),
            DIM=dim, PAGE=keys.shape[2], TILE=launch_tile, FP8=is_fp8,
            CAPPED=kind.soft_cap > 0, WINDOWED=kind.window is not None,
            SHARED=run_rows > 1,
            num_warps=warps, num_stages=3 if is_fp8 else 2, launch_pdl=PDL,
        )  # fmt: skip
    merge(
        planned[0], num_pieces, partials, out, lse, sinks,
        many_programs=small_programs or num_rows >= _MANY_ROWS,
    )  # fmt: skip


def _single_row_tile(
    tile: int, dim: int, small_programs: bool, is_fp8: bool
) -> tuple[int, int]:
    """Returns the tile and the warps of programs for single rows."""
    if not is_fp8:
        return tile, 4 if small_programs else 8
    if small_programs and dim <= 128:
        return min(tile, 4096 // dim), 1
    return tile, 2
