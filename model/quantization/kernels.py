"""The Triton kernel of products by quantised weights. Codes become numbers in registers, exact in
16 bits; scales are applied to sums in float32: nothing but the input and the result is rounded."""

import functools
import itertools
import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, wait
from model.quantization.quantized import FP8, FP8_MOST, TINY, Kind, Quantized

MIN_DEPTH: Final = 32  # columns multiplied at a time
MAX_DEPTH: Final = 128
# By the rows of x at most: of a program those, columns of the result, warps and stages; and how
# many programs there should be, where fewer each multiply all columns of their own.
_TILES: Final = (
    (8, (8, 64, 4, 4, 264)), (16, (16, 64, 4, 6, 264)), (64, (64, 128, 8, 4, 132)),
    (math.inf, (128, 128, 8, 3, 1)),
)  # fmt: skip
_MAX_SPLIT: Final = 16
# How codes that begin with a sign become numbers of 16 bits: how far to the right of these, which
# of the bits they are then, and a power of two, by which the number is still too small.
_BITS: Final = {
    ("fp8", torch.bfloat16): (4, 0x07F0, 0x7B80), ("fp8", torch.float16): (1, 0x3F80, 0x5C00),
    ("fp4", torch.bfloat16): (6, 0x01C0, 0x7E80), ("fp4", torch.float16): (3, 0x0E00, 0x7400),
}  # fmt: skip
# Codes of int4 are the last bits of a number that is so much larger; its high byte, and 1.
_OFFSETS: Final = {
    torch.bfloat16: (128, 0x43, 0x3F80),
    torch.float16: (1024, 0x64, 0x3C00),
}


@functools.cache
def _ptx(kind: Kind, dtype: torch.dtype) -> str:
    """Makes numbers of four bytes of codes, exactly; where a byte has two, of the low ones first.
    GPUs have instructions for that, which take longer than reading the codes from memory does."""
    two = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    if kind == "int4":  # less the offset and the zero
        _, high, factor = _OFFSETS[dtype]
        halves = [
            "and.b32 w, $4, 0x0F0F0F0F;",
            "shr.u32 w, $4, 4; and.b32 w, w, 0x0F0F0F0F;",
        ]
        number = f"prmt.b32 n, w, {high * 0x1010101}, {{}}; fma.rn.{two} ${{}}, n, factor, {{}};"
        turns = [("0x4140", "$5"), ("0x4342", "$6")]
    else:
        shift, kept, factor = _BITS[kind, dtype]
        halves = [
            "shl.b32 w, $4, 4; and.b32 w, w, 0xF0F0F0F0;",
            "and.b32 w, $4, 0xF0F0F0F0;",
        ]
        halves = halves if kind == "fp4" else ["mov.b32 w, $2;"]
        number = (
            f"prmt.b32 n, w, 0, {{}}; shr.u32 m, n, {shift}; and.b32 m, m, {kept * 0x10001};"
            f"lop3.b32 n, n, 0x80008000, m, 0xEA; fma.rn.{two} ${{}}, n, factor, {{}};"
        )
        turns = [("0x1404", "nought"), ("0x3424", "nought")]
    place, steps = itertools.count(), list[str]()
    for half in halves:
        steps += [
            half,
            *(number.format(order, next(place), last) for order, last in turns),
        ]
    declared = f".reg .b32 n, m, w, factor, nought; mov.b32 factor, {factor * 0x10001};"
    return f"{{ {declared} mov.b32 nought, 0x80008000; {''.join(steps)} }} // {kind}"


def _tile(ends, tile, num_rows, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and last row, and expert; none of tiles that are too many."""
    first, last, expert = tile * ROWS, num_rows, 0
    if EXPERTS > 0:
        index = tl.arange(0, EXPERTS)
        stop = tl.load(ends + index, mask=index < num_experts, other=0)
        start = tl.load(
            ends + index - 1, mask=(index > 0) & (index < num_experts), other=0
        )
        tiles = tl.where(index < num_experts, (stop - start + ROWS - 1) // ROWS, 0)
        behind = tl.cumsum(tiles, 0)
        expert = tl.sum((behind <= tile).to(tl.int32), 0)
        own = index == expert
        first = tl.sum(tl.where(own, start + (tile - behind + tiles) * ROWS, 0), 0)
        last = tl.sum(tl.where(own, stop, 0), 0)
    return first, last, expert


tile_of = triton.jit(_tile)


def _of_halves(code, less, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    both = tl.inline_asm_elementwise(
        PTX,
        "=r,=r,=r,=r,r,r,r",
        [code, less],
        (less.dtype, less.dtype),
        is_pure=True,
        pack=4,
    )
    return tl.interleave(both[0], both[1])


_both_halves: Any = triton.jit(_of_halves)


def _multiply(  # type: ignore[no-untyped-def]
    x, codes, scales, zeros, out, ends, partial, counters, num_rows, num_out, num_experts,
    WIDTH: tl.constexpr, KIND: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, EXPERTS: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    PTX: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """The weight is the left side, so that its numbers need not leave registers."""
    first, last, expert = tile_of(
        ends, tl.program_id(0), num_rows, num_experts, EXPERTS, ROWS
    )
    if first >= last:
        return
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = (column < num_out)[:, None] & (row < last)[None, :]
    place = row.to(tl.int64)[None, :] * num_out + column[:, None]
    # What is outside is multiplied as what is inside, and not stored.
    of_x = tl.minimum(row, last - 1).to(tl.int64)[None, :] * WIDTH
    of_weight = tl.minimum(column, num_out - 1) + expert * tl.cast(num_out, tl.int64)
    depth, half = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 2)
    OWN: tl.constexpr = WIDTH // SPLIT
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in range(0, OWN, DEPTH):
        start = tl.program_id(2) * OWN + step
        right = tl.load(x + of_x + start + depth[:, None])
        if KIND == "fp8":
            code = tl.load(codes + of_weight[:, None] * WIDTH + start + depth[None, :])
            left = tl.inline_asm_elementwise(
                PTX, "=r,=r,r", [code], dtype=x.dtype.element_ty, is_pure=True, pack=4
            )
        else:
            code = tl.load(
                codes + of_weight[:, None] * (WIDTH // 2) + start // 2 + half[None, :]
            )
            zero = tl.full((COLUMNS,), 8, tl.int32)
            if HAS_ZEROS:
                zero = tl.load(zeros + of_weight * NUM_GROUPS + start // GROUP).to(
                    tl.int32
                )
            left = _both_halves(code, (-OFFSET - zero).to(dtype)[:, None], PTX)
        if NUM_GROUPS == 1:
            sums = tl.dot(left, right, sums)
        else:
            factor = _factor(scales + of_weight * NUM_GROUPS + start // GROUP)
            sums += tl.dot(left, right) * factor[:, None]
    if (
        SPLIT > 1
    ):  # the last of the programs that share a tile adds up what each has found
        size = num_rows.to(tl.int64) * num_out
        tl.store(partial + tl.program_id(2) * size + place, sums, mask=exists)
        tl.debug_barrier()
        counter = counters + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(counter, 1) < SPLIT - 1:
            return
        tl.store(counter, 0)  # for the next product
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
        for part in range(SPLIT):
            sums += tl.load(
                partial + part * size + place, mask=exists, cache_modifier=".cg"
            )
    if NUM_GROUPS == 1:
        sums *= _factor(scales + of_weight)[:, None]
    if ADD:
        sums += tl.load(out + place, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + place, sums.to(dtype), mask=exists)


def _read_factor(at):  # type: ignore[no-untyped-def]
    scale = tl.load(at)
    if at.dtype.element_ty == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


_factor: Any = triton.jit(_read_factor)
_multiply_kernel: Any = triton.jit(
    _multiply, do_not_specialize=["num_rows", "num_experts"]
)


def depth_of(weight: Quantized) -> int:
    """Columns that can be multiplied at a time: within one group, a power of two."""
    group = weight.group if weight.scales.shape[-1] > 1 else 0
    return math.gcd(group, weight.shape[-1], MAX_DEPTH)


@functools.cache
def _counters(device: torch.device, stream: int) -> Tensor:
    """Zeros before and after each product: those of one stream follow each other to the end."""
    return torch.zeros(
        max(tile[-1] for _, tile in _TILES), dtype=torch.int32, device=device
    )


def multiply(
    weight: Quantized, x: Tensor, ends: Tensor | None = None, residual: Tensor | None = None,
    *, splits: bool = True,
) -> Tensor:  # fmt: skip
    """x [T, in] -> [T, out], a sum in `residual` where given; with `ends` int32 [experts], each
    expert's rows end there. `splits`: whether several programs may share the columns of x."""
    num_rows, experts = len(x), 0 if ends is None else len(ends)
    *_, num_out, width = weight.shape
    out = x.new_empty(num_rows, num_out) if residual is None else residual
    # By powers of two alone: what those have gone through, others need not compile.
    each = triton.next_power_of_2(num_rows) // experts if experts else num_rows
    depth = depth_of(weight)
    rows, columns, warps, stages, programs = next(
        tile for most, tile in _TILES if each <= most
    )
    grid = (triton.cdiv(num_rows, rows) + experts, triton.cdiv(num_out, columns))
    partial, counters = None, None
    split = math.gcd(width // depth, _MAX_SPLIT) if splits and not experts else 1
    while split > 1 and math.prod(grid) * split >= 2 * programs:
        split //= 2
    if split > 1:
        partial = x.new_empty(split, num_rows, num_out, dtype=torch.float32)
        stream = x.is_cuda and torch.cuda.current_stream(x.device).cuda_stream
        counters = _counters(x.device, stream)
    _multiply_kernel[(*grid, split)](
        x.contiguous(), weight.codes, weight.scales, weight.zeros, out, ends, partial, counters,
        num_rows, num_out, experts, WIDTH=width, NUM_GROUPS=weight.scales.shape[-1],
        KIND=weight.kind, GROUP=weight.group, HAS_ZEROS=weight.zeros is not None,
        EXPERTS=triton.next_power_of_2(experts) if experts else 0,
        ADD=residual is not None, SPLIT=split, PTX=_ptx(weight.kind, weight.dtype),
        OFFSET=_OFFSETS[weight.dtype][0], ROWS=rows, COLUMNS=columns, DEPTH=depth,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _scale_rows(  # type: ignore[no-untyped-def]
    x, out, of_rows, of_columns, width, MOST: tl.constexpr, LEAST: tl.constexpr,
    ADD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    wait()  # it begins while the kernel before it ends
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if of_columns is None:
        scale = tl.maximum(tl.max(tl.abs(value), 0), LEAST) / MOST
        tl.store(of_rows + row, scale)
        value /= scale
    else:
        value *= tl.load(of_rows + row) * tl.load(
            of_columns + column, mask=inside, other=0.0
        )
    if ADD:
        value += tl.load(out + row * width + column, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


_scale_rows_kernel: Any = triton.jit(_scale_rows)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, n] -> FP8 [T, n] and float32 [T, 1], the scale of each row by its largest element."""
    (num_rows, width), columns = x.shape, triton.next_power_of_2(x.shape[1])
    codes, scales = (
        x.new_empty(x.shape, dtype=FP8),
        x.new_empty(num_rows, 1, dtype=torch.float32),
    )
    _scale_rows_kernel[(num_rows, 1)](
        x.contiguous(), codes, scales, None, width, FP8_MOST, TINY, False, columns,
        num_warps=min(16, max(1, columns // 512)), launch_pdl=PDL,
    )  # fmt: skip
    return codes, scales


def rescaled(
    product: Tensor, of_rows: Tensor, of_columns: Tensor, to: Tensor | None
) -> Tensor:
    """product [T, n] by float32 [T, 1] and [n, 1], added to `to` where given, else in place."""
    (num_rows, width), out, columns = product.shape, product if to is None else to, 1024
    _scale_rows_kernel[(num_rows, triton.cdiv(width, columns))](
        product, out, of_rows, of_columns, width, FP8_MOST, TINY, to is not None, columns,
        num_warps=4, launch_pdl=PDL,
    )  # fmt: skip
    return out
