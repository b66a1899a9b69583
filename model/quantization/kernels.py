"""The Triton kernel of products by quantised weights. Codes become numbers in registers, exact in
16 bits; scales are applied to sums in float32: nothing but the input and the result is rounded."""

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.quantization.quantized import FP8, Quantized

MIN_DEPTH: Final = 32  # columns multiplied at a time
_MAX_DEPTH: Final = 128
# Rows of x of a program, columns of the result, warps and stages, by the rows of x at most.
_TILES: Final = ((16, (16, 32, 4, 4)), (64, (64, 64, 4, 4)), (math.inf, (128, 128, 8, 3)))


def _tile(ends, num_rows, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and last row, and expert, of this program; none of those that are too many."""
    tile = tl.program_id(0)
    first, last, expert = tile * ROWS, num_rows, 0
    if EXPERTS > 0:
        index = tl.arange(0, EXPERTS)
        stop = tl.load(ends + index, mask=index < num_experts, other=0)
        start = tl.load(ends + index - 1, mask=(index > 0) & (index < num_experts), other=0)
        tiles = tl.where(index < num_experts, (stop - start + ROWS - 1) // ROWS, 0)
        behind = tl.cumsum(tiles, 0)
        expert = tl.sum((behind <= tile).to(tl.int32), 0)
        own = index == expert
        first = tl.sum(tl.where(own, start + (tile - behind + tiles) * ROWS, 0), 0)
        last = tl.sum(tl.where(own, stop, 0), 0)
    return first, last, expert


_tile = triton.jit(_tile)


def _multiply(  # type: ignore[no-untyped-def]
    x, codes, scales, zeros, out, ends, num_rows, num_out, num_experts,
    WIDTH: tl.constexpr, KIND: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    first, last, expert = _tile(ends, num_rows, num_experts, EXPERTS, ROWS)
    if first >= last:
        return
    row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < num_out
    of_codes = (column + expert * num_out.to(tl.int64))[:, None]
    of_scales = (column + expert * num_out.to(tl.int64)) * NUM_GROUPS
    depth = tl.arange(0, DEPTH)[None, :]
    half = tl.arange(0, DEPTH // 2)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, DEPTH):
        inside = start + depth < WIDTH
        left = tl.load(x + row * WIDTH + start + depth, mask=(row < last) & inside, other=0.0)
        group = of_scales + start // GROUP
        scale = tl.load(scales + group, mask=exists, other=0)
        if scales.dtype.element_ty == tl.uint8:
            scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        if KIND == "fp8":
            at = codes + of_codes * WIDTH + start + depth
            right = tl.load(at, mask=exists[:, None] & inside, other=0.0).to(dtype)
        else:
            at = codes + of_codes * (WIDTH // 2) + start // 2 + half
            pair = tl.load(at, mask=exists[:, None] & (start + 2 * half < WIDTH), other=0)
            zero = tl.full((COLUMNS,), 8, tl.int32)
            if HAS_ZEROS:
                zero = tl.load(zeros + group, mask=exists, other=0).to(tl.int32)
            code = tl.interleave(pair & 15, pair >> 4).to(tl.int32)
            number = code - zero[:, None]
            if KIND == "fp4":  # twice what it says
                size = code & 7
                size = tl.where(size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16))
                number = tl.where(code > 7, -size, size)
            right = number.to(dtype)
        factor = scale.to(tl.float32) * (0.5 if KIND == "fp4" else 1.0)
        sums += tl.dot(left, tl.trans(right)) * factor[None, :]
    place = out + row * num_out + column[None, :]
    tl.store(place, sums.to(dtype), mask=(row < last) & exists[None, :])


_multiply_kernel: Any = triton.jit(_multiply, do_not_specialize=["num_rows", "num_experts"])


def depth_of(weight: Quantized) -> int:
    """Columns that can be multiplied at a time: within one group, a power of two."""
    return math.gcd(weight.group if weight.scales.shape[-1] > 1 else 0, _MAX_DEPTH)


def multiply(weight: Quantized, x: Tensor, ends: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out]; with `ends` int32 [experts], each expert's rows end there."""
    num_rows, experts = len(x), 0 if ends is None else len(ends)
    *_, num_out, width = weight.shape
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    each = num_rows // max(1, experts)
    rows, columns, warps, stages = next(tile for most, tile in _TILES if each <= most)
    grid = (triton.cdiv(num_rows, rows) + experts, triton.cdiv(num_out, columns))
    codes = weight.codes.view(FP8) if weight.kind == "fp8" else weight.codes
    _multiply_kernel[grid](
        x.contiguous(), codes, weight.scales, weight.zeros, out, ends,
        num_rows, num_out, experts, WIDTH=width, NUM_GROUPS=weight.scales.shape[-1],
        KIND=weight.kind, GROUP=weight.group, HAS_ZEROS=weight.zeros is not None,
        EXPERTS=triton.next_power_of_2(experts) if experts else 0,
        ROWS=rows, COLUMNS=columns, DEPTH=depth_of(weight),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
