"""Triton kernel that multiplies 2 to 16 rows by a 16-bit matrix.

A decode step of a few sequences, and the verification of proposed tokens, consist of
such products. Reading the matrices takes most of their time. The norm before a product,
and the gate or the residual after it, are computed in the same kernel.

A program keeps some columns of the result, for all rows, in registers. It reads its
rows of the matrix through shared memory, several tiles ahead of the tensor cores. The
matrix is the left operand of the tensor cores, because it has more rows than x. The
sums of a row do not depend on the other rows of x or on their number.
"""

import functools
import math
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, let_next_begin_and_wait
from model.fused_kernels import rms_norm

MIN_ROWS: Final = 2
MAX_ROWS: Final = 16
# The smallest tile of the matrix.
_MIN_COLUMNS: Final = 16
_MIN_DEPTH: Final = 64
# Tiles are made smaller until a product has at least this many programs.
_MIN_PROGRAMS: Final = 64
# Maximum number of column tiles of a product if several programs share each tile. Each
# tile needs a counter.
_MAX_COUNTERS: Final = 1024
# A matrix with more rows is assumed to be the head of a model. For heads, cuBLAS is as
# fast as this kernel.
_MAX_MATRIX_ROWS: Final = 1 << 16
_PREFETCH_PTX: Final = "cp.async.bulk.prefetch.L2.global [$1], {}; mov.u32 $0, 0;"


class Tile(NamedTuple):
    """How programs divide a product.

    Attributes:
        columns: columns of the result that a program computes; these are rows of the
            matrix, or twice as many rows if the product is gated.
        depth: elements of a row that are multiplied at a time.
        stages: tiles of the matrix in shared memory.
        split: programs that share the columns; each takes a part of the width.
        prefetch: elements of each row that are loaded into the L2 cache while the
            previous kernel ends.
    """

    columns: int
    depth: int
    stages: int
    warps: int
    split: int = 1
    prefetch: int = 0


# The fastest of the tiles that were measured on an H200, for each kind of matrix.
_TILES: Final = {
    "gated": Tile(columns=64, depth=128, stages=4, warps=8),
    "wide": Tile(columns=64, depth=256, stages=4, warps=4, prefetch=1024),
    "square": Tile(columns=64, depth=256, stages=4, warps=4, split=2),
    "deep": Tile(columns=32, depth=256, stages=6, warps=4),
}


def _prefetch_rows(  # type: ignore[no-untyped-def]
    at, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr,
    PIECES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Begins to load the first COUNT elements of COLUMNS rows into the L2 cache."""
    piece = tl.arange(0, COLUMNS * PIECES)
    offset = piece // PIECES * WIDTH + piece % PIECES * (COUNT // PIECES)
    tl.inline_asm_elementwise(
        PTX, "=r,l", [(at + offset).to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


_prefetched_rows: Any = triton.jit(_prefetch_rows)


def _sum_parts(  # type: ignore[no-untyped-def]
    at, exists, size, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr
):
    """Returns the sum of the partial sums of SPLIT programs, in their order."""
    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    for part in range(SPLIT):
        sums += tl.load(at + part * size, mask=exists, other=0.0, cache_modifier=".cg")
    return sums


_sum_of_parts: Any = triton.jit(_sum_parts)


def _store_part(  # type: ignore[no-untyped-def]
    at, counters, sums, exists, size, SPLIT: tl.constexpr
):
    """Stores the partial sums of this program. Returns whether this program is the last
    of the SPLIT programs that share its columns."""
    tl.store(at + tl.program_id(1) * size, sums, mask=exists)
    tl.debug_barrier()
    counter = counters + tl.program_id(0)
    is_last = tl.atomic_add(counter, 1) == SPLIT - 1
    if is_last:
        tl.store(counter, 0)  # for the next product
    return is_last


_stored_last: Any = triton.jit(_store_part)


def _norm_and_gate(  # type: ignore[no-untyped-def]
    sums, up_sums, squares, eps, WIDTH: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Divides products by the root mean squares of the rows of x, and applies the gate.

    Each operation is optional: see NORM and GATED.
    """
    if NORM:
        factors = 1 / tl.sqrt(tl.sum(squares, 1) / WIDTH + eps)
        sums *= factors[None, :]
        up_sums *= factors[None, :]
    if GATED:
        sums = sums / (1 + tl.exp(-sums)) * up_sums
    return sums


_normed: Any = triton.jit(_norm_and_gate)


def _few_rows(  # type: ignore[no-untyped-def]
    x, weight, bias, out, norm, residual, partial, counters, eps, x_stride, num_rows,
    num_out, WIDTH: tl.constexpr, BIASED: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PREFETCH: tl.constexpr,
    PIECES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Computes COLUMNS columns of the result."""
    SPLIT_WIDTH: tl.constexpr = WIDTH // SPLIT
    first_column = tl.program_id(0) * COLUMNS
    first = tl.program_id(1) * SPLIT_WIDTH
    up_offset = tl.cast(num_out, tl.int64) * WIDTH
    matrix = weight + first_column.to(tl.int64) * WIDTH + first
    if PREFETCH > 0:
        _prefetched_rows(matrix, COLUMNS, WIDTH, PREFETCH, PIECES, PTX)
    if PREFETCH > 0 and GATED:
        _prefetched_rows(matrix + up_offset, COLUMNS, WIDTH, PREFETCH, PIECES, PTX)
    index = tl.arange(0, COLUMNS)
    column = first_column + index
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    at = matrix + index[:, None] * WIDTH + depth[None, :]
    is_row = (row < num_rows)[:, None]
    x_at = x + row[:, None] * x_stride + first + depth[None, :]
    place = row[None, :] * num_out + column[:, None]
    exists = (row < num_rows)[None, :]
    shift = tl.zeros((COLUMNS,), tl.float32)
    if BIASED:
        shift = tl.load(bias + column).to(tl.float32)
    let_next_begin_and_wait()
    if ADD:
        added = tl.load(residual + place, mask=exists, other=0.0).to(tl.float32)
    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    up_sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    squares = tl.zeros((ROWS, DEPTH), tl.float32)
    for start in range(0, SPLIT_WIDTH, DEPTH):
        tile = tl.load(at + start, eviction_policy="evict_first")
        value = tl.load(x_at + start, mask=is_row, other=0.0)
        if NORM:
            wide = value.to(tl.float32)
            squares += wide * wide
            factor = tl.load(norm + start + depth).to(tl.float32)
            value = (wide * factor[None, :]).to(value.dtype)
        sums = tl.dot(tile, value.T, sums)
        if GATED:
            up_tile = tl.load(at + up_offset + start, eviction_policy="evict_first")
            up_sums = tl.dot(up_tile, value.T, up_sums)
    if SPLIT > 1:
        # The last of the programs that share the columns adds up their sums.
        size = num_rows * num_out
        if not _stored_last(partial + place, counters, sums, exists, size, SPLIT):
            return
        sums = _sum_of_parts(partial + place, exists, size, COLUMNS, ROWS, SPLIT)
    sums = _normed(sums, up_sums, squares, eps, WIDTH, NORM, GATED)
    if BIASED:
        sums += shift[:, None]
    if ADD:
        sums += added
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=exists)


_few_rows_kernel: Any = triton.jit(_few_rows, do_not_specialize=["num_rows"])


def has_kernel(weight: Tensor, *, gated: bool = False) -> bool:
    """Returns whether `few_rows` can multiply by the matrix [out, in], which is on a
    GPU.

    True only on a Hopper GPU, for a contiguous matrix of whole tiles that is not the
    head of a model.
    """
    num_out = weight.shape[0] >> gated
    width = weight.shape[1]
    if num_out % _MIN_COLUMNS or width % _MIN_DEPTH or num_out > _MAX_MATRIX_ROWS:
        return False
    is_hopper = torch.cuda.get_device_capability(weight.device)[0] == 9
    return is_hopper and weight.is_contiguous()


@functools.cache
def tile_for(num_out: int, width: int, *, gated: bool, normed: bool) -> Tile:
    """Returns the tile for a result of `num_out` columns.

    The tile does not depend on the number of rows of x, so the sums of a row do not
    depend on that number either.
    """
    if gated:
        kind = "gated"
    elif width > 2 * num_out:
        kind = "deep"
    elif num_out > width:
        kind = "wide"
    else:
        kind = "square"
    tile = _TILES[kind]
    columns = math.gcd(tile.columns, num_out)
    split = math.gcd(tile.split, width // _MIN_DEPTH)
    if gated or normed or num_out // columns > _MAX_COUNTERS:
        split = 1
    while columns > _MIN_COLUMNS and num_out // columns * split < _MIN_PROGRAMS:
        columns //= 2
    depth = math.gcd(tile.depth, width // split)
    prefetch = tile.prefetch if tile.prefetch <= width // split else 0
    return tile._replace(columns=columns, depth=depth, split=split, prefetch=prefetch)


@functools.cache
def _counters(device: torch.device, stream: int) -> Tensor:
    """Returns counters that are 0 before and after each product.

    The products of a stream run one after the other, so they can share the counters.
    """
    return torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)


def few_rows(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Multiplies x [T, in] by a weight [out, in], for T of 2 to 16.

    Args:
        bias: [out], added to the product. Not with `gated`.
        norm: weight of a root-mean-square norm that is applied to x first.
        gated: the first half of the weight is a gate. The result [T, out / 2] is
            silu(first half of the product) * (second half of the product).
        residual: [T, out], contiguous, to which the product is added in place.
        tile: None: the result of `tile_for`. A tile that splits the width allows no
            norm and no gate.

    Returns:
        [T, out]: the residual if given, else a new tensor.
    """
    if norm is not None and x.dtype == torch.float16:
        # The kernel multiplies by the norm's weight before it divides by the row's root
        # mean square. The product may overflow float16.
        x = rms_norm(x, norm, eps)
        norm = None
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, width = x.shape
    num_out = weight.shape[0] >> gated
    if tile is None:
        tile = tile_for(num_out, width, gated=gated, normed=norm is not None)
    out = residual
    if out is None:
        out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, norm, residual, eps, tile, gated=gated)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    norm: Tensor | None,
    residual: Tensor | None,
    eps: float,
    tile: Tile,
    *,
    gated: bool,
) -> None:
    """Launches the kernel for the arguments of `few_rows`, with a tile."""
    num_rows, width = x.shape
    num_out = out.shape[1]
    partial_sums = None
    counters = None
    if tile.split > 1:
        shape = (tile.split, num_rows, num_out)
        partial_sums = x.new_empty(shape, dtype=torch.float32)
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        counters = _counters(x.device, stream)
    pieces = max(1, 32 * tile.warps // tile.columns)  # a thread prefetches one piece
    _few_rows_kernel[(num_out // tile.columns, tile.split)](
        x,
        weight,
        bias,
        out,
        norm,
        residual,
        partial_sums,
        counters,
        eps,
        x.stride(0),
        num_rows,
        num_out,
        WIDTH=width,
        BIASED=bias is not None,
        NORM=norm is not None,
        GATED=gated,
        ADD=residual is not None,
        SPLIT=tile.split,
        ROWS=MAX_ROWS,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        PREFETCH=tile.prefetch,
        PIECES=pieces,
        PTX=_PREFETCH_PTX.format(2 * tile.prefetch // pieces),
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=PDL,
    )
