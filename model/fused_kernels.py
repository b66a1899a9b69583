"""Triton kernels of the decoder: norms, one-row products, feed-forward products.

For sizes that differ from step to step, Triton must not compile specialized variants
(`do_not_specialize`). One variant serves all sizes. So after a kernel has run once at
start-up, no step waits for its compilation.
"""

import functools
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.launch import PDL, let_next_begin_and_wait, wait
from model.quantization.quantized import FP8, Quantized, Weight

# A program of the norm processes at least this many elements. If rows are short, these
# elements are in several rows.
_MIN_NORM_ELEMENTS: Final = 1024
_ELEMENTS_PER_WARP: Final = 512
_MAX_WARPS: Final = 16
_SILU_COLUMNS: Final = 1024  # columns of one program


def _rms_norm(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    eps,
    token_stride,
    head_stride,
    num_heads,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalizes rows. A row is a token or one head of it; strides are in elements."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    scales = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    # This kernel begins while the previous kernel ends, and lets the next kernel begin.
    let_next_begin_and_wait()
    at = (row // num_heads).to(tl.int64) * token_stride + row % num_heads * head_stride
    value = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    size = tl.sqrt(tl.sum(value * value, 1) / WIDTH + eps)
    result = value / size[:, None] * scales
    place = out + row.to(tl.int64) * WIDTH + column
    tl.store(place, result.to(out.dtype.element_ty), mask=inside)


_norm_kernel: Any = triton.jit(_rms_norm, do_not_specialize=["num_rows"])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalizes x, [T, n] or [T, heads, n], over the last, contiguous dimension."""
    width = x.shape[-1]
    has_heads = x.dim() == 3
    num_heads = x.shape[1] if has_heads else 1
    head_stride = x.stride(1) if has_heads else 0
    num_rows = x.shape[0] * num_heads
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(width)
    rows = max(1, _MIN_NORM_ELEMENTS // columns)
    _norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        weight,
        out,
        eps,
        x.stride(0),
        head_stride,
        num_heads,
        num_rows,
        WIDTH=width,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=min(_MAX_WARPS, rows * columns // _ELEMENTS_PER_WARP),
        launch_pdl=PDL,
    )
    return out


def _silu_and_mul(  # type: ignore[no-untyped-def]
    gate_up, out, width, COLUMNS: tl.constexpr
):
    wait()  # this kernel begins while the matrix product before it ends
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


_silu_kernel: Any = triton.jit(_silu_and_mul)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate_up[:, :n]) * gate_up[:, n:], [T, n], for gate_up [T, 2 n]."""
    rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, _SILU_COLUMNS))
    _silu_kernel[grid](
        gate_up, out, width, COLUMNS=_SILU_COLUMNS, num_warps=4, launch_pdl=PDL
    )
    return out


# -- Products of one row. A decode step of one sequence consists of such products, and
# reading the matrices takes most of its time. The norm before the product, and silu or
# the residual after it, are computed in the same kernel. Each kernel starts to load its
# matrix while the previous kernel ends (programmatic dependent launch), before it waits
# for its input.

# A thread loads this many elements at once, which are 16 bytes of x, and sums their
# products. Larger numbers of elements would have to go through shared memory.
FOLD: Final = 8
# The number of columns must be a multiple of this number, so that all rows are aligned.
_MIN_COLUMNS: Final = 64
# The number of columns of a tile is usually the largest power of two that divides the
# width of a row. If that power is below _MIN_FULL_COLUMNS, _PARTIAL_COLUMNS is used
# instead, and the last tile is not full.
_PARTIAL_COLUMNS: Final = 1024
_MIN_FULL_COLUMNS: Final = 512
# FP8 rows up to this number of columns are loaded at once. Wider rows are loaded in
# tiles, to have more loads in flight.
_MAX_FULL_ROW_COLUMNS: Final = 16384
# A matrix below this size fits almost completely into the registers of the programs
# that run concurrently.
_MAX_HELD_BYTES: Final = 24 << 20
# One program loads at most this many elements of a matrix below _MAX_HELD_BYTES.
_HELD_ELEMENTS: Final = 1 << 14
_MAX_SHORT_COLUMNS: Final = 4096
# A matrix with more rows is assumed to be the head of a model.
_MIN_HEAD_ROWS: Final = 1 << 16


def _one_row(  # type: ignore[no-untyped-def]
    x, weight, scales, bias, out, norm, residual, eps, WIDTH: tl.constexpr,
    NUM_OUT: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Multiplies the row x by ROWS rows of the matrix.

    Inputs that the previous kernel does not write are loaded before the wait.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS // FOLD)[:, None] * FOLD + tl.arange(0, FOLD)[None, :]
    at = weight + row[None, :, None].to(tl.int64) * WIDTH + column[:, None, :]
    inside = column < WIDTH
    tile = tl.load(
        at, mask=inside[:, None, :], other=0.0, eviction_policy="evict_first"
    )
    scale = tl.load(scales + row) if SCALED else 1.0
    shift = tl.load(bias + row).to(tl.float32) if BIASED else 0.0
    if GATED:
        up_at = at + NUM_OUT * WIDTH
        up_tile = tl.load(
            up_at, mask=inside[:, None, :], other=0.0, eviction_policy="evict_first"
        )
        up = tl.zeros((COLUMNS // FOLD, ROWS), tl.float32)
        up_scale = tl.load(scales + NUM_OUT + row) if SCALED else 1.0
    if NORM:
        factor = tl.load(norm + column, mask=inside, other=0.0)
    let_next_begin_and_wait()
    added = tl.load(residual + row).to(tl.float32) if ADD else 0.0
    sums = tl.zeros((COLUMNS // FOLD, ROWS), tl.float32)
    squares = tl.zeros((COLUMNS // FOLD,), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
        inside = start + COLUMNS + column < WIDTH  # for the next tile
        after = start + COLUMNS
        more = inside[:, None, :]
        if NORM:
            squares += tl.sum(value * value, 1)
            value *= factor.to(tl.float32)
            factor = tl.load(norm + after + column, mask=inside, other=0.0)
        sums += tl.sum(tile.to(tl.float32) * value[:, None, :], 2)
        tile = tl.load(at + after, mask=more, other=0.0, eviction_policy="evict_first")
        if GATED:
            up += tl.sum(up_tile.to(tl.float32) * value[:, None, :], 2)
            up_tile = tl.load(
                up_at + after, mask=more, other=0.0, eviction_policy="evict_first"
            )
    size = 1 / tl.sqrt(tl.sum(squares) / WIDTH + eps) if NORM else 1.0
    result = tl.sum(sums, 0) * (scale * size)
    if GATED:
        result = result / (1 + tl.exp(-result)) * (tl.sum(up, 0) * (up_scale * size))
    tl.store(out + row, (result + shift + added).to(out.dtype.element_ty))


_one_row_kernel: Any = triton.jit(_one_row)


def has_one_row_kernel(weight: Weight, *, gated: bool = False) -> bool:
    """Returns whether `one_row` can multiply by the matrix [out, in], which is on a
    GPU.

    The matrix must be contiguous. It may be FP8 with a scale for each row.
    """
    matrix = weight if isinstance(weight, Tensor) else weight.codes
    if isinstance(weight, Quantized):
        has_groups = weight.scales.shape[-1] > 1
        if weight.kind != "fp8" or has_groups:
            return False
    if weight.shape[1] % _MIN_COLUMNS:
        return False
    tile_rows = _tile_of(weight, gated=gated).rows
    rows_per_program = 2 * tile_rows if gated else tile_rows
    return weight.shape[0] % rows_per_program == 0 and matrix.is_contiguous()


class _RowTile(NamedTuple):
    """How a program of `_one_row` divides the matrix.

    Attributes:
        rows: rows of the matrix that the program multiplies by.
        columns: columns that the program loads at a time.
    """

    rows: int
    columns: int
    warps: int


def _tile_of(weight: Weight, *, gated: bool) -> _RowTile:
    """Returns the tile for a weight: the fastest of those measured on an H200."""
    num_out, width = weight.shape
    columns = width & -width  # the largest power of two that divides the width
    if columns < min(_MIN_FULL_COLUMNS, triton.next_power_of_2(width)):
        columns = min(_PARTIAL_COLUMNS, triton.next_power_of_2(width))
    is_short = columns == width <= _MAX_SHORT_COLUMNS
    is_fp8 = isinstance(weight, Quantized)
    num_bytes = num_out * width * (1 if is_fp8 else 2)
    is_held = num_bytes < _MAX_HELD_BYTES and not gated
    if is_fp8:
        full_row = triton.next_power_of_2(width)
        rows = 8 if is_held else 4
        if full_row > _MAX_FULL_ROW_COLUMNS:
            return _RowTile(rows, min(columns, 1024), 4)
        if full_row > _MAX_SHORT_COLUMNS:
            return _RowTile(4, full_row, 8)
        return _RowTile(rows, full_row, 4)
    if gated:
        if is_short:
            return _RowTile(2, width, 8)
        return _RowTile(2, min(columns, 1024), 4)
    if is_held and is_short:
        # There should be at least 64 programs.
        max_rows = max(1, num_out // 64)
        max_rows_power = 1 << max_rows.bit_length() - 1
        rows = min(_HELD_ELEMENTS // width, num_out & -num_out, max_rows_power)
        return _RowTile(rows, width, 4)
    if is_short and num_out > _MIN_HEAD_ROWS:
        return _RowTile(4, width, 8)
    if is_held:
        return _RowTile(2, min(columns, 2048), 4)
    return _RowTile(4, min(columns, 1024), 4)


def one_row(
    x: Tensor,
    weight: Weight,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies x [1, in] by a weight [out, in].

    Args:
        bias: [out], added to the product. Not with `gated`.
        norm: weight of a root-mean-square norm that is applied to x first.
        gated: the first half of the weight is a gate. The result [1, out / 2] is
            silu(first half of the product) * (second half of the product).
        residual: [1, out], to which the product is added in place.
        dtype: data type of the result; None: that of x.

    Returns:
        [1, out]: the residual if given, else a new tensor.
    """
    num_out = weight.shape[0] >> gated
    width = weight.shape[1]
    matrix: Any = weight
    scales = None
    if isinstance(weight, Quantized):
        matrix = weight.codes.view(FP8)
        scales = weight.scales
    out = residual
    if out is None:
        out = torch.empty(1, num_out, dtype=dtype or x.dtype, device=x.device)
    rows, columns, warps = _tile_of(weight, gated=gated)
    _one_row_kernel[(num_out // rows,)](
        x,
        matrix,
        scales,
        bias,
        out,
        norm,
        residual,
        eps,
        WIDTH=width,
        NUM_OUT=num_out,
        SCALED=scales is not None,
        BIASED=bias is not None,
        NORM=norm is not None,
        GATED=gated,
        ADD=residual is not None,
        ROWS=rows,
        COLUMNS=columns,
        FOLD=FOLD,
        num_warps=warps,
        launch_pdl=PDL,
    )
    return out


# -- silu(gate(x)) * up(x) of many rows: the product of a prefill's feed-forward. With
# cuBLAS, both products (0.5 GB for 8,192 tokens of an 8B model) are written to memory
# and read by another kernel. In `_gated_rows`, a program keeps a tile of both products
# in registers and writes only the result. There are as many programs as
# multiprocessors, and each computes one tile after another. Operands are loaded by TMA,
# which fills rows outside of x with zeros.

GATED_MIN_ROWS: Final = 1024  # with fewer rows, tiles do not fill the GPU evenly

# The fastest division of the work that was measured on an H200.
_TILE_ROWS: Final = 128  # rows of x
_TILE_COLUMNS: Final = 128  # columns of the result
_TILE_DEPTH: Final = 64  # elements of a row that are multiplied at a time
# Number of tiles of rows that are computed at the same time, so that their programs
# share the matrix in the cache.
_TILE_GROUP: Final = 8
_GATED_STAGES: Final = 3
_GATED_WARPS: Final = 8


def _gated_rows(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    num_rows,
    num_columns,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    down = tl.cdiv(num_rows, ROWS)
    across = tl.cdiv(num_columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS):
        first = tile // (GROUP * across) * GROUP
        height = min(down - first, GROUP)
        row = (first + tile % (GROUP * across) % height) * ROWS
        column = tile % (GROUP * across) // height * COLUMNS
        both = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
        for step in range(tl.cdiv(width, DEPTH)):
            left = x.load([row, step * DEPTH])
            right = weight.load([0, column, step * DEPTH])
            both = tl.dot(left, tl.reshape(right, (2 * COLUMNS, DEPTH)).T, both)
        gate, up = tl.split(tl.permute(tl.reshape(both, (ROWS, 2, COLUMNS)), (0, 2, 1)))
        result = (gate / (1 + tl.exp(-gate)) * up).to(out.dtype)
        out.store([row, column], result)


_gated_rows_kernel: Any = triton.jit(_gated_rows, do_not_specialize=["num_rows"])


@functools.cache
def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_gated_rows_kernel(weight: Tensor) -> bool:
    """Returns whether `gated_rows` can multiply by the matrix [2 n, in].

    True only on a Hopper GPU, for a contiguous matrix of whole tiles.
    """
    num_out, width = weight.shape
    return (
        torch.cuda.get_device_capability(weight.device)[0] == 9
        and weight.is_contiguous()
        and num_out % (2 * _TILE_COLUMNS) == 0
        and width % _TILE_DEPTH == 0
    )


def gated_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies x [T, in] by a weight [2 n, in].

    Returns:
        silu(first n columns of the product) * (last n columns), [T, n].
    """
    num_rows, width = x.shape
    num_columns = weight.shape[0] // 2
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    programs = _num_programs(x.device)
    x_tile = [_TILE_ROWS, _TILE_DEPTH]
    weight_tile = [2, _TILE_COLUMNS, _TILE_DEPTH]
    out_tile = [_TILE_ROWS, _TILE_COLUMNS]
    _gated_rows_kernel[(programs,)](
        TensorDescriptor(x, [num_rows, width], [width, 1], x_tile),
        TensorDescriptor(
            weight,
            [2, num_columns, width],
            [num_columns * width, width, 1],
            weight_tile,
        ),
        TensorDescriptor(out, [num_rows, num_columns], [num_columns, 1], out_tile),
        num_rows,
        num_columns,
        width,
        ROWS=_TILE_ROWS,
        COLUMNS=_TILE_COLUMNS,
        DEPTH=_TILE_DEPTH,
        GROUP=_TILE_GROUP,
        PROGRAMS=programs,
        num_warps=_GATED_WARPS,
        num_stages=_GATED_STAGES,
    )
    return out
