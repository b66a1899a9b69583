"""Triton kernels for a mixture of experts in MXFP4.

Codes become bfloat16 numbers in registers, scaled exactly by powers of two, and are
multiplied by tensor cores. Only the gated products, the products with the down
matrices, and the result are rounded to 16 bits. No kernel uses atomic additions, so the
same input always gives the same sums.
"""

import math
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, wait
from model.kernels.experts import combine, sort_pairs
from model.quantization.kernels import tile_of
from model.quantization.packed_fp4 import BLOCK_COLUMNS, BLOCK_ROWS, PackedFP4


def _word_ptx() -> str:
    """Returns PTX code that converts a word of eight codes to bfloat16 numbers, scaled.

    Each step makes a register of two numbers. In each half of the register, the sign is
    in bit 15, the lowest bits of the exponent are in bits 8 and 7, and the highest bit
    of the mantissa is in bit 6. `packed_fp4.pack` describes where the word has these
    bits. The numbers are too small by a factor of 2^126. The scale, by which the
    numbers are then multiplied, includes a correction of this factor.
    """
    selections = (
        "and.b32 s, $8, 0x81C081C0;",
        "shl.b32 s, $8, 6; and.b32 s, s, 0x81C081C0;",
        "shf.r.wrap.b32 s, $8, $8, 6; and.b32 s, s, 0x81C081C0;",
        "shl.b32 s, $8, 4; and.b32 s, s, 0x81808180; "
        "shr.u32 m, $8, 4; and.b32 m, m, 0x00400040; or.b32 s, s, m;",
    )
    steps = [
        f"{selection} fma.rn.bf16x2 s, s, $9, nought; "
        f"mov.b32 {{${2 * register}, ${2 * register + 1}}}, s; "
        for register, selection in enumerate(selections)
    ]
    return (
        "{ .reg .b32 s, m, nought; mov.b32 nought, 0x80008000; "
        f"{''.join(steps)}}} // fp4 words"
    )


_PTX: Final = _word_ptx()


def _convert_words(words, factors, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Converts words of codes [rows, chunks, 4, 2] to numbers [rows, 64 * chunks].

    Args:
        words: int32, the words of a row in the order that `packed_fp4.pack` describes.
        factors: int32 [rows, chunks, 1, 2], each twice the same bfloat16 number.
    """
    shape: tl.constexpr = words.shape
    # The three bits of an output's number are half, upper and b; see `packed_fp4.pack`.
    n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
        PTX,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, tl.broadcast_to(factors, shape)],
        (tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    first_half = tl.join(tl.join(n0, n1), tl.join(n2, n3))
    second_half = tl.join(tl.join(n4, n5), tl.join(n6, n7))
    # Dimensions: row, chunk, t, w, b, upper, half.
    numbers = tl.permute(tl.join(first_half, second_half), (0, 1, 3, 6, 5, 2, 4))
    return tl.reshape(numbers, (shape[0], shape[1] * 64))


_converted_words: Any = triton.jit(_convert_words)


def _place_rows(  # type: ignore[no-untyped-def]
    expert, row, height,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns the places of the first parts of rows of an expert's matrix.

    A part is BLOCK_COLUMNS numbers of a row; see `packed_fp4.PackedFP4`.
    """
    block = expert.to(tl.int64) * tl.cdiv(height, BLOCK_ROWS) + row // BLOCK_ROWS
    return block * (tl.cdiv(WIDTH, BLOCK_COLUMNS) * BLOCK_ROWS) + row % BLOCK_ROWS


_places_of_rows: Any = triton.jit(_place_rows)


def _load_numbers(  # type: ignore[no-untyped-def]
    words, scales, step,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Loads DEPTH columns of some rows of a matrix as bfloat16 numbers.

    Args:
        words, scales: pointers to the words and scales of the rows' first columns.
        step: the columns begin at step * DEPTH.
    """
    HEIGHT: tl.constexpr = words.shape[0]
    BLOCK_STEPS: tl.constexpr = BLOCK_COLUMNS // DEPTH
    BLOCK_SIZE: tl.constexpr = BLOCK_ROWS * BLOCK_COLUMNS
    # Multiplying after the division lets Triton see that the offsets are aligned.
    block = step // BLOCK_STEPS
    part = step % BLOCK_STEPS
    code = tl.load(words + block * (BLOCK_SIZE // 8) + part * (DEPTH // 8))
    scale = tl.load(scales + block * (BLOCK_SIZE // 32) + part * (DEPTH // 32))
    factor = (scale.to(tl.int32) + 126) * 0x00800080
    return _converted_words(
        tl.reshape(code, (HEIGHT, DEPTH // 64, 4, 2)),
        tl.reshape(factor, (HEIGHT, DEPTH // 64, 1, 2)),
        PTX,
    )


_loaded_numbers: Any = triton.jit(_load_numbers)


def _gate_and_up(  # type: ignore[no-untyped-def]
    sums, alpha, limit, COLUMNS: tl.constexpr, ROWS: tl.constexpr, CLAMPED: tl.constexpr
):
    """Returns activation(first COLUMNS rows of sums) * (the other rows of sums).

    With CLAMPED, computes the clamped SwiGLU of MoEConfig instead.
    """
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, COLUMNS, ROWS)), (1, 2, 0)))
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        result = gate / (1 + tl.exp(-alpha * gate)) * up
    else:
        result = gate / (1 + tl.exp(-gate)) * up
    return result


_gated: Any = triton.jit(_gate_and_up)


def _multiply_tile(  # type: ignore[no-untyped-def]
    x, words, scales, biases, order, out, num_out, alpha, limit,
    first, last, expert, column,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, ONE_TOKEN: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Computes the columns `column` of the product of rows with an expert's matrix.

    The rows are [first, last) in the order of the experts, or of the pairs of a single
    token.
    """
    row = first + tl.arange(0, ROWS)
    inside = row < last
    # Rows after the expert's last row are replaced by that row, and are not stored.
    row = tl.minimum(row, last - 1)
    pair = row if ONE_TOKEN else tl.load(order + row)
    source = pair // NUM_CHOSEN if GATED else row
    HALVES: tl.constexpr = 2 if GATED else 1
    HEIGHT: tl.constexpr = HALVES * COLUMNS
    # The program's rows of the matrix: its columns of the gate, then of the up half.
    half = tl.arange(0, HALVES)[:, None] * num_out
    matrix_row = tl.reshape(half + tl.minimum(column, num_out - 1)[None, :], HEIGHT)
    place = _places_of_rows(
        expert, matrix_row, HALVES * num_out, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS
    )
    depth = tl.arange(0, DEPTH)
    word = tl.arange(0, DEPTH // 8)[None, :]
    word_at = words + place[:, None] * (BLOCK_COLUMNS // 8) + word
    group = tl.arange(0, DEPTH // 32)[None, :]
    scale_at = scales + place[:, None] * (BLOCK_COLUMNS // 32) + group
    x_at = x + source.to(tl.int64)[None, :] * WIDTH + depth[:, None]
    sums = tl.zeros((HEIGHT, ROWS), tl.float32)
    for step in range(tl.cdiv(WIDTH, DEPTH)):
        left = _loaded_numbers(
            word_at, scale_at, step, BLOCK_ROWS, BLOCK_COLUMNS, DEPTH, PTX
        )
        start = step * DEPTH
        is_column = depth[:, None] + start < WIDTH
        right = tl.load(x_at + start, mask=is_column, other=0.0)
        sums = tl.dot(left, right, sums)
    if BIASED:
        bias_at = biases + expert * (HALVES * num_out) + matrix_row
        sums += tl.load(bias_at).to(tl.float32)[:, None]
    out_row = pair
    if GATED:
        sums = _gated(sums, alpha, limit, COLUMNS, ROWS, CLAMPED)
        out_row = row
    target = out + out_row.to(tl.int64)[None, :] * num_out + column[:, None]
    exists = inside[None, :] & (column < num_out)[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=exists)


_multiplied_tile: Any = triton.jit(_multiply_tile)


def _grouped_fp4(  # type: ignore[no-untyped-def]
    x, words, scales, biases, order, ends, out, num_experts, num_out, alpha, limit,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, ONE_TOKEN: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr, BIASED: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, MIN_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Multiplies the rows of each expert by its matrix.

    GATED: the rows of x are tokens, and the rows of the result are sorted by expert.
    Otherwise the rows of x are sorted by expert, and the rows of the result have the
    order of the pairs of token and expert.

    ONE_TOKEN: the pairs of a single token are not sorted, because each of them is a
    tile of its own. `order` then has the expert of each pair.
    """
    across = tl.cdiv(num_out, COLUMNS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.program_id(0) // across
    # The next kernel does not begin early: at one token, its waiting programs would
    # take the place of programs of this kernel, and a step would take 18 % longer.
    wait()
    if ONE_TOKEN:
        expert = tl.load(order + tile).to(tl.int32)
        first = tile
        last = tile + (expert < num_experts).to(tl.int32)
    else:
        first, last, expert = tile_of(ends, tile, 0, num_experts, EXPERTS, ROWS)
    if first < last:
        # A tile with few rows is multiplied as a smaller one, which takes less time.
        if MIN_ROWS < ROWS and last - first <= MIN_ROWS:
            _multiplied_tile(
                x, words, scales, biases, order, out, num_out, alpha, limit,
                first, last, expert, column, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS,
                NUM_CHOSEN, ONE_TOKEN, GATED, CLAMPED, BIASED, MIN_ROWS, COLUMNS, DEPTH,
                PTX,
            )  # fmt: skip
        else:
            _multiplied_tile(
                x, words, scales, biases, order, out, num_out, alpha, limit,
                first, last, expert, column, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS,
                NUM_CHOSEN, ONE_TOKEN, GATED, CLAMPED, BIASED, ROWS, COLUMNS, DEPTH,
                PTX,
            )  # fmt: skip


_grouped_fp4_kernel: Any = triton.jit(_grouped_fp4)


class Tile(NamedTuple):
    """How programs divide a product.

    Attributes:
        rows: rows of x.
        min_rows: tiles with at most this many rows are computed as tiles of this size.
        columns: columns of the result.
        depth: columns of x that are multiplied at a time, at most BLOCK_COLUMNS.
    """

    rows: int
    min_rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of the gated product and of the product after it.

    Attributes:
        max_rows: the largest mean number of rows per expert for which the tiles are
            used.
    """

    max_rows: float
    gated: Tile
    down: Tile


# These tiles were the fastest on an H200, with 32 experts of width 2,880 in a model of
# hidden size 2,880.
TILES: Final = (
    Tiles(0.5, Tile(16, 16, 128, 128, 4, 5), Tile(16, 16, 128, 128, 4, 4)),
    Tiles(16, Tile(16, 16, 64, 128, 4, 4), Tile(16, 16, 128, 128, 4, 3)),
    Tiles(64, Tile(64, 32, 64, 128, 4, 4), Tile(64, 32, 128, 128, 4, 4)),
    Tiles(512, Tile(128, 64, 64, 128, 4, 3), Tile(128, 64, 128, 128, 4, 3)),
    Tiles(math.inf, Tile(128, 64, 64, 128, 4, 3), Tile(256, 128, 128, 64, 8, 3)),
)


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernels support this GPU and this data type."""
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return is_hopper and dtype == torch.bfloat16


def mixture(
    x: Tensor, gate_up: PackedFP4, down: PackedFP4, weights: Tensor, chosen: Tensor,
    total: int, *, biases: tuple[Tensor, Tensor] | None = None,
    clamps: tuple[float, float] | None = None, out: Tensor, adds: bool,
    tiles: Tiles | None = None,
) -> None:  # fmt: skip
    """Sends tokens through their experts and writes the sums of the results.

    Args:
        x: bfloat16 [T, hidden].
        gate_up: [experts of this rank, 2 n, hidden]: for each expert, all gate rows and
            then all up rows.
        down: [experts of this rank, hidden, n].
        weights: float32 [T, k], the weights of the experts.
        chosen: int64 [T, k], ids of experts. The experts with ids below the number of
            matrices in `down` are on this rank; all others are skipped.
        total: number of experts on all ranks.
        biases: of gate_up [experts, 2 n] and of down [experts, hidden].
        clamps: alpha and limit of a clamped activation; None: silu(gate) * up.
        out: [T, hidden], the result.
        adds: the result is added to `out`.
        tiles: None: chosen by the mean number of rows of an expert.
    """
    count, hidden, inner_width = down.shape
    pairs = chosen.numel()
    order, ends = (chosen, None) if len(x) == 1 else sort_pairs(chosen, count)
    if tiles is None:
        mean_rows = pairs / total
        tiles = next(tiles for tiles in TILES if mean_rows <= tiles.max_rows)
    num_chosen = chosen.shape[1]
    gated_bias, down_bias = biases or (None, None)
    inner = x.new_empty(pairs, inner_width)
    _multiply(
        x,
        gate_up,
        gated_bias,
        order,
        ends,
        out=inner,
        tile=tiles.gated,
        num_chosen=num_chosen,
        is_gated=True,
        clamps=clamps,
    )
    products = x.new_empty(pairs, hidden)
    _multiply(
        inner,
        down,
        down_bias,
        order,
        ends,
        out=products,
        tile=tiles.down,
        num_chosen=num_chosen,
        is_gated=False,
    )
    combine(products, weights, chosen, count, out, adds=adds)


def _multiply(
    x: Tensor,
    weight: PackedFP4,
    bias: Tensor | None,
    order: Tensor,
    ends: Tensor | None,
    *,
    out: Tensor,
    tile: Tile,
    num_chosen: int,
    is_gated: bool,
    clamps: tuple[float, float] | None = None,
) -> None:
    """Writes the products of rows with the matrices of their experts to `out`.

    Args:
        order, ends: as `sort_pairs` returns them. For a single token, `order` has the
            expert of each pair instead, and `ends` is None.
        is_gated: see `_grouped_fp4`.
    """
    count, _, width = weight.shape
    pairs, num_out = out.shape
    # Each pair of a single token is a tile, even if other ranks have its expert.
    num_tiles = pairs
    if ends is not None:
        num_tiles = min(pairs, count + pairs // tile.rows)
    alpha, limit = clamps or (0.0, 0.0)
    _grouped_fp4_kernel[(num_tiles * triton.cdiv(num_out, tile.columns),)](
        x,
        weight.words,
        weight.scales,
        bias,
        order,
        ends,
        out,
        count,
        num_out,
        alpha,
        limit,
        WIDTH=width,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        NUM_CHOSEN=num_chosen,
        ONE_TOKEN=ends is None,
        GATED=is_gated,
        CLAMPED=clamps is not None,
        BIASED=bias is not None,
        EXPERTS=triton.next_power_of_2(count),
        ROWS=tile.rows,
        MIN_ROWS=tile.min_rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        PTX=_PTX,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=PDL,
    )
