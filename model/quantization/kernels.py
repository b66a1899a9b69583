"""Triton kernels of products with quantised weights.

Codes become 16-bit numbers in registers, exactly. Scales are applied to float32 sums.
Only the input and the result are rounded.
"""

import functools
import math
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, wait
from model.quantization.quantized import FP8, FP8_MAX, MIN_ROW_MAX, Kind, Quantized

# Limits of the number of columns that are multiplied at a time.
MIN_DEPTH: Final = 32
MAX_DEPTH: Final = 128


class _Tile(NamedTuple):
    """How programs divide a product.

    Attributes:
        max_rows: the tile is for products with at most this many rows of x.
        rows: rows of x that a program multiplies.
        columns: columns of the result that a program computes.
        programs: if a product has fewer tiles than this number, several programs split
            the columns of x for each tile.
    """

    max_rows: float
    rows: int
    columns: int
    warps: int
    stages: int
    programs: int


_TILES: Final = (
    _Tile(max_rows=8, rows=8, columns=64, warps=4, stages=4, programs=264),
    _Tile(max_rows=16, rows=16, columns=64, warps=4, stages=6, programs=264),
    _Tile(max_rows=64, rows=64, columns=128, warps=8, stages=4, programs=132),
    _Tile(max_rows=math.inf, rows=128, columns=128, warps=8, stages=3, programs=1),
)
_MAX_SPLIT: Final = 16


class _FloatFormat(NamedTuple):
    """How the kernels convert codes that begin with a sign to 16-bit floats.

    Attributes:
        shift: number of places by which the bits of the code are shifted to the right.
        mask: the bits of the float that the shifted code provides, except the sign.
        factor: a power of two by which the float is finally multiplied, because the
            float is too small; given as the bits of a 16-bit float.
    """

    shift: int
    mask: int
    factor: int


_FLOAT_FORMATS: Final = {
    ("fp8", torch.bfloat16): _FloatFormat(shift=4, mask=0x07F0, factor=0x7B80),
    ("fp8", torch.float16): _FloatFormat(shift=1, mask=0x3F80, factor=0x5C00),
    ("fp4", torch.bfloat16): _FloatFormat(shift=6, mask=0x01C0, factor=0x7E80),
    ("fp4", torch.float16): _FloatFormat(shift=3, mask=0x0E00, factor=0x7400),
}


class _IntFormat(NamedTuple):
    """How the kernels convert int4 codes to 16-bit floats.

    Attributes:
        offset: the number that is added to a code. The float of offset + code has the
            code in its last bits.
        high_byte: the high byte of that float.
        one: the bits of the float 1.
    """

    offset: int
    high_byte: int
    one: int


_INT_FORMATS: Final = {
    torch.bfloat16: _IntFormat(offset=128, high_byte=0x43, one=0x3F80),
    torch.float16: _IntFormat(offset=1024, high_byte=0x64, one=0x3C00),
}


@functools.cache
def _ptx(kind: Kind, dtype: torch.dtype) -> str:
    """Returns PTX code that converts four bytes of codes to 16-bit floats, exactly.

    If a byte holds two codes, the first outputs are the codes in the low halves. GPUs
    have conversion instructions, but these take longer than reading the codes from
    memory.
    """
    float_pair = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    if kind == "int4":
        # A code becomes offset + code; fma subtracts the offset and the zero point.
        _, high_byte, factor = _INT_FORMATS[dtype]
        selections = [
            "and.b32 w, $4, 0x0F0F0F0F;",
            "shr.u32 w, $4, 4; and.b32 w, w, 0x0F0F0F0F;",
        ]
        conversion = (
            f"prmt.b32 n, w, {high_byte * 0x1010101}, {{}}; "
            f"fma.rn.{float_pair} ${{}}, n, factor, {{}};"
        )
        byte_pairs = [("0x4140", "$5"), ("0x4342", "$6")]
    else:
        shift, mask, factor = _FLOAT_FORMATS[kind, dtype]
        if kind == "fp4":
            selections = [
                "shl.b32 w, $4, 4; and.b32 w, w, 0xF0F0F0F0;",
                "and.b32 w, $4, 0xF0F0F0F0;",
            ]
        else:
            selections = ["mov.b32 w, $2;"]
        conversion = (
            f"prmt.b32 n, w, 0, {{}}; shr.u32 m, n, {shift}; "
            f"and.b32 m, m, {mask * 0x10001};"
            "lop3.b32 n, n, 0x80008000, m, 0xEA; "
            f"fma.rn.{float_pair} ${{}}, n, factor, {{}};"
        )
        byte_pairs = [("0x1404", "nought"), ("0x3424", "nought")]
    steps = []
    output = 0
    for selection in selections:
        steps.append(selection)
        for permutation, addend in byte_pairs:
            steps.append(conversion.format(permutation, output, addend))
            output += 1
    declaration = (
        f".reg .b32 n, m, w, factor, nought; mov.b32 factor, {factor * 0x10001};"
    )
    return f"{{ {declaration} mov.b32 nought, 0x80008000; {''.join(steps)} }} // {kind}"


def _find_tile(  # type: ignore[no-untyped-def]
    ends, tile, num_rows, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr
):
    """Returns the first row, the end of the rows and the expert of a tile.

    A tile beyond the last one has no rows.
    """
    first = tile * ROWS
    last = num_rows
    expert = 0
    if EXPERTS > 0:
        index = tl.arange(0, EXPERTS)
        stop = tl.load(ends + index, mask=index < num_experts, other=0)
        start = tl.load(
            ends + index - 1, mask=(index > 0) & (index < num_experts), other=0
        )
        tiles = tl.where(index < num_experts, (stop - start + ROWS - 1) // ROWS, 0)
        tiles_end = tl.cumsum(tiles, 0)
        expert = tl.sum((tiles_end <= tile).to(tl.int32), 0)
        is_expert = index == expert
        first_row = start + (tile - tiles_end + tiles) * ROWS
        first = tl.sum(tl.where(is_expert, first_row, 0), 0)
        last = tl.sum(tl.where(is_expert, stop, 0), 0)
    return first, last, expert


tile_of = triton.jit(_find_tile)


def _convert_halves(code, addend, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Converts bytes that hold two codes each, and interleaves the results."""
    halves = tl.inline_asm_elementwise(
        PTX,
        "=r,=r,=r,=r,r,r,r",
        [code, addend],
        (addend.dtype, addend.dtype),
        is_pure=True,
        pack=4,
    )
    return tl.interleave(halves[0], halves[1])


_converted_halves: Any = triton.jit(_convert_halves)


def _convert_weight(  # type: ignore[no-untyped-def]
    x, codes, zeros, weight_row, start,
    WIDTH: tl.constexpr, KIND: tl.constexpr, NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr,
    OFFSET: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Loads codes [COLUMNS, DEPTH] from the column `start` on, and converts them to the
    type of `x`."""
    if KIND == "fp8":
        depth = tl.arange(0, DEPTH)
        code = tl.load(codes + weight_row[:, None] * WIDTH + start + depth[None, :])
        weight = tl.inline_asm_elementwise(
            PTX, "=r,=r,r", [code], dtype=x.dtype.element_ty, is_pure=True, pack=4
        )
    else:
        half_depth = tl.arange(0, DEPTH // 2)
        code_row = codes + weight_row[:, None] * (WIDTH // 2)
        code = tl.load(code_row + start // 2 + half_depth[None, :])
        zero = tl.full((COLUMNS,), 8, tl.int32)
        if HAS_ZEROS:
            zero_at = zeros + weight_row * NUM_GROUPS + start // GROUP
            zero = tl.load(zero_at).to(tl.int32)
        addend = (-OFFSET - zero).to(x.dtype.element_ty)[:, None]
        weight = _converted_halves(code, addend, PTX)
    return weight


_converted_weight: Any = triton.jit(_convert_weight)


def _multiply(  # type: ignore[no-untyped-def]
    x, codes, scales, zeros, out, ends, partial, counters, num_rows, num_out,
    num_experts, WIDTH: tl.constexpr, KIND: tl.constexpr, NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, EXPERTS: tl.constexpr,
    ADD: tl.constexpr, SPLIT: tl.constexpr, PTX: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiplies rows by a quantised weight.

    The weight is the left operand, so that its numbers stay in registers.
    """
    first, last, expert = tile_of(
        ends, tl.program_id(0), num_rows, num_experts, EXPERTS, ROWS
    )
    if first >= last:
        return
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = (column < num_out)[:, None] & (row < last)[None, :]
    place = row.to(tl.int64)[None, :] * num_out + column[:, None]
    # Rows and columns past the end read the last row or column, and are not stored.
    x_row = tl.minimum(row, last - 1).to(tl.int64)[None, :] * WIDTH
    weight_row = tl.minimum(column, num_out - 1) + expert * tl.cast(num_out, tl.int64)
    depth = tl.arange(0, DEPTH)
    SPLIT_WIDTH: tl.constexpr = WIDTH // SPLIT
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in range(0, SPLIT_WIDTH, DEPTH):
        start = tl.program_id(2) * SPLIT_WIDTH + step
        right = tl.load(x + x_row + start + depth[:, None])
        left = _converted_weight(
            x, codes, zeros, weight_row, start, WIDTH, KIND, NUM_GROUPS, GROUP,
            HAS_ZEROS, PTX, OFFSET, COLUMNS, DEPTH,
        )  # fmt: skip
        if NUM_GROUPS == 1:
            sums = tl.dot(left, right, sums)
        else:
            factor = _load_factor(scales + weight_row * NUM_GROUPS + start // GROUP)
            sums += tl.dot(left, right) * factor[:, None]
    if SPLIT > 1:
        # The last of the programs that share a tile adds up their partial sums.
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
        sums *= _load_factor(scales + weight_row)[:, None]
    if ADD:
        sums += tl.load(out + place, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + place, sums.to(dtype), mask=exists)


def _read_factor(at):  # type: ignore[no-untyped-def]
    """Loads scales as float32. Scales in uint8 are exponents of float32 numbers."""
    scale = tl.load(at)
    if at.dtype.element_ty == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


_load_factor: Any = triton.jit(_read_factor)
_multiply_kernel: Any = triton.jit(
    _multiply, do_not_specialize=["num_rows", "num_experts"]
)


def depth_of(weight: Quantized) -> int:
    """Returns how many columns can be multiplied at a time.

    These columns are in one group, and their number is a power of two.
    """
    group = weight.group if weight.scales.shape[-1] > 1 else 0
    return math.gcd(group, weight.shape[-1], MAX_DEPTH)


@functools.cache
def _counters(device: torch.device, stream: int) -> Tensor:
    """Returns counters that are 0 before and after each product.

    The products of a stream run one after the other, so they can share the counters.
    """
    num_counters = max(tile.programs for tile in _TILES)
    return torch.zeros(num_counters, dtype=torch.int32, device=device)


def multiply(
    weight: Quantized,
    x: Tensor,
    ends: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    splits: bool = True,
) -> Tensor:
    """Multiplies x [T, in] by a weight [out, in] or by experts [experts, out, in].

    Args:
        ends: int32 [experts], the end of each expert's rows.
        residual: [T, out], to which the product is added in place.
        splits: several programs may split the columns of x.

    Returns:
        [T, out]: the residual if given, else a new tensor.
    """
    num_rows = len(x)
    experts = 0 if ends is None else len(ends)
    *_, num_out, width = weight.shape
    out = x.new_empty(num_rows, num_out) if residual is None else residual
    # For experts, the number of rows is rounded up to a power of two, so that few tiles
    # are compiled.
    mean_rows = triton.next_power_of_2(num_rows) // experts if experts else num_rows
    depth = depth_of(weight)
    tile = next(tile for tile in _TILES if mean_rows <= tile.max_rows)
    grid = (
        triton.cdiv(num_rows, tile.rows) + experts,
        triton.cdiv(num_out, tile.columns),
    )
    partial = None
    counters = None
    split = math.gcd(width // depth, _MAX_SPLIT) if splits and not experts else 1
    while split > 1 and math.prod(grid) * split >= 2 * tile.programs:
        split //= 2
    if split > 1:
        partial = x.new_empty(split, num_rows, num_out, dtype=torch.float32)
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        counters = _counters(x.device, stream)
    _multiply_kernel[(*grid, split)](
        x.contiguous(), weight.codes, weight.scales, weight.zeros, out, ends, partial,
        counters, num_rows, num_out, experts,
        WIDTH=width,
        NUM_GROUPS=weight.scales.shape[-1],
        KIND=weight.kind,
        GROUP=weight.group,
        HAS_ZEROS=weight.zeros is not None,
        EXPERTS=triton.next_power_of_2(experts) if experts else 0,
        ADD=residual is not None,
        SPLIT=split,
        PTX=_ptx(weight.kind, weight.dtype),
        OFFSET=_INT_FORMATS[weight.dtype].offset,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return out


def _scale_rows(  # type: ignore[no-untyped-def]
    x,
    out,
    row_scales,
    column_scales,
    width,
    MAX: tl.constexpr,
    MIN_ROW_MAX: tl.constexpr,
    ADD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Divides rows by their own scales, or multiplies them by given scales.

    Without `column_scales` the scale of a row is its largest absolute value / MAX, and
    is stored in `row_scales`.
    """
    wait()  # this kernel begins while the previous kernel ends
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if column_scales is None:
        scale = tl.maximum(tl.max(tl.abs(value), 0), MIN_ROW_MAX) / MAX
        tl.store(row_scales + row, scale)
        value /= scale
    else:
        column_scale = tl.load(column_scales + column, mask=inside, other=0.0)
        value *= tl.load(row_scales + row) * column_scale
    if ADD:
        added = tl.load(out + row * width + column, mask=inside, other=0.0)
        value += added.to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


_scale_rows_kernel: Any = triton.jit(_scale_rows)
_RESCALE_COLUMNS: Final = 1024  # columns of one program


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises x [T, n] to FP8.

    Returns:
        FP8 [T, n], and the scale of each row, float32 [T, 1]. The scale follows from
        the largest absolute value of the row.
    """
    num_rows, width = x.shape
    columns = triton.next_power_of_2(width)
    codes = x.new_empty(x.shape, dtype=FP8)
    scales = x.new_empty(num_rows, 1, dtype=torch.float32)
    _scale_rows_kernel[(num_rows, 1)](
        x.contiguous(),
        codes,
        scales,
        None,
        width,
        FP8_MAX,
        MIN_ROW_MAX,
        False,
        columns,
        num_warps=min(16, max(1, columns // 512)),
        launch_pdl=PDL,
    )
    return codes, scales


def rescale(
    product: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    residual: Tensor | None,
) -> Tensor:
    """Multiplies a product [T, n] by scales of rows [T, 1] and of columns [n, 1].

    The scales are float32.

    Returns:
        `residual` with the result added in place if given, else `product`, changed in
        place.
    """
    num_rows, width = product.shape
    out = product if residual is None else residual
    _scale_rows_kernel[(num_rows, triton.cdiv(width, _RESCALE_COLUMNS))](
        product,
        out,
        row_scales,
        column_scales,
        width,
        FP8_MAX,
        MIN_ROW_MAX,
        residual is not None,
        _RESCALE_COLUMNS,
        num_warps=4,
        launch_pdl=PDL,
    )
    return out
