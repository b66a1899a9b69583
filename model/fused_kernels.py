"""Triton kernels for decode steps of few rows, where the libraries' leave the GPU half idle.

Measured on an H200 at one row of an 8B model, per layer: silu of 28,672 columns 4.8 us in
flashinfer, which gives a row to one thread block; a product with a residual added 13.4 us (4,096
inputs) and 32.8 us (14,336) in cuBLAS, which splits it and then sums, 10.0 and 30.4 us here.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

MAX_SILU_ROWS: Final = 256
_SILU_COLUMNS: Final = 1024  # of one program
_PRODUCT_ROWS: Final = 4  # of the weight, of one program
_PRODUCT_COLUMNS: Final = 1024  # of the weight, at a time


def _silu_and_mul(gate_up, out, width, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


_silu_kernel: Any = triton.jit(_silu_and_mul)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 n] -> silu of the first half times the second, [T, n]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, _SILU_COLUMNS))
    _silu_kernel[grid](gate_up, out, width, COLUMNS=_SILU_COLUMNS, num_warps=4)
    return out


def _add_product(  # type: ignore[no-untyped-def]
    x, weight, residual, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    start = weight + row[:, None].to(tl.int64) * width + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in range(0, width, COLUMNS):
        values = tl.load(x + done + column).to(tl.float32)
        total += tl.load(start + done).to(tl.float32) * values[None, :]
    result = tl.sum(total, 1) + tl.load(residual + row).to(tl.float32)
    tl.store(residual + row, result.to(residual.dtype.element_ty))


_product_kernel: Any = triton.jit(_add_product)


def can_add_product(weight: torch.Tensor) -> bool:
    """Whether `add_product` takes a weight of this shape."""
    rows, columns = weight.shape
    return rows % _PRODUCT_ROWS == 0 and columns % _PRODUCT_COLUMNS == 0


def add_product(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """residual [1, n] += x [1, m] times weight [n, m] transposed; all contiguous."""
    grid = (weight.shape[0] // _PRODUCT_ROWS,)
    _product_kernel[grid](
        x,
        weight,
        residual,
        weight.shape[1],
        ROWS=_PRODUCT_ROWS,
        COLUMNS=_PRODUCT_COLUMNS,
        num_warps=4,
    )
