"""Triton kernels for vector-matrix products: a decode step of batch 1 consists of them.

Such a product is bound by reading the matrix. What comes before it (the norm) and after it (silu,
adding to the residual) is done in the same kernel, and each kernel starts to load its matrix while
the one before it is still ending (programmatic dependent launch), before it waits for its input.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

_ROWS: Final = 4  # of the matrix, of one program
_GATED_ROWS: Final = 2  # of either half of a gated one: 2 and 4 take 4.01 and 4.09 ms a step of 8B
_MAX_COLUMNS: Final = 1024  # loaded at a time
_MIN_COLUMNS: Final = 128
_WARPS: Final = 4
AHEAD = True  # whether kernels begin before the one before them has ended


def _wait(AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


_wait = triton.jit(_wait)


def _product(  # type: ignore[no-untyped-def]
    x, weight, out, norm, residual, eps, WIDTH: tl.constexpr, NUM_OUT: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    tile_at = weight + row[:, None].to(tl.int64) * WIDTH + column[None, :]
    tile = tl.load(tile_at, eviction_policy="evict_first")
    if GATED:
        up_at = tile_at + NUM_OUT * WIDTH
        up_tile = tl.load(up_at, eviction_policy="evict_first")
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
    _wait(AHEAD)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        more = start + COLUMNS < WIDTH
        value = tl.load(x + start + column).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm + start + column).to(tl.float32)
        sums += tile.to(tl.float32) * value[None, :]
        tile = tl.load(
            tile_at + start + COLUMNS, mask=more, other=0.0, eviction_policy="evict_first"
        )
        if GATED:
            up += up_tile.to(tl.float32) * value[None, :]
            up_tile = tl.load(
                up_at + start + COLUMNS, mask=more, other=0.0, eviction_policy="evict_first"
            )
    scale = 1.0
    if NORM:
        scale = 1 / tl.sqrt(tl.sum(squares) / WIDTH + eps)
    result = tl.sum(sums, 1) * scale
    if GATED:
        result = result / (1 + tl.exp(-result)) * (tl.sum(up, 1) * scale)
    if ADD:
        result += tl.load(residual + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


_kernel: Any = triton.jit(_product)


def works(weight: torch.Tensor, *, gated: bool = False) -> bool:
    """Whether the functions below can take the matrix [out, in], a contiguous one on a GPU."""
    num_out, width = weight.shape
    return weight.is_contiguous() and _columns(width) > 0 and num_out % (_ROWS << gated) == 0


def _columns(width: int) -> int:
    """The largest power of two to load at a time that divides the width; 0: none will do."""
    largest = min(width & -width, _MAX_COLUMNS)
    return largest if largest >= _MIN_COLUMNS else 0


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """weight [out, in] times x [1, in] -> [1, out].

    Args:
        norm: the weight of a root-mean-square norm that x passes first.
        gated: the weight is a gate's rows, then as many others: silu of the first half times the
            second, [1, out / 2].
        residual: [1, out], added to, and returned.
    """
    num_out, width = weight.shape[0] >> gated, weight.shape[1]
    out = residual
    if out is None:
        out = torch.empty(1, num_out, dtype=x.dtype, device=x.device)
    options = {"launch_pdl": True} if AHEAD else {}
    rows = _GATED_ROWS if gated else _ROWS
    _kernel[(num_out // rows,)](
        x, weight, out, norm, residual, eps, WIDTH=width, NUM_OUT=num_out,
        NORM=norm is not None, GATED=gated, ADD=residual is not None, AHEAD=AHEAD,
        ROWS=rows, COLUMNS=_columns(width), num_warps=_WARPS, **options,
    )  # fmt: skip
    return out
