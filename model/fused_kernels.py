"""Triton kernels for decode steps of few rows, where the libraries' leave the GPU half idle.

Measured on an H200 for one row of an 8B model, 28,672 columns: silu takes 4.8 us in flashinfer,
which gives a row to one thread block, and 1.4 us here.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

MAX_SILU_ROWS: Final = 256
_SILU_COLUMNS: Final = 1024  # of one program


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
