"""Triton kernels for the decoder: norms, products of one row, products in a feed-forward.

Sizes that differ from step to step are not specialised (`do_not_specialize`): one variant serves
all, so that what has run once before a server is ready compiles nothing more.
"""

import functools
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.launch import PDL, let_next_begin_and_wait, wait
from model.quantization.quantized import FP8, Quantized, Weight

_NORM_ELEMENTS: Final = 1024  # of one program, at least: rows of few elements share one
_ELEMENTS_OF_A_WARP: Final = 512
_MAX_WARPS: Final = 16
_SILU_COLUMNS: Final = 1024  # of one program


def _rms_norm(  # type: ignore[no-untyped-def]
    x, weight, out, eps, token_stride, head_stride, num_heads, num_rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A row is a head of a token; names of the form x_stride are in elements."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    scales = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    # It begins while the kernel before it ends, and lets its successor do so.
    let_next_begin_and_wait()
    at = (row // num_heads).to(tl.int64) * token_stride + row % num_heads * head_stride
    value = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    size = tl.sqrt(tl.sum(value * value, 1) / WIDTH + eps)
    result = value / size[:, None] * scales
    place = out + row.to(tl.int64) * WIDTH + column
    tl.store(place, result.to(out.dtype.element_ty), mask=inside)


_norm_kernel: Any = triton.jit(_rms_norm, do_not_specialize=["num_rows"])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, n] or [T, heads, n], whose last dimension is contiguous, normed over it."""
    width, num_heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(width)
    rows = max(1, _NORM_ELEMENTS // columns)
    _norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, weight, out, eps, x.stride(0), x.stride(1) if x.dim() == 3 else 0, num_heads, num_rows,
        WIDTH=width, ROWS=rows, COLUMNS=columns,
        num_warps=min(_MAX_WARPS, rows * columns // _ELEMENTS_OF_A_WARP), launch_pdl=PDL,
    )  # fmt: skip
    return out


def _silu_and_mul(gate_up, out, width, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    wait()  # it begins while the matrix product before it ends
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


_silu_kernel: Any = triton.jit(_silu_and_mul)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 n] -> silu of the first half times the second, [T, n]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, _SILU_COLUMNS))
    _silu_kernel[grid](
        gate_up, out, width, COLUMNS=_SILU_COLUMNS, num_warps=4, launch_pdl=PDL
    )
    return out


# -- products of one row: a decode step of batch 1 consists of them. Such a product is bound by
# reading the matrix. What comes before it (the norm) and after it (silu, adding to the residual) is
# done in the same kernel, and each kernel starts to load its matrix while the one before it is
# still ending (programmatic dependent launch), before it waits for its input.

# Elements that a thread loads at once, and whose products it adds up: as many as are 16 bytes of x,
# which would have to go through shared memory to be multiplied by more.
FOLD: Final = 8
_MIN_COLUMNS: Final = 128
_MAX_WHOLE: Final = (
    16384  # columns of FP8 rows that are loaded at once: more must be under way
)
_HELD_BYTES: Final = 24 << 20  # of smaller matrices programs hold nearly all at once
_HELD: Final = 1 << 14  # elements of such a one in a program
_MAX_SHORT: Final = 4096  # columns


def _one_row(  # type: ignore[no-untyped-def]
    x, weight, scales, out, norm, residual, eps, WIDTH: tl.constexpr, NUM_OUT: tl.constexpr,
    SCALED: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Whatever does not come from the kernel before it is loaded before the wait."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS // FOLD)[:, None] * FOLD + tl.arange(0, FOLD)[None, :]
    at = weight + row[None, :, None].to(tl.int64) * WIDTH + column[:, None, :]
    inside = column < WIDTH
    tile = tl.load(
        at, mask=inside[:, None, :], other=0.0, eviction_policy="evict_first"
    )
    scale = tl.load(scales + row) if SCALED else 1.0
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
        inside = start + COLUMNS + column < WIDTH  # of the tile that is multiplied next
        after, more = start + COLUMNS, inside[:, None, :]
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
    tl.store(out + row, (result + added).to(out.dtype.element_ty))


_one_row_kernel: Any = triton.jit(_one_row)


def one_row_works(weight: Weight, *, gated: bool = False) -> bool:
    """Whether `one_row` can take the matrix [out, in], a contiguous one on a GPU, perhaps of FP8
    with a scale for each row."""
    matrix = weight if isinstance(weight, Tensor) else weight.codes
    if isinstance(weight, Quantized) and (
        weight.kind != "fp8" or weight.scales.shape[-1] > 1
    ):
        return False
    fits = weight.shape[1] % _MIN_COLUMNS == 0
    fits = fits and weight.shape[0] % (_tile_of(weight, gated=gated)[0] << gated) == 0
    return fits and matrix.is_contiguous()


def _tile_of(weight: Weight, *, gated: bool) -> tuple[int, int, int]:
    """Rows of a program (of either half), columns that it loads at a time, warps: the fastest of
    some on an H200."""
    num_out, width = weight.shape
    columns = width & -width  # the largest power of two that divides it
    is_short, is_code = columns == width <= _MAX_SHORT, isinstance(weight, Quantized)
    is_held = num_out * width << (not is_code) < _HELD_BYTES and not gated
    if is_code:
        whole, rows = triton.next_power_of_2(width), 8 if is_held else 4
        if whole > _MAX_WHOLE:
            return rows, min(columns, 1024), 4
        return (4, whole, 8) if whole > _MAX_SHORT else (rows, whole, 4)
    if gated:
        return (2, width, 8) if is_short else (2, min(columns, 1024), 4)
    if is_held and is_short:
        most = max(1, num_out // 64)  # so that there are as many programs, or more
        return (
            min(_HELD // width, num_out & -num_out, 1 << most.bit_length() - 1),
            width,
            4,
        )
    if is_short and num_out > 1 << 16:  # a head
        return 4, width, 8
    return (2, min(columns, 2048), 4) if is_held else (4, min(columns, 1024), 4)


def one_row(
    x: Tensor,
    weight: Weight,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """weight [out, in] times x [1, in] -> [1, out] of `dtype`, else of x's.

    Args:
        norm: the weight of a root-mean-square norm that x passes first.
        gated: the weight is a gate's rows, then as many others: silu of the first half times the
            second, [1, out / 2].
        residual: [1, out], added to, and returned.
    """
    num_out, width = weight.shape[0] >> gated, weight.shape[1]
    matrix, scales = weight, None
    if isinstance(weight, Quantized):
        matrix, scales = weight.codes.view(FP8), weight.scales
    out = residual
    if out is None:
        out = torch.empty(1, num_out, dtype=dtype or x.dtype, device=x.device)
    rows, columns, warps = _tile_of(weight, gated=gated)
    _one_row_kernel[(num_out // rows,)](
        x, matrix, scales, out, norm, residual, eps, WIDTH=width, NUM_OUT=num_out,
        SCALED=scales is not None, NORM=norm is not None, GATED=gated, ADD=residual is not None,
        ROWS=rows, COLUMNS=columns, FOLD=FOLD, num_warps=warps, launch_pdl=PDL,
    )  # fmt: skip
    return out


# -- silu(gate(x)) * up(x) of many rows: the product of a prefill's feed-forward. With cuBLAS the
# two products are written, 0.5 GB for 8,192 tokens of an 8B model, and read by another kernel. Here
# a program keeps a tile of both in registers and writes only the result. There are as many programs
# as multiprocessors, each of which computes one tile after another; operands are loaded by TMA,
# which fills what is outside x with zeros.

GATED_MIN_ROWS: Final = 1024  # of fewer the tiles do not fill the GPU evenly


# How the kernel divides its work; measured on an H200.
_TILE_ROWS: Final = 128  # of x
_TILE_COLUMNS: Final = 128  # of the result
_TILE_DEPTH: Final = 64  # elements of a row multiplied at a time
_TILE_GROUP: Final = (
    8  # tiles of rows whose programs run beside each other, sharing the matrix
)
_GATED_STAGES: Final = 3
_GATED_WARPS: Final = 8


def _gated_rows(  # type: ignore[no-untyped-def]
    x, weight, out, num_rows, num_columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
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


def gated_rows_work(weight: Tensor) -> bool:
    """Whether `gated_rows` can take the matrix [2 n, in], a contiguous one on a GPU."""
    num_out, width = weight.shape
    return (
        torch.cuda.get_device_capability(weight.device)[0] == 9
        and weight.is_contiguous()
        and num_out % (2 * _TILE_COLUMNS) == 0
        and width % _TILE_DEPTH == 0
    )


def gated_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weight [2 n, in] -> silu of the first n columns times the others, [T, n]."""
    num_rows, width = x.shape
    num_columns = weight.shape[0] // 2
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    programs, rows, columns, depth = (
        _num_programs(x.device),
        _TILE_ROWS,
        _TILE_COLUMNS,
        _TILE_DEPTH,
    )
    both = (
        [2, num_columns, width],
        [num_columns * width, width, 1],
        [2, columns, depth],
    )
    _gated_rows_kernel[(programs,)](
        TensorDescriptor(x, [num_rows, width], [width, 1], [rows, depth]),
        TensorDescriptor(weight, *both),
        TensorDescriptor(out, [num_rows, num_columns], [num_columns, 1], [rows, columns]),
        num_rows, num_columns, width, ROWS=rows, COLUMNS=columns, DEPTH=depth, GROUP=_TILE_GROUP,
        PROGRAMS=programs, num_warps=_GATED_WARPS, num_stages=_GATED_STAGES,
    )  # fmt: skip
    return out
