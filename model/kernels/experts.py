"""Triton kernels for a mixture of experts in 16 bits: sorting, grouped products, sums.

No kernel uses atomic additions, so the same input always gives the same sums. Each
kernel begins while the previous kernel ends. This module also exports the kernels that
choose experts (choice.py) and those for a single token (one_token.py).
"""

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.launch import PDL, let_next_begin_and_wait
from model.kernels.choice import choose
from model.kernels.one_token import has_one_token_kernel, mixture_of_one
from model.quantization.kernels import tile_of

__all__ = [
    "TILES",
    "choose",
    "has_one_token_kernel",
    "is_supported",
    "mixture",
    "mixture_of_one",
]


def _sort(chosen, order, ends, pairs, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sorts pairs of a token and a chosen expert by their experts.

    Each program finds the pairs of one expert, and counts the pairs of all experts with
    lower ids.
    """
    expert = tl.program_id(0)
    none = 1 << 30
    let_next_begin_and_wait()
    before = tl.zeros((SIZE,), tl.int32)
    for begin in range(0, pairs, SIZE):
        pair = begin + tl.arange(0, SIZE)
        pair_expert = tl.load(chosen + pair, mask=pair < pairs, other=none)
        before += (pair_expert < expert).to(tl.int32)
    place = tl.sum(before, 0)
    for begin in range(0, pairs, SIZE):
        pair = begin + tl.arange(0, SIZE)
        is_match = tl.load(chosen + pair, mask=pair < pairs, other=none) == expert
        rank = tl.cumsum(is_match.to(tl.int32), 0)
        tl.store(order + place + rank - 1, pair, mask=is_match)
        place += tl.sum(is_match.to(tl.int32), 0)
    tl.store(ends + expert, place)


_sort_kernel: Any = triton.jit(_sort, do_not_specialize=["pairs"])


def _grouped(  # type: ignore[no-untyped-def]
    x,
    weight,
    order,
    ends,
    out,
    num_experts,
    num_out,
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    SWAPPED: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiplies the rows of each expert by its matrix.

    GATED: the rows of x are tokens, and the rows of the result are sorted by expert.
    Otherwise the rows of x are sorted by expert, and the rows of the result have the
    order of the pairs of token and expert.
    SWAPPED: the matrix is the left operand. Tiles of the left operand must have at
    least 64 rows, so x is not the left operand if it has few rows.
    """
    across = tl.cdiv(num_out, COLUMNS)
    column = tl.program_id(0) % across * COLUMNS
    let_next_begin_and_wait()
    first, last, expert = tile_of(
        ends, tl.program_id(0) // across, 0, num_experts, EXPERTS, ROWS
    )
    if first < last:
        row = first + tl.arange(0, ROWS)
        pair = tl.load(order + row, mask=row < last, other=0)
        source = pair // NUM_CHOSEN if GATED else tl.minimum(row, last - 1)
        at = x + source[:, None].to(tl.int64) * WIDTH + tl.arange(0, DEPTH)[None, :]
        HALVES: tl.constexpr = 2 if GATED else 1
        HEIGHT: tl.constexpr = HALVES * COLUMNS
        sums = tl.zeros((HEIGHT, ROWS) if SWAPPED else (ROWS, HEIGHT), tl.float32)
        for step in range(WIDTH // DEPTH):
            left = tl.load(at + step * DEPTH)
            right = tl.reshape(
                weight.load([HALVES * expert, column, step * DEPTH]), (HEIGHT, DEPTH)
            )
            if SWAPPED:
                sums = tl.dot(right, left.T, sums)
            else:
                sums = tl.dot(left, right.T, sums)
        sums = sums.T if SWAPPED else sums
        if GATED:
            gate, up = tl.split(
                tl.permute(tl.reshape(sums, (ROWS, 2, COLUMNS)), (0, 2, 1))
            )
            sums = gate / (1 + tl.exp(-gate)) * up
        place = row if GATED else pair
        columns = column + tl.arange(0, COLUMNS)
        target = out + place[:, None].to(tl.int64) * num_out + columns[None, :]
        inside = (row < last)[:, None] & (columns < num_out)[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=inside)


_grouped_kernel: Any = triton.jit(_grouped)

# Each item is used up to a mean number of rows per expert, which is its first element.
# The second element is the tile of the gated product and the tile of the down product.
# A tile consists of: rows of x, columns of the result, elements of a row that are
# multiplied at a time, SWAPPED, warps, and stages. These tiles were the fastest on an
# H200, with 128 experts of width 768 in a model of hidden size 2,048.
TILES: Final = (
    (8, ((16, 64, 128, True, 4, 3), (16, 128, 64, True, 4, 4))),
    (32, ((32, 64, 128, True, 4, 3), (32, 128, 64, True, 4, 4))),
    (128, ((64, 128, 64, False, 4, 4), (64, 256, 64, False, 4, 4))),
    (math.inf, ((128, 128, 64, False, 8, 4), (128, 256, 64, False, 8, 4))),
)


def is_supported(gate_up: Tensor, down: Tensor) -> bool:
    """Returns whether `mixture` accepts the weights, which are on a GPU.

    The GPU must be of the Hopper generation, and the weights must be contiguous. Their
    numbers of columns must be multiples of the depths of all tiles.
    """
    is_hopper = torch.cuda.get_device_capability(down.device)[0] == 9
    fits_tiles = gate_up.shape[2] % 128 == down.shape[2] % 64 == 0
    return is_hopper and fits_tiles and gate_up.is_contiguous() and down.is_contiguous()


def _combine(  # type: ignore[no-untyped-def]
    products,
    weights,
    chosen,
    out,
    num_experts,
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Sums the products of a token with its experts, multiplied by their weights.

    ADD: the sum is added to `out`.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    let_next_begin_and_wait()
    result = tl.zeros((COLUMNS,), tl.float32)
    # Slots are added one after the other, so no sum spans several threads.
    for slot in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + slot
        is_here = tl.load(chosen + pair) < num_experts
        weight = tl.where(is_here, tl.load(weights + pair), 0.0)
        at_product = products + pair * WIDTH + column
        product = tl.load(at_product, mask=inside & is_here, other=0.0)
        result += product.to(tl.float32) * weight
    at = out + token * WIDTH + column
    if ADD:
        result += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)


_combine_kernel: Any = triton.jit(_combine)
_COMBINE_COLUMNS: Final = 512


def sort_pairs(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sorts pairs of a token and a chosen expert by their experts.

    Args:
        chosen: int64 [T, k], ids of experts. Only those below `count` are sorted.

    Returns:
        order: int32 [T * k], the pairs of each expert, in the order of the experts.
        ends: int32 [count], the end of each expert's pairs in `order`.
    """
    pairs = chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    ends = torch.empty(count, dtype=torch.int32, device=chosen.device)
    size = 512 if pairs <= 4096 else 4096  # pairs that a program reads at a time
    _sort_kernel[(count,)](
        chosen, order, ends, pairs, size, num_warps=size // 256, launch_pdl=PDL
    )
    return order, ends


def combine(
    products: Tensor,
    weights: Tensor,
    chosen: Tensor,
    count: int,
    out: Tensor,
    *,
    adds: bool = False,
) -> None:
    """Sums the products of each token with its experts, multiplied by their weights.

    Args:
        products: [T * k, n], one row for each pair of a token and a chosen expert.
        weights: float32 [T, k].
        chosen: int64 [T, k]. Experts from `count` on have no products and are skipped.
        out: [T, n], the sums.
        adds: the sums are added to `out`.
    """
    num_tokens, num_chosen = chosen.shape
    width = products.shape[1]
    _combine_kernel[(num_tokens, triton.cdiv(width, _COMBINE_COLUMNS))](
        products,
        weights,
        chosen,
        out,
        count,
        WIDTH=width,
        NUM_CHOSEN=num_chosen,
        COLUMNS=_COMBINE_COLUMNS,
        ADD=adds,
        num_warps=_COMBINE_COLUMNS // 256,  # each thread loads 16 bytes at once
        launch_pdl=PDL,
    )


def mixture(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    total: int,
    tiles: Any = None,
) -> Tensor:
    """Sends tokens through their experts and sums the results.

    Args:
        x: [T, hidden].
        gate_up: [experts of this rank, 2 n, hidden]. silu(first half of the product) is
            multiplied by the second half.
        down: [experts of this rank, hidden, n].
        weights: float32 [T, k], the weights of the experts.
        chosen: int64 [T, k], ids of experts. The experts with ids below `len(down)` are
            on this rank; all others are skipped.
        total: number of experts on all ranks.
        tiles: the pair of tiles of an item of TILES; None: chosen by the mean number of
            rows of an expert.

    Returns:
        [T, hidden].
    """
    num_chosen = chosen.shape[1]
    count = len(down)
    pairs = chosen.numel()
    order, ends = sort_pairs(chosen, count)
    if not tiles:
        mean_rows = pairs // total
        tiles = next(tile for max_rows, tile in TILES if mean_rows <= max_rows)
    gated_tile, down_tile = tiles
    inner = _multiply_groups(
        x, gate_up, order, ends, pairs, num_chosen, gated_tile, is_gated=True
    )
    products = _multiply_groups(
        inner, down, order, ends, pairs, num_chosen, down_tile, is_gated=False
    )
    out = torch.empty_like(x)
    combine(products, weights, chosen, count, out)
    return out


def _multiply_groups(
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    ends: Tensor,
    pairs: int,
    num_chosen: int,
    tile: Any,
    *,
    is_gated: bool,
) -> Tensor:
    """Multiplies rows by the matrices of their experts. See `_grouped`."""
    rows, columns, depth, is_swapped, warps, stages = tile
    halves = 2 if is_gated else 1
    count, height, width = weight.shape
    num_out = height // halves
    shape = [count * halves, num_out, width]
    strides = [num_out * width, width, 1]
    num_programs = min(pairs, count + pairs // rows) * triton.cdiv(num_out, columns)
    out = x.new_empty(pairs, num_out)
    _grouped_kernel[(num_programs,)](
        x,
        TensorDescriptor(weight, shape, strides, [halves, columns, depth]),
        order,
        ends,
        out,
        count,
        num_out,
        WIDTH=width,
        NUM_CHOSEN=num_chosen,
        GATED=is_gated,
        SWAPPED=is_swapped,
        EXPERTS=triton.next_power_of_2(count),
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=PDL,
    )
    return out
