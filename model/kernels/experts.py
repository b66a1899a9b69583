"""Triton kernels for a mixture of experts in 16 bits: choice, sorting, products of groups of rows.

No kernel adds by atomics: the same input gives the same sums. Each begins while another ends.
"""

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.launch import PDL, let_next_begin, let_next_begin_and_wait, wait
from model.architectures.experts import MoEConfig
from model.fused_kernels import FOLD
from model.quantization.kernels import tile_of
from model.quantization.quantized import FP8, Quantized, Weight


def _of_kept_groups(  # type: ignore[no-untyped-def]
    choice, index, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """What experts are chosen by, less those outside the groups whose best add up to the most."""
    group, of_expert = tl.arange(0, PADDED), index // SIZE
    members = tl.where(
        of_expert[None, :] == group[:, None], choice[None, :], float("-inf")
    )
    sums = tl.where(group < GROUPS, 0.0, float("-inf"))
    for _ in tl.static_range(BEST):
        sums += tl.max(members, 1)
        best = tl.argmax(members, 1)
        members = tl.where(index[None, :] == best[:, None], float("-inf"), members)
    kept = index < 0
    for _ in tl.static_range(KEPT):
        best_group = tl.argmax(sums, 0)
        kept = kept | (of_expert == best_group)
        sums = tl.where(group == best_group, float("-inf"), sums)
    return tl.where(kept, choice, float("-inf"))


_kept_groups: Any = triton.jit(_of_kept_groups)


def _choose(  # type: ignore[no-untyped-def]
    logits, correction, weights, chosen, num_experts, scale, CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    is_one = index < num_experts
    bias = (
        tl.load(correction + index, mask=is_one, other=0.0)
        if correction is not None
        else 0.0
    )
    let_next_begin_and_wait()
    logit = tl.load(
        logits + row * num_experts + index, mask=is_one, other=float("-inf")
    )
    score = tl.sigmoid(logit) if SIGMOID else tl.exp(logit - tl.max(logit, 0))
    if not SIGMOID and (correction is not None or not NORMALIZED):
        score = score / tl.sum(score, 0)
    left = score + bias
    if correction is None and GROUPS == 1 and not SIGMOID:
        left = logit  # the same order, without scores that are too small to differ
    left = tl.where(is_one, tl.where(left == left, left, float("inf")), float("-inf"))
    if GROUPS > 1:
        left = _kept_groups(left, index, GROUPS, SIZE, KEPT, BEST, PADDED)
    # In the order of integers, whose largest a warp finds in one instruction.
    bits = (left + 0.0).to(tl.int32, bitcast=True)  # 0 where it is -0
    order, place = (
        bits ^ ((bits >> 31) & 0x7FFFFFFF),
        tl.full((EXPERTS,), CHOSEN, tl.int32),
    )
    for turn in tl.static_range(CHOSEN):
        best = tl.min(tl.where(order == tl.max(order, 0), index, EXPERTS), 0)
        place = tl.where(index == best, turn, place)
        order = tl.where(index == best, -(1 << 31), order)
    is_chosen, at = place < CHOSEN, row * CHOSEN + place
    if NORMALIZED:
        score = score / (tl.sum(tl.where(is_chosen, score, 0.0), 0) + 1e-20)
    tl.store(weights + at, score * scale, mask=is_chosen)
    tl.store(chosen + at, index, mask=is_chosen)


_choose_kernel: Any = triton.jit(_choose)


def choose(
    logits: Tensor, correction: Tensor | None, config: MoEConfig, group_best: int
) -> tuple[Tensor, Tensor]:
    """See Router.choose: of float32 [T, experts] and [experts]; NaNs first, of equals the first."""
    (num_rows, num_experts), num = logits.shape, config.experts_per_token
    weights = logits.new_empty(num_rows, num)
    ids = logits.new_empty(num_rows, num, dtype=torch.int64)
    groups, padded = config.num_groups, triton.next_power_of_2(num_experts)
    _choose_kernel[(num_rows,)](
        logits, correction, weights, ids, num_experts, config.routed_scaling_factor, CHOSEN=num,
        EXPERTS=padded, SIGMOID=config.scoring == "sigmoid", NORMALIZED=config.is_normalized,
        GROUPS=groups, SIZE=num_experts // groups, KEPT=config.topk_groups, BEST=group_best,
        PADDED=triton.next_power_of_2(groups), num_warps=1, launch_pdl=PDL,
    )  # fmt: skip
    return weights, ids


def _sort(chosen, order, ends, pairs, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program finds the pairs of one expert, and how many are of those before it."""
    own, none = tl.program_id(0), 1 << 30
    let_next_begin_and_wait()
    before = tl.zeros((SIZE,), tl.int32)
    for begin in range(0, pairs, SIZE):
        pair = begin + tl.arange(0, SIZE)
        expert = tl.load(chosen + pair, mask=pair < pairs, other=none)
        before += (expert < own).to(tl.int32)
    place = tl.sum(before, 0)
    for begin in range(0, pairs, SIZE):
        pair = begin + tl.arange(0, SIZE)
        found = tl.load(chosen + pair, mask=pair < pairs, other=none) == own
        rank = tl.cumsum(found.to(tl.int32), 0)
        tl.store(order + place + rank - 1, pair, mask=found)
        place += tl.sum(found.to(tl.int32), 0)
    tl.store(ends + own, place)


_sort_kernel: Any = triton.jit(_sort, do_not_specialize=["pairs"])


def _grouped(  # type: ignore[no-untyped-def]
    x, weight, order, ends, out, num_experts, num_out,
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr, GATED: tl.constexpr, SWAPPED: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """GATED: rows of x are tokens, and the result's are sorted; else those of x are sorted, and
    the result's are pairs. SWAPPED: the matrix on the left, whose tiles may not be small."""
    across = tl.cdiv(num_out, COLUMNS)
    column = tl.program_id(0) % across * COLUMNS
    let_next_begin_and_wait()
    first, last, expert = tile_of(
        ends, tl.program_id(0) // across, 0, num_experts, EXPERTS, ROWS
    )
    if first < last:
        row = first + tl.arange(0, ROWS)
        pair = tl.load(order + row, mask=row < last, other=0)
        source = pair // CHOSEN if GATED else tl.minimum(row, last - 1)
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

# By the rows of an expert, at most: of the gated product and of the one after it rows of x, columns
# of the result, elements of a row multiplied at a time, whether the matrix is on the left, warps
# and stages; the fastest of some on an H200, with 128 experts of 768 in a model of 2,048.
TILES: Final = (
    (8, ((16, 64, 128, True, 4, 3), (16, 128, 64, True, 4, 4))),
    (32, ((32, 64, 128, True, 4, 3), (32, 128, 64, True, 4, 4))),
    (128, ((64, 128, 64, False, 4, 4), (64, 256, 64, False, 4, 4))),
    (math.inf, ((128, 128, 64, False, 8, 4), (128, 256, 64, False, 8, 4))),
)


def works(gate_up: Tensor, down: Tensor) -> bool:
    """Whether `mixture` takes them, on a GPU: by whole depths of each tile."""
    is_hopper = torch.cuda.get_device_capability(down.device)[0] == 9
    are_whole = gate_up.shape[2] % 128 == down.shape[2] % 64 == 0
    return is_hopper and are_whole and gate_up.is_contiguous() and down.is_contiguous()


def _combine(  # type: ignore[no-untyped-def]
    shares, weights, chosen, out, num_experts,
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    let_next_begin_and_wait()
    pair = token * CHOSEN + slot
    is_here = (
        tl.load(chosen + pair, mask=slot < CHOSEN, other=num_experts) < num_experts
    )
    weight = tl.load(weights + pair, mask=is_here, other=0.0)
    inside = is_here[:, None] & (column < WIDTH)[None, :]
    each = tl.load(
        shares + pair[:, None] * WIDTH + column[None, :], mask=inside, other=0.0
    )
    result = tl.sum(each.to(tl.float32) * weight[:, None], 0)
    tl.store(
        out + token * WIDTH + column,
        result.to(out.dtype.element_ty),
        mask=column < WIDTH,
    )


_combine_kernel: Any = triton.jit(_combine)


# What a thread loads at once of x in 16 bytes, FOLD columns, is summed up in it. Of codes, GROUP
# columns have a scale; a row has GROUPS of them, 0: they are no codes.
def _products(  # type: ignore[no-untyped-def]
    tile,
    value,
    scales,
    row,
    start,
    FOLD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Sums of parts, scaled by their groups: those of `row` [...], and of columns from `start`."""
    product = tile.to(tl.float32) * value
    PARTS: tl.constexpr = product.shape[-1] // FOLD
    shape: tl.constexpr = product.shape[:-1] + (PARTS, FOLD)  # noqa: RUF005 (Triton has no *)
    sums = tl.sum(tl.reshape(product, shape), len(product.shape))
    if GROUPS > 1:
        group = (start + tl.arange(0, PARTS) * FOLD) // GROUP
        sums *= tl.load(scales + tl.expand_dims(row * GROUPS, len(row.shape)) + group)
    return sums


_sums_of_products: Any = triton.jit(_products)


def _one_gated(  # type: ignore[no-untyped-def]
    x, weight, scales, norm, chosen, inner, eps, num_experts, NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FOLD: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Some rows of one token's gate and up products, by one of its experts."""
    slot, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    if NORM:
        factor = tl.load(norm + column)
    wait()
    expert = tl.load(chosen + slot)
    let_next_begin()  # not before: see _one_down
    value = tl.load(x + column)
    if expert < num_experts:
        own = expert * 2 * NUM_OUT + row
        at = weight + own[:, None] * WIDTH + column[None, :]
        by_gate = tl.load(scales + own) if GROUPS == 1 else 1.0
        by_up = tl.load(scales + own + NUM_OUT) if GROUPS == 1 else 1.0
        gate = tl.zeros((ROWS, COLUMNS // FOLD), tl.float32)
        up = tl.zeros((ROWS, COLUMNS // FOLD), tl.float32)
        squares = tl.zeros((COLUMNS,), tl.float32)
        for start in tl.static_range(0, WIDTH, COLUMNS):
            gates = tl.load(at + start, eviction_policy="evict_first")
            ups = tl.load(at + start + NUM_OUT * WIDTH, eviction_policy="evict_first")
            wide = value.to(tl.float32)
            if NORM:
                squares += wide * wide
                wide *= factor.to(tl.float32)
            if start + COLUMNS < WIDTH:
                value = tl.load(x + start + COLUMNS + column)
                if NORM:
                    factor = tl.load(norm + start + COLUMNS + column)
            of_all = wide[None, :]
            gate += _sums_of_products(
                gates, of_all, scales, own, start, FOLD, GROUP, GROUPS
            )
            up += _sums_of_products(
                ups, of_all, scales, own + NUM_OUT, start, FOLD, GROUP, GROUPS
            )
        size = tl.sqrt(tl.sum(squares) / WIDTH + eps) if NORM else 1.0
        gated, other = tl.sum(gate, 1) * by_gate / size, tl.sum(up, 1) * by_up / size
        gated = gated / (1 + tl.exp(-gated)) * other
        tl.store(inner + slot * NUM_OUT + row, gated.to(inner.dtype.element_ty))


def _one_down(  # type: ignore[no-untyped-def]
    inner, weight, scales, weights, chosen, residual, out, num_experts, NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Some rows of one token's result. All programs of the kernel before it have seen the choice,
    which is read without waiting for them, and so is the first tile of the matrices."""
    slot, column = tl.arange(0, SLOTS), tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(chosen + slot, mask=slot < CHOSEN, other=num_experts)
    is_here = expert < num_experts
    own = tl.where(is_here, expert, 0)[:, None] * NUM_OUT + row[None, :]
    at = weight + own[:, :, None] * WIDTH + column[None, None, :]
    here = is_here[:, None, None]
    tile = tl.load(at, mask=here, other=0.0, eviction_policy="evict_first")
    share = tl.load(weights + slot, mask=is_here, other=0.0)[:, None]
    if GROUPS == 1:
        share *= tl.load(scales + own)
    let_next_begin_and_wait()
    added = tl.load(residual + row).to(tl.float32) if ADD else 0.0
    sums = tl.zeros((SLOTS, ROWS, COLUMNS // FOLD), tl.float32)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        of_x = inner + slot[:, None] * WIDTH + start + column[None, :]
        value = tl.load(of_x, mask=is_here[:, None], other=0.0).to(tl.float32)[
            :, None, :
        ]
        sums += _sums_of_products(tile, value, scales, own, start, FOLD, GROUP, GROUPS)
        if start + COLUMNS < WIDTH:
            after = at + start + COLUMNS
            tile = tl.load(after, mask=here, other=0.0, eviction_policy="evict_first")
    result = tl.sum(tl.sum(sums, 2) * share, 0) + added
    tl.store(out + row, result.to(out.dtype.element_ty))


_one_gated_kernel: Any = triton.jit(_one_gated)
_one_down_kernel: Any = triton.jit(_one_down)
_GATED_OF_ONE: Final = 4, 1024, 8  # rows of a program, columns at a time, warps
_GATED_OF_CODES: Final = 8, 512, 4
_DOWN_OF_ONE: Final = 8, 256, 8


def _tile_of(weight: Weight, most: int) -> dict[str, int]:
    """How a program takes a row: see _products."""
    width, group, groups = weight.shape[2], 1, 0
    if isinstance(weight, Quantized):
        group, groups = weight.group, weight.scales.shape[2]
    columns = min(width & -width, most)
    return {
        "WIDTH": width,
        "COLUMNS": columns,
        "FOLD": FOLD,
        "GROUP": group,
        "GROUPS": groups,
    }


def takes_one(*weights: Weight) -> bool:
    """Whether `mixture_of_one` takes these, on a GPU: on Hopper, and of codes those of FP8."""
    codes = [each for each in weights if isinstance(each, Quantized)]
    if any(
        c.kind != "fp8" or c.scales.dtype != torch.float32 or c.group % FOLD
        for c in codes
    ):
        return False
    is_hopper = torch.cuda.get_device_capability(weights[0].device)[0] == 9
    return is_hopper and all(weight.shape[2] % 64 == 0 for weight in weights)


def _matrix(weight: Weight) -> tuple[Tensor, Tensor | None]:
    if isinstance(weight, Tensor):
        return weight, None
    return weight.codes.view(FP8), weight.scales


def mixture_of_one(
    x: Tensor, gate_up: Weight, down: Weight, weights: Tensor, chosen: Tensor,
    *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`mixture` of one token, normed first; `residual` [1, hidden] is added to, and returned."""
    (count, width, num), each = down.shape, chosen.shape[1]
    inner = x.new_empty(each, num)
    out = torch.empty_like(x) if residual is None else residual
    rows, most, warps = (
        _GATED_OF_ONE if isinstance(gate_up, Tensor) else _GATED_OF_CODES
    )
    _one_gated_kernel[(num // rows, each)](
        x, *_matrix(gate_up), norm, chosen, inner, eps, count, NUM_OUT=num, ROWS=rows,
        NORM=norm is not None, **_tile_of(gate_up, most), num_warps=warps, launch_pdl=PDL,
    )  # fmt: skip
    rows, most, warps = _DOWN_OF_ONE
    _one_down_kernel[(width // rows,)](
        inner, *_matrix(down), weights, chosen, residual, out, count, NUM_OUT=width, CHOSEN=each,
        SLOTS=triton.next_power_of_2(each), ADD=residual is not None, ROWS=rows,
        **_tile_of(down, most), num_warps=warps, launch_pdl=PDL,
    )  # fmt: skip
    return out


def mixture(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, total: int,
    tiles: Any = None,
) -> Tensor:  # fmt: skip
    """x [T, hidden] through `chosen` experts int64 [T, k], summed by weights float32 [T, k]: by
    gate_up [experts, 2 n, hidden], silu of the first half times the second, by down [experts,
    hidden, n]. Ids from `experts` on are another rank's; all are below `total`."""
    (num_tokens, each), (count, width, _), pairs = (
        chosen.shape,
        down.shape,
        chosen.numel(),
    )
    order, ends = (x.new_empty(size, dtype=torch.int32) for size in (pairs, count))
    size = 512 if pairs <= 4096 else 4096  # pairs looked at at a time
    _sort_kernel[(count,)](
        chosen, order, ends, pairs, size, num_warps=size // 256, launch_pdl=PDL
    )
    tiles, found = tiles or next(t for most, t in TILES if pairs // total <= most), x
    for weight, tile, halves in zip((gate_up, down), tiles, (2, 1), strict=True):
        rows, columns, depth, is_swapped, warps, stages = tile
        num_out, own = weight.shape[1] // halves, weight.shape[2]
        shape, strides = [count * halves, num_out, own], [num_out * own, own, 1]
        programs = min(pairs, count + pairs // rows) * triton.cdiv(num_out, columns)
        before, found = found, x.new_empty(pairs, num_out)
        _grouped_kernel[(programs,)](
            before, TensorDescriptor(weight, shape, strides, [halves, columns, depth]),
            order, ends, found, count, num_out, WIDTH=own, CHOSEN=each, GATED=halves == 2,
            SWAPPED=is_swapped, EXPERTS=triton.next_power_of_2(count), ROWS=rows, COLUMNS=columns,
            DEPTH=depth, num_warps=warps, num_stages=stages, launch_pdl=PDL,
        )  # fmt: skip
    out, columns = torch.empty_like(x), 512
    _combine_kernel[(num_tokens, triton.cdiv(width, columns))](
        found, weights, chosen, out, count, WIDTH=width, CHOSEN=each,
        SLOTS=triton.next_power_of_2(each), COLUMNS=columns, num_warps=4, launch_pdl=PDL,
    )  # fmt: skip
    return out
